"""Attention of an observation window, once, with the options in which published methods differ.

SnapKV, PyramidKV, FastKV, RPC, R-KV and InfoKV all score a cached token by the attention that the last
queries pay to it. They differ in the support of the softmax, in how query rows and heads are joined, and in
pooling; each is a set of :class:`WindowOptions`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from infokv.attention import LayerFacts, attention_scores, visible
from infokv.errors import Refused

_CHOICES = {
    "support": ("all", "region"),
    "rows": ("mean", "sum", "max"),
    "group": ("mean", "sum", "max", "logits"),
    "order": ("before", "after"),
    "heads": ("query", "kv", "layer"),
    "pool": ("avg", "max"),
}


@dataclass(frozen=True)
class WindowOptions:
    """How window attention becomes a score.

    Parameters
    ----------
    support : {"all", "region"}
        Softmax over all visible keys and then a cut to the region (SnapKV), or over the region alone (RPC,
        R-KV), so that each query's weights sum to 1 there.
    rows : {"mean", "sum", "max"}
        Over the queries of the window.
    heads : {"query", "kv", "layer"}
        One score per query head, per KV head, or one for the layer.
    group : {"mean", "sum", "max", "logits"}
        How the query heads that share a score are joined; ``"logits"`` takes the largest logit before the
        softmax (R-KV).
    pool : {"avg", "max"}
        Over neighbouring positions of the region. Zeros at its ends count in the average, as in all
        published code.
    kernel : int
        Width of the pool, odd; 1 for none.
    order : {"before", "after"}
        Whether query heads are joined before or after pooling; matters for the largest value only.
    """

    support: str = "all"
    rows: str = "mean"
    heads: str = "kv"
    group: str = "mean"
    pool: str = "avg"
    kernel: int = 9
    order: str = "after"

    def __post_init__(self):
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise Refused(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}.")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise Refused(f"kernel is {self.kernel}; it must be odd and at least 1.")


def window_scores(
    queries: torch.Tensor,
    keys: torch.Tensor,
    places: torch.Tensor,
    slots: torch.Tensor,
    region: torch.Tensor | range,
    facts: LayerFacts,
    options: WindowOptions,
) -> torch.Tensor:
    """Scores of the slots of a region, of one layer.

    Parameters
    ----------
    queries : Tensor ``[query_heads, window, head_dim]``, post-RoPE
    keys : Tensor ``[kv_heads, slots, head_dim]``, post-RoPE
    places : int Tensor ``[window]``
        Positions of the queries.
    slots : int Tensor ``[slots]`` or ``[kv_heads, slots]``
        Original positions of the keys.
    region : range or int Tensor
        Which slots are scored.
    facts : LayerFacts
    options : WindowOptions

    Returns
    -------
    Tensor ``[heads, len(region)]``, float32
        ``heads`` is the number of query heads, of KV heads, or 1.
    """
    heads = keys.shape[0]
    group = queries.shape[0] // heads
    region = slice(region.start, region.stop) if isinstance(region, range) else region
    slots = slots.expand(heads, -1)
    out = []
    for head in range(heads):  # one KV head at a time: group x window x slots logits
        logits = attention_scores(queries[head * group : (head + 1) * group], keys[head], facts)
        logits = logits.masked_fill(~visible(slots[head], places, facts.window), float("-inf"))
        if options.group == "logits" and options.heads != "query":
            logits = logits.amax(dim=0, keepdim=True)
        if options.support == "region":
            weights = logits[..., region].softmax(dim=-1)
        else:
            weights = logits.softmax(dim=-1)[..., region]
        out.append(_reduce(weights, options.rows, dim=-2).float())
    return _join(torch.stack(out), options)


def _join(scores: torch.Tensor, options: WindowOptions) -> torch.Tensor:
    """``[kv_heads, group, region]`` to ``[heads, region]``: heads joined and neighbours pooled."""
    kv_heads, group, width = scores.shape
    shape = {"query": (kv_heads * group, 1), "kv": (kv_heads, group), "layer": (1, kv_heads * group)}
    scores = scores.reshape(*shape[options.heads], width)
    how = "mean" if options.group == "logits" else options.group
    if options.order == "before":
        return pooled(_reduce(scores, how, dim=1), options.pool, options.kernel)
    return _reduce(pooled(scores, options.pool, options.kernel), how, dim=1)


def pooled(scores: torch.Tensor, pool: str, kernel: int) -> torch.Tensor:
    """Average or maximum over ``kernel`` neighbours along the last dimension, of the same length."""
    if kernel == 1:
        return scores
    rows = scores.reshape(1, -1, scores.shape[-1])
    function = F.avg_pool1d if pool == "avg" else F.max_pool1d
    return function(rows, kernel, stride=1, padding=kernel // 2).reshape(scores.shape)


def _reduce(values: torch.Tensor, how: str, *, dim: int) -> torch.Tensor:
    return values.amax(dim=dim) if how == "max" else getattr(values, how)(dim=dim)
