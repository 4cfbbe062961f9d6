"""RPC: Reasoning Path Compression, for tokens that were generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from infokv.budget import Schedule
from infokv.errors import Refused
from infokv.scorer import Scorer
from infokv.signals import TokenSignals, signal
from infokv.windows import WindowOptions, one_of, region_scores, spread


@dataclass(frozen=True)
class RPC(Scorer):
    """Generated tokens that the last queries attend to, one set per layer for all heads.

    Parameters
    ----------
    window : int
        Last queries whose attention counts; their tokens are kept beside the budget.
    kernel : int
        Width of the pool, odd.
    pool : {"avg", "max"}
    every : int
        Generated tokens between two cuts.
    heads : {"layer", "kv"}
        One set per layer, or one per KV head.

    Notes
    -----
    Source: Reasoning Path Compression (arXiv 2505.13866) and its code. The softmax runs over the scored tokens
    alone, so each query's weights sum to 1 there. A prompt is protected by definition; as a prefill scorer or a
    selector this is its score alone.
    """

    window: int = 32
    kernel: int = 7
    pool: str = "avg"
    every: int = 1024
    heads: str = "layer"

    def __post_init__(self):
        if self.window < 1:
            raise Refused(f"window is {self.window}; it must be at least 1 query.")
        one_of("heads", self.heads, ("layer", "kv"))
        self.options()  # these two refuse what is unfit
        Schedule(every=self.every)

    def options(self) -> WindowOptions:
        """How its window attention becomes a score."""
        return WindowOptions(
            support="region", rows="sum", heads=self.heads, order="before", pool=self.pool, kernel=self.kernel
        )

    @property
    def needs(self) -> tuple[str, ...]:
        return (signal("queries", last=self.window), "keys")

    @property
    def recent(self) -> int:
        return self.window

    @property
    def schedule(self) -> Schedule:
        return Schedule(every=self.every, recent=self.window)

    def score(self, signals: TokenSignals) -> torch.Tensor:
        """``[layers, 1 or kv_heads, tokens]``; 0 outside the candidates."""
        rows = self.rows(signals[self.needs[0]][0].shape[1])
        return spread(region_scores(signals, self.window, self.options(), rows=rows), signals)

    def rows(self, queries: int) -> list[int]:
        """Which of the last queries count."""
        return list(range(queries))


@dataclass(frozen=True)
class RPCOfficial(RPC):
    """RPC as its authors' code computes and counts it: the newest query counts twice.

    Notes
    -----
    Source: jiwonsong-dev/ReasoningPathCompression. The newest query is held twice, so that one query less than
    the window is there. A cut leaves a whole number of tokens per period.
    """

    allocation: ClassVar[str] = "rpc-official"

    def rows(self, queries: int) -> list[int]:
        return [*range(1, queries), queries - 1]
