"""What a query may see of a token store: causal, inside the window, not hidden."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from infokv.errors import Refused
from infokv.store import TokenStore


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


def visibility(store: TokenStore, index: int, window: int | None, new: int, group: int, dtype: torch.dtype,
               masks: dict) -> tuple[torch.Tensor | None, int]:  # fmt: skip
    """What the last ``new`` tokens see in a layer.

    Parameters
    ----------
    group : int
        Query heads per KV head; their rows are folded.
    masks : dict
        Of one forward: layers that see alike share a mask.

    Returns
    -------
    mask : Tensor ``[rows or 1, kv_heads or 1, group * new, slots]`` or None
        Additive.
    first : int
        The first slot that it covers.
    """
    layer, hidden = store.layers[index], store.hidden
    if new == 1 and hidden is None:
        return _of_the_newest(layer, window, group, dtype), 0
    shared = layer.consecutive and (hidden is None or hidden.shape[1] == 1)
    key = (window, layer.keys.device, layer.length)
    if not shared:  # masks of all layers together would outweigh the cache
        return _mask(layer, hidden, index, window, new, group, dtype)
    if key not in masks:
        masks[key] = _mask(layer, hidden, index, window, new, group, dtype)
    return masks[key]


def _of_the_newest(layer, window: int | None, group: int, dtype: torch.dtype) -> torch.Tensor | None:
    """The mask of a single query, which sees at least itself; made without waiting for a GPU."""
    if window is None or (layer.consecutive and layer.length <= window):
        return None
    sight = layer.slot_positions() > layer.seen - 1 - window
    mask = torch.zeros(sight.shape, dtype=dtype, device=sight.device).masked_fill_(~sight, float("-inf"))
    return mask[..., None, :].expand(-1, -1, group, -1)


def _mask(layer, hidden, index: int, window: int | None, new: int, group: int, dtype: torch.dtype):
    slots = layer.slot_positions()
    queries = slots[0, 0, -new:]  # the new tokens are the last slots of every row and head
    first = 0
    if window is not None:  # slots that every query and head has left behind need not be read
        first = int((slots <= queries[0] - window).sum(dim=-1).min())
    sight = visible(slots[..., first:], queries, window)
    if hidden is not None:
        flags = hidden[:, index if hidden.shape[1] > 1 else 0].to(sight.device)
        flags = F.pad(flags, (0, layer.length - flags.shape[-1]))[..., first:]
        sight = sight & ~flags[..., None, :]
    if not bool(sight.any(dim=-1).all()):
        raise Refused("A query would see no key at all; its attention is not defined.")
    if bool(sight.all()):
        return None, first
    mask = torch.zeros(sight.shape, dtype=dtype, device=sight.device).masked_fill_(~sight, float("-inf"))
    return mask.repeat(1, 1, group, 1), first
