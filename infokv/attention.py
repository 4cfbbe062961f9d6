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
from infokv.store import StoreLayer, TokenStore

NAME = "infokv_store"

#: Keywords that models hand to every attention function and that change nothing here.
_HARMLESS = frozenset(
    {"position_ids", "position_embeddings", "use_cache", "cache", "past_key_values", "cache_position",
     "output_attentions", "output_hidden_states", "return_dict", "is_causal", "logits_to_keep", "kwargs"}
)  # fmt: skip

#: Further back than any sliding window reaches.
_FAR = 1 << 40

#: Upper bound of the score block of the soft-capped path, elements.
_SCORE_BLOCK = 1 << 24


@dataclass(frozen=True)
class LayerFacts:
    """What a layer told the attention function about itself.

    Attributes
    ----------
    scaling : float
        Factor on query-key products.
    softcap : float or None
        Scores become ``softcap * tanh(score / softcap)``.
    window : int or None
        Sliding window: a query at position p sees positions above ``p - window``.
    """

    scaling: float
    softcap: float | None
    window: int | None


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
    store.open = True
    try:
        with attention_named(model, NAME, configs):
            yield
    finally:
        store.open = False
        _ACTIVE.reset(token)
    name = type(model).__name__
    if session.calls != list(range(len(store.layers))):
        raise Refused(
            f"{name} asked for attention in layers {session.calls} of {len(store.layers)}, not once in each; it computes "
            "some of its attention in a way of its own. Use another model."
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
    unknown = sorted(name for name, given in others.items() if name not in _HARMLESS and given is not None)
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
    return given.data_ptr() == stored.data_ptr() and given.stride() == stored.stride() or torch.equal(given, stored)


def _attend(query: torch.Tensor, session: _Session, index: int, facts: LayerFacts) -> torch.Tensor:
    """Grouped attention with the group folded into the queries: no key is repeated."""
    rows, query_heads, new, width = query.shape
    layer = session.store.layers[index]
    heads = layer.keys.shape[1]
    if _is_causal(session, layer, facts, new) and (layer.length == new or _halves(query)):
        out = _causal(query, layer.stored_keys, layer.stored_values, facts.scaling)
        return out.transpose(1, 2).contiguous()
    mask, first = _visibility(session, index, facts.window, new, query_heads // heads, query.dtype)
    keys, values = layer.stored_keys[:, :, first:], layer.stored_values[:, :, first:]
    folded = query.reshape(rows, heads, -1, width)
    if facts.softcap is None:
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=facts.scaling)
    else:
        out = _softcapped(folded, keys, values, mask, facts)
    # Not view: kernels differ in the layout of what they return. Contiguous, as some models view the result.
    return out.reshape(rows, query_heads, new, -1).transpose(1, 2).contiguous()


def _is_causal(session: _Session, layer: StoreLayer, facts: LayerFacts, new: int) -> bool:
    """Whether several new tokens see all that was stored before, and of each other what came before."""
    plain = facts.softcap is None and session.store.hidden is None and new > 1
    return plain and (facts.window is None or (layer.positions is None and layer.length <= facts.window))


def _halves(query: torch.Tensor) -> bool:
    """Whether :func:`_causal` can attend to the past and to the new tokens apart: on a CPU, where masks are slow."""
    return query.device.type == "cpu" and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def _causal(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """Causal attention of the last slots' tokens, without a mask: ``[rows, query_heads, new, head_dim]``.

    The past, which all see, and the new tokens are attended to apart and joined by their softmax sums. Half of the
    work of a mask is saved on the new tokens, and reading it on the past.
    """
    rows, query_heads, new, width = query.shape
    past = keys.shape[2] - new
    if past == 0:
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own, own_sum = attend(query, keys[:, :, past:], values[:, :, past:], 0.0, True, scale=scaling)
    folded = query.reshape(rows, keys.shape[1], -1, width)
    before, before_sum = attend(folded, keys[:, :, :past], values[:, :, :past], 0.0, False, scale=scaling)
    weight = torch.sigmoid(before_sum.reshape(own_sum.shape) - own_sum)[..., None]
    return torch.lerp(own, before.reshape(own.shape), weight.to(own.dtype))


def _softcapped(folded, keys, values, mask, facts: LayerFacts) -> torch.Tensor:
    """Attention with capped scores, which no fused kernel offers; in blocks of queries."""
    rows, heads, queries, _ = folded.shape
    step = max(1, _SCORE_BLOCK // (rows * heads * keys.shape[2]))
    keys = keys.to(torch.promote_types(keys.dtype, torch.float32))  # once, not for every block
    out = []
    for start in range(0, queries, step):
        block = folded[:, :, start : start + step]
        scores = attention_scores(block, keys, facts)
        if mask is not None:
            scores = scores + mask[:, :, start : start + step]
        out.append(scores.softmax(dim=-1).to(values.dtype) @ values)
    return torch.cat(out, dim=2)


def attention_scores(queries: torch.Tensor, keys: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
    """Scaled and capped query-key products in float32 or better, before any mask.

    Parameters
    ----------
    queries : Tensor ``[..., queries, head_dim]``, post-RoPE
    keys : Tensor ``[..., keys, head_dim]``, post-RoPE
    facts : LayerFacts
    """
    exact = torch.promote_types(queries.dtype, torch.float32)
    scores = queries.to(exact) @ keys.to(exact).transpose(-1, -2) * facts.scaling
    return scores if facts.softcap is None else facts.softcap * torch.tanh(scores / facts.softcap)


def visible(slots: torch.Tensor, queries: torch.Tensor, window: int | None) -> torch.Tensor:
    """Causal and inside the window: ``[..., queries, slots]`` bool.

    Parameters
    ----------
    slots : int Tensor ``[..., slots]``
        Original positions of the stored tokens.
    queries : int Tensor ``[queries]``
        Positions of the queries.
    window : int or None
        A query at p sees positions p - window + 1 to p (transformers' rule: itself included).
    """
    distance = queries[:, None] - slots[..., None, :]
    inside = distance >= 0
    return inside if window is None else inside & (distance < window)


def _visibility(session: _Session, index: int, window: int | None, new: int, group: int, dtype):
    """Additive mask ``[rows or 1, kv_heads or 1, group * new, slots]`` or None, and the first slot it covers.

    Layers that see alike share one mask per forward.
    """
    store = session.store
    layer, hidden = store.layers[index], store.hidden
    if new == 1 and hidden is None and window is None:
        return None, 0  # the newest token sees all that is stored
    device = layer.keys.device
    shared = layer.positions is None and (hidden is None or hidden.shape[1] == 1)
    key = (window, device, layer.first)
    if not shared or key not in session.masks:
        slots = layer.slot_positions(device)
        queries = slots[0, 0, -new:]  # the new tokens are the last slots of every row and head
        first = 0
        if window is not None:  # slots that every query and head has left behind need not be read
            first = int((slots <= queries[0] - window).sum(dim=-1).min())
        sight = visible(slots[..., first:], queries, window)
        if hidden is not None:
            flags = hidden[:, index if hidden.shape[1] > 1 else 0].to(device)
            flags = F.pad(flags, (0, layer.length - flags.shape[-1]))[..., first:]
            sight = sight & ~flags[..., None, :]
        if not bool(sight.any(dim=-1).all()):
            raise Refused("A query would see no key at all; its attention is not defined.")
        mask = None
        if not bool(sight.all()):
            mask = torch.zeros(sight.shape, dtype=dtype, device=device).masked_fill_(~sight, float("-inf"))
            mask = mask.repeat(1, 1, group, 1)
        if not shared:  # masks of all layers together would outweigh the cache
            return mask, first
        session.masks[key] = (mask, first)
    return session.masks[key]
