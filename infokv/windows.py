"""Attention of an observation window, once, with the options in which published methods differ.

SnapKV, PyramidKV, FastKV, RPC, R-KV and InfoKV all score a cached token by the attention that the last
queries pay to it. They differ in the support of the softmax, in how query rows and heads are joined, and in
pooling; each is a set of :class:`WindowOptions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from infokv.errors import Refused
from infokv.kernels import LayerFacts, attention_scores
from infokv.signals import TokenSignals, signal
from infokv.visibility import visible

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
            one_of(name, getattr(self, name), allowed)
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
    unseen = ~visible(slots.expand(1, -1) if slots.dim() == 1 else slots, places, facts.window)
    out = []
    for head in range(heads):  # one KV head at a time: group x window x slots logits
        logits = attention_scores(queries[head * group : (head + 1) * group], keys[head], facts)
        logits = logits.masked_fill(unseen[head if len(unseen) > 1 else 0], float("-inf"))
        if options.group == "logits" and options.heads != "query":
            logits = logits.amax(dim=0, keepdim=True)
        if options.support == "region":
            logits = logits[..., region]
        blind = (logits == float("-inf")).all(dim=-1, keepdim=True)  # a query that sees none of them has no say
        weights = logits.masked_fill(blind, 0).softmax(dim=-1).masked_fill(blind, 0)
        weights = weights if options.support == "region" else weights[..., region]
        out.append(_reduce(weights, options.rows, dim=-2).float())
    return _join(torch.stack(out), options)


def region_scores(
    signals: TokenSignals,
    window: int,
    options: WindowOptions,
    region: range | None = None,
    rows: Sequence[int] | None = None,
) -> torch.Tensor:
    """Window scores of every layer, from the signals ``queries(last=window)`` and ``keys``.

    Parameters
    ----------
    signals : TokenSignals
        A whole prefix, or what is left of it after earlier cuts: places come from ``positions`` and ``seen``.
    window : int
        Last queries that count; all where there are fewer.
    options : WindowOptions
    region : range, optional
        Which slots are scored; by default the candidates.
    rows : sequence of int, optional
        Which of the window's queries count, as indices; one may count twice. By default all.

    Returns
    -------
    Tensor ``[layers, heads, len(region)]``, float32
    """
    region = signals.candidates if region is None else region
    if not len(region):
        count = {"query": signals.query_heads, "kv": signals.kv_heads, "layer": 1}[options.heads]
        return torch.zeros(signals.layers, count, 0, device=signals.input_ids.device)
    out = []
    for queries, keys, facts in zip(signals[signal("queries", last=window)], signals.keys, signals.facts, strict=True):
        places = torch.arange(signals.seen - queries.shape[1], signals.seen, device=queries.device)
        if rows is not None:
            chosen = list(rows)
            queries, places = queries[:, chosen], places[chosen]
        slots = signals.positions.to(queries.device)
        out.append(window_scores(queries, keys, places, slots, region, facts, options))
    return torch.stack([one.to(out[-1].device) for one in out])


def spread(scores: torch.Tensor, signals: TokenSignals) -> torch.Tensor:
    """Scores of the candidates at their places among all tokens, 0 elsewhere."""
    out = scores.new_zeros(*scores.shape[:-1], signals.tokens)
    out[..., signals.candidates] = scores
    return out


def scaled(scores: torch.Tensor, norm: str) -> torch.Tensor:
    """Scores whose last dimension sums to 1 (``sum1``), has a largest value of 1 (``max``), or as they are."""
    if norm not in ("sum1", "max"):
        return scores
    whole = scores.sum(dim=-1, keepdim=True) if norm == "sum1" else scores.amax(dim=-1, keepdim=True)
    return scores / whole.clamp_min(torch.finfo(scores.dtype).tiny)


def one_of(name: str, value: object, allowed: tuple) -> None:
    """Refuse a value that is not among those allowed."""
    if value not in allowed:
        shown = ("none" if one is None else str(one) for one in allowed)
        raise Refused(f"{name} is {value!r}; it must be one of {', '.join(shown)}.")


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
