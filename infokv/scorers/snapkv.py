"""SnapKV: attention that the prompt's last queries pay to each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from infokv.errors import Refused
from infokv.scorer import Scorer
from infokv.signals import TokenSignals, signal
from infokv.windows import WindowOptions, one_of, region_scores, scaled, spread

#: How window attention is scaled before it is mixed or compared.
NORMS = ("sum1", "mean", "sum", "max")


@dataclass(frozen=True)
class SnapKV(Scorer):
    """Window attention, pooled over neighbours, per KV head.

    Parameters
    ----------
    window : int
        Last queries of the prefix whose attention counts (the observation window); kept by rule.
    kernel : int
        Width of the pool over positions; odd.
    pool : {"avg", "max"}
    heads : {"kv", "layer", "query"}
        One set per KV head, one per layer, or one per query head, which no cache of KV heads can hold.
    norm : {"sum1", "mean", "sum", "max"}
        ``sum1``: each head sums to 1 over the candidates, so that it can be mixed with other distributions;
        ``max``: the largest is 1; ``mean`` or ``sum`` over the window's queries, left as they are.

    Notes
    -----
    Source: SnapKV, arXiv 2404.14469; window 64 and kernel 9 as compared in arXiv 2606.26875.
    """

    window: int = 64
    kernel: int = 9
    pool: str = "avg"
    heads: str = "kv"
    norm: str = "sum1"

    def __post_init__(self):
        if self.window < 1:
            raise Refused(f"window is {self.window}; it must be at least 1 query.")
        one_of("norm", self.norm, NORMS)
        self.options()  # refuses what is unfit

    def options(self) -> WindowOptions:
        """How its window attention becomes a score."""
        rows = "sum" if self.norm == "sum" else "mean"
        return WindowOptions(rows=rows, heads=self.heads, pool=self.pool, kernel=self.kernel)

    @property
    def needs(self) -> tuple[str, ...]:
        return (signal("queries", last=self.window), "keys")

    @property
    def recent(self) -> int:
        return self.window

    def score(self, signals: TokenSignals) -> torch.Tensor:
        """``[layers, heads, tokens]``; 0 outside the candidates."""
        return spread(scaled(region_scores(signals, self.window, self.options()), self.norm), signals)


@dataclass(frozen=True)
class SnapKVKvpress(SnapKV):
    """SnapKV as kvpress computes and counts it.

    Notes
    -----
    Source: kvpress 0.5.5, SnapKVPress (window 64, kernel 5, unscaled mean). Its counts truncate a float.
    """

    kernel: int = 5
    norm: str = "mean"
    allocation: ClassVar[str] = "kvpress"


@dataclass(frozen=True)
class SnapKVOfficial(SnapKV):
    """SnapKV as its authors' code computes it, with a set for each query head.

    Notes
    -----
    Source: FasterDecoding/SnapKV, the defaults that its patched models take (window 32, kernel 5).
    """

    window: int = 32
    kernel: int = 5
    heads: str = "query"
    norm: str = "sum"
