"""SnapKV: attention that the prompt's last queries pay to each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from infokv.errors import Refused
from infokv.scorer import Scorer
from infokv.signals import TokenSignals, signal


@dataclass(frozen=True)
class SnapKV(Scorer):
    """Window attention, pooled over neighbours, per KV head.

    Parameters
    ----------
    window : int
        Last queries of the prefix whose attention counts (the observation window).
    kernel : int
        Width of the average pool over positions; odd.

    Notes
    -----
    Source: SnapKV, arXiv 2404.14469; window 64 and kernel 9 as compared in arXiv 2606.26875. Each layer and
    KV head sums to 1 over the candidates, so that it can be mixed with other distributions.
    """

    window: int = 64
    kernel: int = 9

    def __post_init__(self):
        if self.window < 1:
            raise Refused(f"window is {self.window}; it must be at least 1 query.")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise Refused(f"kernel is {self.kernel}; it must be odd and at least 1.")

    @property
    def needs(self) -> tuple[str, ...]:
        return (signal("window_attention", window=self.window),)

    @property
    def recent(self) -> int:
        return self.window

    def score(self, signals: TokenSignals) -> torch.Tensor:
        """``[layers, kv_heads, tokens]``; 0 outside the candidates."""
        attention = signals[self.needs[0]][..., signals.candidates]
        return spread(pooled_attention(attention, signals.kv_heads, self.kernel), signals)


def pooled_attention(attention: torch.Tensor, kv_heads: int, kernel: int) -> torch.Tensor:
    """Average pool, group mean, and scaling to sum 1: ``[layers, query_heads, n]`` to ``[layers, kv_heads, n]``.

    Padding counts in the pool's divisor, as in SnapKV's code, so the outermost positions weigh less. Positions
    outside the given ones never leak in.
    """
    layers, query_heads, n = attention.shape
    pooled = F.avg_pool1d(attention, kernel, stride=1, padding=kernel // 2) if kernel > 1 else attention
    grouped = pooled.reshape(layers, kv_heads, query_heads // kv_heads, n).mean(dim=2)
    return grouped / grouped.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(grouped.dtype).tiny)


def spread(scores: torch.Tensor, signals: TokenSignals) -> torch.Tensor:
    """Scores of the candidates at their places among all tokens, 0 elsewhere."""
    out = scores.new_zeros(*scores.shape[:-1], signals.tokens)
    out[..., signals.candidates] = scores
    return out
