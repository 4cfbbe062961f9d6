"""What surrounds one call of a model on a token store: attention, hooks, RoPE, and taking turns."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

from infokv.attention import ONE_AT_A_TIME, AttentionListener, attached, configs_of
from infokv.errors import Refused
from infokv.store import TokenStore

#: RoPE types whose frequencies depend on the largest position of a call.
_LENGTH_DEPENDENT = ("longrope", "dynamic")


class BlockListener(Protocol):
    """Somebody who wants the output of each decoder block (the residual stream)."""

    def on_block(self, layer: int, states: torch.Tensor) -> None:
        """``states`` is ``[rows, new tokens, hidden]``; that of the last layer precedes the final norm."""


class StoreCalls:
    """Calls of one model on token stores; what they need of the model is looked up once.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model with its head.

    Raises
    ------
    Refused
        If the model has no base model under its head.
    """

    def __init__(self, model):
        if model.base_model is model:
            raise Refused(f"{type(model).__name__} has no base model under its head; pass the causal model itself.")
        self.model = model
        self.base = model.base_model
        self.cache_name = cache_argument(self.base)
        self._configs = configs_of(model)
        self._rope = length_dependent(model)

    @contextlib.contextmanager
    def on(self, store: TokenStore, total_length: int, listeners: tuple[AttentionListener, ...] = (),
           block_listeners: tuple[BlockListener, ...] = ()) -> Iterator[None]:  # fmt: skip
        """One call inside the block reads and fills ``store``; the model is as before afterwards.

        Parameters
        ----------
        total_length : int
            Length of the whole text, of which the call may see a part. RoPE whose frequencies depend on the length
            is fixed for it.
        """
        with (
            ONE_AT_A_TIME,
            torch.no_grad(),
            _hooks(self.model, block_listeners),
            _fixed(self._rope, total_length),
            attached(self.model, store, listeners, self._configs),
        ):
            yield

    @property
    def rope_varies(self) -> bool:
        """Whether keys are rotated by the length of the text."""
        return bool(self._rope)

    def same_rope(self, one: int, other: int) -> bool:
        """Whether texts of these two lengths are rotated alike, as they are by most models."""
        return all(torch.equal(a, b) for a, b in zip(self._rotations(one), self._rotations(other)))

    def _rotations(self, total_length: int) -> list[torch.Tensor]:
        """Cosines at position 1 in a text of this length, for all modules that depend on it."""
        found = []
        with ONE_AT_A_TIME, _fixed(self._rope, total_length):
            for module in self._rope:
                like = next(module.buffers())
                place = torch.ones(1, 1, dtype=torch.long, device=like.device)
                kinds = [(one,) for one in module.rope_type] if isinstance(module.rope_type, dict) else [()]
                found += [module(like, place, *kind)[0] for kind in kinds]
        return found


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


@contextlib.contextmanager
def evaluation(model) -> Iterator[None]:
    """Dropout and autocast off inside the block; the training flag of every module is put back afterwards."""
    device = model.get_input_embeddings().weight.device.type
    with ONE_AT_A_TIME, torch.autocast(device_type=device, enabled=False):
        training = [module for module in model.modules() if module.training]
        try:
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True


def length_dependent(model) -> list[nn.Module]:
    """RoPE modules whose frequencies depend on the largest position of a call."""
    found = []
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        types = types.values() if isinstance(types, dict) else [types]
        if any(kind in str(name) for name in types for kind in _LENGTH_DEPENDENT):
            found.append(module)
    return found


@contextlib.contextmanager
def fixed_rope(model, total_length: int) -> Iterator[None]:
    """Make RoPE frequencies those of a text of ``total_length`` tokens, whatever positions a call has.

    Types ``longrope`` and ``dynamic`` choose them by the largest position of a call, so that chunks of a
    long text would silently differ from the whole. Inside the block such a module always sees the last
    position of the text as well. Others are left alone.
    """
    with _fixed(length_dependent(model), total_length):
        yield


@contextlib.contextmanager
def _fixed(modules: list[nn.Module], total_length: int) -> Iterator[None]:
    handles, states = [], []
    try:
        for module in modules:
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
