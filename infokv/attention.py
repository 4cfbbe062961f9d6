"""The one attention function, over a token store.

It is registered with transformers by name (with a mask function of the same name, without which padding
would vanish silently) and serves every architecture: queries arrive after RoPE and normalisation, keys
come from the store, and what a query may see follows from slot positions, the layer's sliding window and
the hidden flags.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F

from infokv.errors import Refused
from infokv.kernels import LayerFacts, causal, halves, softcapped
from infokv.store import TokenStore
from infokv.store_layer import StoreLayer
from infokv.visibility import visibility

NAME = "infokv_store"

#: Keywords that models hand to every attention function and that change nothing here.
_HARMLESS = frozenset(
    {"position_ids", "position_embeddings", "use_cache", "cache", "past_key_values", "cache_position",
     "output_attentions", "output_hidden_states", "return_dict", "is_causal", "logits_to_keep", "kwargs"}
)  # fmt: skip

#: Further back than any sliding window reaches.
_FAR = 1 << 40


class AttentionListener(Protocol):
    """Somebody who wants the true post-RoPE queries of each layer."""

    def on_attention(self, layer: int, queries: torch.Tensor, stored: StoreLayer, facts: LayerFacts) -> None:
        """``queries`` is ``[rows, query_heads, new tokens, head_dim]``; ``stored`` holds their keys already."""


@dataclass
class _Session:
    store: TokenStore
    listeners: tuple[AttentionListener, ...]
    calls: list[int] = field(default_factory=list)  # layers that asked for attention, in order
    masks: dict = field(default_factory=dict)  # of this forward, by window
    window_in_mask: bool = False  # the model built a mask that ends behind a window
    window_in_layer: bool = False  # a layer handed its window to the attention function


#: What a call changes for a moment (the attention's name, RoPE, the head's input) belongs to the model, not to a
#: thread: calls of several threads take turns.
ONE_AT_A_TIME = threading.RLock()

_ACTIVE: ContextVar[_Session | None] = ContextVar("infokv_session", default=None)


@contextlib.contextmanager
def attached(model, store: TokenStore, listeners: tuple[AttentionListener, ...] = (), configs=None) -> Iterator[None]:
    """Run one forward of ``model`` on ``store`` inside the block; the model is as before afterwards.

    Parameters
    ----------
    configs : list, optional
        :func:`configs_of` the model, where it is called often.

    Raises
    ------
    Refused
        If another store is attached already, or if the forward did not go through this attention in every layer:
        a model with attention of its own would leave the store unread, and every number wrong.
    """
    if _ACTIVE.get() is not None:
        raise Refused("A token store is attached already; leave that block first.")
    _register()
    session = _Session(store, tuple(listeners))
    token = _ACTIVE.set(session)
    store.gate[0] = True
    try:
        with attention_named(model, NAME, configs):
            yield
    finally:
        store.gate[0] = False
        _ACTIVE.reset(token)
    name = type(model).__name__
    if session.calls != list(range(len(store.layers))):
        raise Refused(
            f"{name} asked for attention in layers {session.calls} of {len(store.layers)}, not once in each; it "
            "computes some of its attention in a way of its own. Use another model."
        )
    if session.window_in_mask and not session.window_in_layer:
        raise Refused(
            f"{name} has a sliding window in its mask alone, of which its layers say nothing here; the window would be "
            "ignored. Use another model."
        )


def configs_of(model) -> list:
    """Every configuration object that a model's modules read."""
    return list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())


@contextlib.contextmanager
def attention_named(model, name: str, configs=None) -> Iterator[None]:
    """Let a model use the attention function of this name inside the block."""
    before = [(config, config._attn_implementation) for config in configs or configs_of(model)]
    try:
        for config, _ in before:
            config._attn_implementation = name
        yield
    finally:
        for config, usual in before:
            config._attn_implementation = usual


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(*args, attention_mask=None, use_vmap=False, mask_function=None, **kwargs) -> None:
    """No mask tensor: visibility comes from the store. What it cannot express is refused."""
    if attention_mask is not None and not bool(torch.as_tensor(attention_mask).all()):
        raise Refused("The batch is padded (its attention mask has zeros); use texts of equal length or one at a time.")
    if use_vmap:
        raise Refused("This model changes the causal mask by a function of its own, which is not supported.")
    session = _ACTIVE.get()
    if session is not None and mask_function is not None:
        far = mask_function(0, 0, torch.tensor(_FAR), torch.tensor(0))
        session.window_in_mask |= not bool(far)
    return None


def _attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None,
               softcap=None, **others):  # fmt: skip
    """Attention of new tokens over the stored ones; the signature is transformers'.

    Returns ``([rows, new tokens, query_heads, head_dim], None)``.
    """
    asked = (name for name, given in others.items() if given is not None and given is not False)
    unknown = sorted(name for name in asked if name not in _HARMLESS)
    if unknown or (dropout and module.training):
        raise Refused(
            f"{type(module).__name__} asks for {', '.join(unknown) or 'dropout'}, which this attention does not "
            f"know; leaving it out would give wrong numbers. {'Use another model' if unknown else 'Call model.eval()'}."
        )
    if attention_mask is not None:
        raise Refused("A ready-made attention mask was passed; hide positions through the store instead.")
    session = _ACTIVE.get()
    if session is None:
        raise Refused(f"The attention function {NAME!r} works only while a token store is attached.")
    index = module.layer_idx
    layer = session.store.layers[index]
    if not (_same(key, layer.stored_keys) and _same(value, layer.stored_values)):
        raise Refused(
            f"{type(module).__name__} does not attend to the keys and values that it stored; what is measured here is "
            "the cache. Use another model."
        )
    session.calls.append(index)
    facts = LayerFacts(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, sliding_window)
    session.window_in_layer |= sliding_window is not None
    for listener in session.listeners:
        listener.on_attention(index, query, layer, facts)
    return _attend(query, session, index, facts), None


def _same(given: torch.Tensor, stored: torch.Tensor) -> bool:
    """Whether a layer hands over what the store gave it, or an equal copy."""
    if given.shape != stored.shape:
        return False
    view = given.data_ptr() == stored.data_ptr() and given.stride() == stored.stride()
    return view or torch.equal(given, stored)


def _attend(query: torch.Tensor, session: _Session, index: int, facts: LayerFacts) -> torch.Tensor:
    """Grouped attention with the group folded into the queries: no key is repeated."""
    rows, query_heads, new, width = query.shape
    layer = session.store.layers[index]
    heads = layer.keys.shape[1]
    if _is_causal(session, layer, facts, query) and (layer.length == new or halves(query)):
        out = causal(query, layer.stored_keys, layer.stored_values, facts.scaling)
        return out.transpose(1, 2).contiguous()
    mask, first = visibility(
        session.store, index, facts.window, new, query_heads // heads, query.dtype, session.masks
    )  # fmt: skip
    keys, values = layer.stored_keys[:, :, first:], layer.stored_values[:, :, first:]
    folded = query.reshape(rows, heads, -1, width)
    if facts.softcap is None:
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=facts.scaling)
    else:
        out = softcapped(folded, keys, values, mask, facts)
    # Not view: kernels differ in the layout of what they return. Contiguous, as some models view the result.
    return out.reshape(rows, query_heads, new, -1).transpose(1, 2).contiguous()


def _is_causal(session: _Session, layer: StoreLayer, facts: LayerFacts, query: torch.Tensor) -> bool:
    """Whether several new tokens see all that was stored before, and of each other what came before."""
    plain = facts.softcap is None and session.store.hidden is None and query.shape[2] > 1
    inside = facts.window is None or (layer.consecutive and layer.length <= facts.window)
    alike = layer.keys.shape[-1] == layer.values.shape[-1] and query.dtype == layer.keys.dtype == layer.values.dtype
    return plain and inside and alike
