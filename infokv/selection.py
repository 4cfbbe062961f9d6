"""Which tokens stay: counts, ties, positions that are kept by rule, and order, in one place."""

from __future__ import annotations

import torch

from infokv.errors import Refused


def kept_slots(scores: torch.Tensor, count: int, *, sinks: int = 0, recent: int = 0) -> torch.Tensor:
    """The slots of a layer that stay.

    Parameters
    ----------
    scores : Tensor ``[heads, slots]``
        Higher = more important; NaN is refused.
    count : int
        How many stay per head, those kept by rule included.
    sinks, recent : int
        First and last slots that stay by rule. Where they alone are more than ``count``, the sinks come
        first, and then the most recent ones.

    Returns
    -------
    int Tensor ``[heads, min(count, slots)]``
        Ascending. Ties: the lower slot first.

    Raises
    ------
    Refused
        If fewer than one would stay, or a score is NaN.
    """
    heads, slots = scores.shape
    if count < 1:
        raise Refused(f"{count} tokens would stay; a cache keeps at least 1.")
    if count >= slots:
        return torch.arange(slots, device=scores.device).expand(heads, -1)
    if bool(scores.isnan().any()):
        raise Refused("A score is NaN; a scorer must give a number, or plus or minus infinity, for each token.")
    sinks = min(sinks, count)
    recent = min(recent, count - sinks)
    forced = torch.cat([torch.arange(sinks), torch.arange(slots - recent, slots)]).to(scores.device)
    free = scores[:, sinks : slots - recent]
    chosen = torch.sort(free, dim=-1, descending=True, stable=True).indices[:, : count - len(forced)] + sinks
    return torch.cat([forced.expand(heads, -1), chosen], dim=-1).sort(dim=-1).values
