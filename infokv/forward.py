"""Running a text through a model chunk by chunk, over a token store.

The only loop over chunks: the prefill of a prompt and the lockstep continuation of ablated rows both go
through :func:`forward_chunks`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

from infokv.attention import ONE_AT_A_TIME, AttentionListener, attached
from infokv.errors import Refused
from infokv.store import TokenStore

#: RoPE types whose frequencies depend on the largest position of a call.
_LENGTH_DEPENDENT = ("longrope", "dynamic")

#: Logits held at a time, elements over all rows.
_LOGITS = 1 << 24


class BlockListener(Protocol):
    """Somebody who wants the output of each decoder block (the residual stream)."""

    def on_block(self, layer: int, states: torch.Tensor) -> None:
        """``states`` is ``[rows, new tokens, hidden]``; that of the last layer precedes the final norm."""


def forward_chunks(
    model,
    store: TokenStore,
    input_ids: torch.Tensor,
    *,
    chunk_size: int,
    total_length: int,
    listeners: tuple[AttentionListener, ...] = (),
    block_listeners: tuple[BlockListener, ...] = (),
) -> Iterator[tuple[int, torch.Tensor]]:
    """Feed tokens to the model in chunks; keys and values go to the store.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model with its head.
    store : TokenStore
        Receives the tokens behind those it has seen.
    input_ids : int Tensor ``[rows, tokens]``
    chunk_size : int
        Tokens of a call; changes the speed only.
    total_length : int
        Length of the whole text, of which this may be a part. RoPE whose frequencies depend on the length
        is fixed for it.

    Yields
    ------
    start : int
        Position of the chunk's first token.
    states : Tensor ``[rows, chunk, hidden]``
        What the model's head takes: final states after the last norm.
    """
    base = model.base_model
    if chunk_size < 1:
        raise Refused(f"chunk_size is {chunk_size}; a call takes at least 1 token.")
    if base is model:
        raise Refused(f"{type(model).__name__} has no base model under its head; pass the causal model itself.")
    cache_name = cache_argument(base)
    for offset in range(0, input_ids.shape[1], chunk_size):
        ids = input_ids[:, offset : offset + chunk_size]
        start = store.seen
        positions = torch.arange(start, start + ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
        # All of it lasts for one call: whoever consumes this generator may use the model in between.
        with (
            ONE_AT_A_TIME,
            torch.no_grad(),
            _hooks(model, block_listeners),
            fixed_rope(model, total_length),
            attached(model, store, listeners),
        ):
            out = base(input_ids=ids, position_ids=positions, use_cache=True, **{cache_name: store})
        yield start, out.last_hidden_state


def cache_argument(module: nn.Module) -> str:
    """How this version of transformers calls the cache: ``cache`` or ``past_key_values``."""
    names = inspect.signature(type(module).forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def decoder_layers(model) -> nn.ModuleList:
    """The list of decoder blocks.

    Raises
    ------
    Refused
        If the model has none of the right length.
    """
    count = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise Refused(f"{type(model).__name__} has no list of {count} decoder blocks, which is needed here.")


@contextlib.contextmanager
def _hooks(model, block_listeners: tuple[BlockListener, ...]) -> Iterator[None]:
    handles = []
    try:
        for index, block in enumerate(decoder_layers(model) if block_listeners else ()):

            def tell(module, args, output, index=index):
                states = output[0] if isinstance(output, tuple) else output
                for listener in block_listeners:
                    listener.on_block(index, states)

            handles.append(block.register_forward_hook(tell))
        yield
    finally:
        for handle in handles:
            handle.remove()


class Head:
    """The model's own way from final states to logits: projection, soft-cap and scale included.

    The model's forward runs with its base replaced by the given states, so nothing of the head is
    written again here.
    """

    def __init__(self, model):
        self._model = model

    @property
    def vocabulary(self) -> int:
        """Number of logits per token."""
        return self._model.get_output_embeddings().weight.shape[0]

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """``[rows, tokens, hidden]`` to logits ``[rows, tokens, vocabulary]`` in the model's dtype."""
        from transformers.modeling_outputs import BaseModelOutputWithPast

        class FinalStates(BaseModelOutputWithPast):
            """Whatever else a head looks for (router logits, cross attentions) is absent."""

            def __getattr__(self, name):
                if name.startswith("__"):
                    raise AttributeError(name)

        base = self._model.base_model
        with ONE_AT_A_TIME, torch.no_grad():
            patched = base.__dict__.get("forward")
            base.forward = lambda *args, **kwargs: FinalStates(last_hidden_state=states)
            try:
                ids = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
                return self._model(input_ids=ids, use_cache=False).logits
            finally:
                del base.forward
                if patched is not None:
                    base.forward = patched


def logit_slices(head: Head, states: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Logits of a chunk of final states, a few tokens at a time: start in the chunk, and logits.

    Logits of a whole chunk would outweigh everything else in memory.
    """
    step = max(1, _LOGITS // (states.shape[0] * head.vocabulary))
    for start in range(0, states.shape[1], step):
        # Contiguous, so that the rows fold into one matrix product with the vocabulary.
        yield start, head(states[:, start : start + step].contiguous())


@contextlib.contextmanager
def fixed_rope(model, total_length: int) -> Iterator[None]:
    """Make RoPE frequencies those of a text of ``total_length`` tokens, whatever positions a call has.

    Types ``longrope`` and ``dynamic`` choose them by the largest position of a call, so that chunks of a
    long text would silently differ from the whole. Inside the block such a module always sees the last
    position of the text as well. Others are left alone.
    """
    handles, states = [], []
    try:
        for module in model.modules():
            types = getattr(module, "rope_type", None)
            types = types.values() if isinstance(types, dict) else [types]
            if not any(kind in str(name) for name in types for kind in _LENGTH_DEPENDENT):
                continue
            states.append((module, dict(module.__dict__), dict(module._buffers)))
            _forget_length(module)

            def lengthen(module, args, kwargs):
                args = list(args)
                held = kwargs if "position_ids" in kwargs else args
                name = "position_ids" if held is kwargs else 1
                last = held[name].new_full((held[name].shape[0], 1), total_length - 1)
                held[name] = torch.cat([held[name], last], dim=-1)
                return tuple(args), kwargs

            def shorten(module, args, output):
                return tuple(part[..., :-1, :] for part in output)

            handles.append(module.register_forward_pre_hook(lengthen, with_kwargs=True))
            handles.append(module.register_forward_hook(shorten))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, attributes, buffers in states:
            for name in [name for name in module.__dict__ if name not in attributes]:
                del module.__dict__[name]
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def _forget_length(module: nn.Module) -> None:
    """Drop what a dynamic RoPE module remembers of longer texts, on copies of its buffers."""
    for name, buffer in list(module._buffers.items()):
        original = getattr(module, name.replace("inv_freq", "original_inv_freq"), None)
        if name.endswith("inv_freq") and "original" not in name and original is not None:
            module._buffers[name] = original.detach().clone().to(buffer.device)
    for name in list(module.__dict__):
        if name.endswith("max_seq_len_cached"):
            module.__dict__[name] = module.original_max_seq_len
