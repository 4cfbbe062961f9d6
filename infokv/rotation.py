"""Undoing and repeating a model's RoPE, with the model's own functions.

Whatever a model's layers do with their rotation (part of the channels, scaling, another layout, none in some
layers), each layer is asked once what it does to one token; what cannot be undone exactly is refused.
"""

from __future__ import annotations

import inspect
import sys
from weakref import WeakKeyDictionary

import torch
from torch import nn

from infokv.attention import ONE_AT_A_TIME, attention_named
from infokv.calls import evaluation
from infokv.errors import Refused

_FUNCTION = "apply_rotary_pos_emb"
_PROBE = "infokv_probe"

#: Where the token is put with which a layer is asked.
_PLACE = 7

#: Cosines and sines ``[tokens, rotary channels]`` of some positions, by layer type (None where there is one kind).
Tables = dict[str | None, tuple[torch.Tensor, torch.Tensor]]


class _Asked(Exception):
    """Carries the queries of a layer out of its forward."""


_KNOWN: WeakKeyDictionary = WeakKeyDictionary()


def rotation_of(model) -> Rotation:
    """The rotations of a model, asked for once."""
    if model not in _KNOWN:
        _KNOWN[model] = Rotation(model)
    return _KNOWN[model]


class Rotation:
    """The rotations of a model's layers.

    Parameters
    ----------
    model : PreTrainedModel

    Raises
    ------
    Refused
        If the queries of a layer cannot be had back from its rotated ones.
    """

    def __init__(self, model):
        self._name = type(model).__name__
        config = model.config.get_text_config()
        found = {m.layer_idx: m for m in model.base_model.modules() if _rotates_by_function(m)}
        if sorted(found) != list(range(config.num_hidden_layers)):
            raise self._refusal("its attention layers do not rotate by a function that can be found")
        self._rotary = self._module(model)
        typed = "layer_type" in inspect.signature(type(self._rotary).forward).parameters
        self._types = list(config.layer_types) if typed else [None] * len(found)
        self._functions = [getattr(sys.modules[type(found[i]).__module__], _FUNCTION) for i in range(len(found))]
        with ONE_AT_A_TIME, torch.no_grad(), evaluation(model):
            self._turns = [self._ask(model, found[index], index) for index in range(len(found))]

    def _refusal(self, reason: str) -> Refused:
        return Refused(
            f"{self._name} has no rotation that can be undone here ({reason}); use a scorer without unrotated queries."
        )

    def _module(self, model) -> nn.Module:
        modules = [m for m in model.base_model.modules() if hasattr(m, "rope_type") and not list(m.children())]
        if len(modules) != 1:
            raise self._refusal(f"{len(modules)} modules compute one")
        return modules[0]

    def tables(self, positions: torch.Tensor, like: torch.Tensor) -> Tables:
        """Cosines and sines of positions ``[tokens]`` in the dtype of ``like``, as the model's layers get them."""
        tables = {}
        for kind in dict.fromkeys(self._types):
            given = (like, positions[None]) if kind is None else (like, positions[None], kind)
            tables[kind] = tuple(part[0] for part in self._rotary(*given))
        return tables

    def mean_tables(self, positions: torch.Tensor, like: torch.Tensor) -> Tables:
        """Like :meth:`tables`, averaged over positions: rotating is linear in cosine and sine. One row each."""
        tables = self.tables(positions, like)
        return {kind: tuple(part.float().mean(0, keepdim=True) for part in pair) for kind, pair in tables.items()}

    def rotate(self, index: int, vectors: torch.Tensor, tables: Tables) -> torch.Tensor:
        """Vectors ``[heads, tokens, head_dim]`` rotated as layer ``index`` does, float32."""
        cos, sin = tables[self._types[index]]
        return self._turned(index, vectors, cos, sin) if self._turns[index] else vectors.float()

    def undo(self, index: int, vectors: torch.Tensor, tables: Tables) -> torch.Tensor:
        """Vectors ``[heads, tokens, head_dim]`` before layer ``index`` rotated them, float32."""
        return self._undone(index, vectors, *tables[self._types[index]]) if self._turns[index] else vectors.float()

    def _undone(self, index: int, vectors: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        cos, sin = cos.float(), sin.float()
        size = cos**2 + sin**2  # the square of what the model scales them by
        return self._turned(index, vectors, cos / size, -sin / size)

    def _turned(self, index: int, vectors: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        width = cos.shape[-1]
        vectors = vectors.float()
        part = vectors[None, ..., :width]
        turned, _ = self._functions[index](part, part, cos.float()[None], sin.float()[None])
        return torch.cat([turned[0], vectors[..., width:]], dim=-1)

    def _ask(self, model, layer: nn.Module, index: int) -> bool:
        """Whether a layer rotates; that it is undone exactly is made sure."""
        weight = next(layer.parameters())
        width = model.config.get_text_config().hidden_size
        state = torch.randn(1, 1, width, generator=torch.Generator().manual_seed(index)).to(weight.device)
        state = state.to(model.get_input_embeddings().weight.dtype)
        cos, sin = self.tables(torch.tensor([_PLACE], device=weight.device), state)[self._types[index]]
        plain = self._queries(model, layer, state, torch.ones_like(cos), torch.zeros_like(sin))
        turned = self._queries(model, layer, state, cos, sin)
        near = max(1e-4, 8 * torch.finfo(state.dtype).eps) * float(plain.abs().max())
        if bool((turned - plain).abs().max() <= near):
            return False
        if cos.shape[-1] > plain.shape[-1] or bool((self._undone(index, turned, cos, sin) - plain).abs().max() > near):
            raise self._refusal(f"layer {index} changes queries in another way, too")
        return True

    def _queries(self, model, layer, state, cos, sin) -> torch.Tensor:
        """Queries ``[heads, 1, head_dim]`` of one token with this rotation."""
        from transformers import AttentionInterface

        AttentionInterface.register(_PROBE, _answer)
        try:
            with attention_named(model, _PROBE):
                layer(hidden_states=state, position_embeddings=(cos[None], sin[None]), attention_mask=None)
        except _Asked as answer:
            return answer.args[0][0].float()
        except (TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise self._refusal(f"layer {layer.layer_idx} cannot be called alone: {type(error).__name__}") from error
        raise self._refusal(f"layer {layer.layer_idx} has attention of its own")


def _answer(module, query, *args, **kwargs):
    raise _Asked(query)


def _rotates_by_function(module: nn.Module) -> bool:
    names = vars(sys.modules[type(module).__module__])
    return "Attention" in type(module).__name__ and hasattr(module, "layer_idx") and _FUNCTION in names
