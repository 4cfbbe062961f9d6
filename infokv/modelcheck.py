"""A one-second check that an architecture does what the token store takes for granted.

Two chunks over the token store must give the logits of one plain forward, and hiding keys must give
those of a plain forward with them masked, by the model's own attention. What an architecture does differently
(positions, biases, sinks, and windows shorter than the check's text) shows here, not in somebody's results.
"""

from __future__ import annotations

import time
from weakref import WeakKeyDictionary

import torch

from infokv.attention import attention_named
from infokv.calls import evaluation, fixed_rope
from infokv.errors import Refused, is_out_of_memory
from infokv.forward import Head, forward_chunks
from infokv.store import TokenStore

_PREFIX, _LENGTH = 24, 40

#: Largest accepted error, relative to the largest logit. Eager attention takes its softmax in float32.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 5e-2}


#: What was found about models that are still alive; an architecture does not change.
_CHECKED: WeakKeyDictionary = WeakKeyDictionary()


def ensure_checked(model) -> dict:
    """:func:`check_model`, once for each model object."""
    if model not in _CHECKED:
        _CHECKED[model] = check_model(model)
    return _CHECKED[model]


def check_model(model) -> dict:
    """Compare a run over the token store with the model's own forward on a short random text.

    Returns
    -------
    dict
        ``error_chunked`` and ``error_masked`` (largest absolute logit error over the largest absolute logit),
        ``effect_masked`` (what the masked key changes, on the same scale), ``tolerance`` and ``seconds``.

    Raises
    ------
    Refused
        If an error is above the tolerance, or the model does not run in this way at all.
    """
    began = time.perf_counter()
    devices = sorted({str(one.device) for one in model.parameters()})
    if len(devices) > 1:
        raise Refused(f"{type(model).__name__} lies on {', '.join(devices)}; load it on one device.")
    device = model.get_input_embeddings().weight.device
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (1, _LENGTH), generator=generator).to(device)
    hidden = torch.zeros(1, 1, 1, _PREFIX, dtype=torch.bool, device=device)
    hidden[..., _PREFIX // 2 :] = True  # half of the prefix, so that the effect stands out from rounding
    name, head = type(model).__name__, Head(model)
    try:
        with torch.inference_mode(), evaluation(model):
            # Eager is the definition of an architecture; fused attentions have dropped soft-caps before.
            with attention_named(model, "eager"), fixed_rope(model, _LENGTH):
                plain, masked = (
                    head(model.base_model(ids, use_cache=False, return_dict=True, **mask).last_hidden_state).double()[
                        0, _PREFIX:
                    ]
                    for mask in ({}, {"attention_mask": _mask(model)})
                )
            store = _filled_store(model, ids[:, :_PREFIX]).fork(2, _LENGTH)
            store.hide(torch.cat([torch.zeros_like(hidden), hidden]))
            states = [states for _, states in forward_chunks(
                model, store, ids[:, _PREFIX:].expand(2, -1), chunk_size=7, total_length=_LENGTH
            )]  # fmt: skip
            ours = head(torch.cat(states, dim=1)).double()
    except Refused as error:
        raise Refused(f"{name} cannot run on a token store: {error}") from error
    except Exception as error:  # an architecture can fail here in any way, and none of them is a measurement
        if is_out_of_memory(error):
            raise
        sentence = " ".join(f"{type(error).__name__}: {error}".split())
        raise Refused(f"{name} cannot be run on a token store ({sentence}); use another model.") from error
    scale = max(1.0, plain.abs().max().item())
    result = {
        "error_chunked": (ours[0] - plain).abs().max().item() / scale,
        "error_masked": (ours[1] - masked).abs().max().item() / scale,
        "effect_masked": (masked - plain).abs().max().item() / scale,
        "tolerance": _TOLERANCE.get(plain_dtype(model), 1e-3),
        "seconds": round(time.perf_counter() - began, 3),
    }
    for what, label in (("error_chunked", "in chunks"), ("error_masked", "with hidden keys")):
        if not result[what] <= result["tolerance"]:
            raise Refused(
                f"{name} run {label} differs from its own forward by {result[what]:.2g} of the largest logit (allowed "
                f"{result['tolerance']:.0e}); its attention is not the one known here, so use another model."
            )
    if result["error_masked"] > 0.5 * result["effect_masked"]:
        raise Refused(
            f"{name} run with hidden keys differs from its own forward by {result['error_masked']:.2g} of the largest "
            f"logit, where hiding them changes {result['effect_masked']:.2g}; use another model or dtype."
        )
    return result


class _Blocks:
    """Refuses blocks whose output is not the residual stream: signals read it as one state per token."""

    def __init__(self, hidden: int):
        self._hidden = hidden

    def on_block(self, layer: int, states: torch.Tensor) -> None:
        shape, wanted = list(getattr(states, "shape", ())), [1, _PREFIX // 2, self._hidden]
        if shape != wanted:
            raise Refused(f"block {layer} gives states of shape {shape} instead of {wanted}; use another model.")


def _filled_store(model, ids: torch.Tensor) -> TokenStore:
    """The prefix in a token store, and a look at what each block gives on the way."""
    text = model.config.get_text_config()
    store = TokenStore(text.num_hidden_layers, _PREFIX)
    listeners = (_Blocks(text.hidden_size),)
    for _ in forward_chunks(
        model, store, ids, chunk_size=_PREFIX // 2, total_length=_LENGTH, block_listeners=listeners
    ):
        pass
    return store


def plain_dtype(model) -> torch.dtype:
    """Dtype of the model's weights."""
    return model.get_input_embeddings().weight.dtype


def _mask(model):
    """The additive mask ``[1, 1, length, length]`` of a plain forward that hides the key, or one per layer type."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [])
    window = getattr(config, "sliding_window", None)
    if {"full_attention", "sliding_attention"} <= kinds:
        return {"full_attention": _additive(model, None), "sliding_attention": _additive(model, window)}
    return _additive(model, None if kinds == {"full_attention"} else window)


def _additive(model, window: int | None) -> torch.Tensor:
    weight = model.get_input_embeddings().weight
    distance = torch.arange(_LENGTH)[:, None] - torch.arange(_LENGTH)[None]
    seen = (distance >= 0) & (distance < (window or _LENGTH))
    seen[_PREFIX:, _PREFIX // 2 : _PREFIX] = False
    mask = torch.zeros(1, 1, _LENGTH, _LENGTH, dtype=weight.dtype)
    return mask.masked_fill(~seen, torch.finfo(weight.dtype).min).to(weight.device)
