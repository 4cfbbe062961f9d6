"""FastKV: window attention summed over the group, and token-selective propagation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from infokv.budget import Budget
from infokv.errors import Refused
from infokv.scorer import Scorer
from infokv.selection import kept_slots
from infokv.signals import TokenSignals, signal
from infokv.windows import WindowOptions, region_scores, spread


@dataclass(frozen=True)
class FastKV(Scorer):
    """Window attention summed over the query heads of each KV head; optionally fewer tokens for deeper layers.

    Parameters
    ----------
    window : int
        Last queries of the prefix whose attention counts; kept by rule.
    kernel : int
        Width of the pool over positions; odd.
    pool : {"avg", "max"}
    propagate : int or None
        The layer (0 is the first) behind which only some tokens go on; None: all go on everywhere.
    tsp_rate : float
        Share of the prompt that goes on.
    tsp_length : int or None
        Tokens that go on, instead of a share.

    Notes
    -----
    Source: FastKV, arXiv 2502.01068, and its code; window 64 and kernel 9 as compared in arXiv 2606.26875. The
    sum over query heads comes after the pool.
    """

    window: int = 64
    kernel: int = 9
    pool: str = "avg"
    propagate: int | None = None
    tsp_rate: float = 0.25
    tsp_length: int | None = None

    def __post_init__(self):
        if self.window < 1:
            raise Refused(f"window is {self.window}; it must be at least 1 query.")
        if self.propagate is not None and self.propagate < 0:
            raise Refused(f"propagate is {self.propagate}; it must be the number of a layer, from 0, or none.")
        if not 0 < self.tsp_rate <= 1:
            raise Refused(f"tsp_rate is {self.tsp_rate}; it must be above 0 and at most 1.")
        if self.tsp_length is not None and self.tsp_length < 1:
            raise Refused(f"tsp_length is {self.tsp_length}; it must be at least 1 token, or none.")
        self.options()  # refuses what is unfit

    def options(self) -> WindowOptions:
        """How its window attention becomes a score."""
        return WindowOptions(rows="sum", group="sum", pool=self.pool, kernel=self.kernel)

    @property
    def needs(self) -> tuple[str, ...]:
        return (signal("queries", last=self.window), "keys")

    @property
    def recent(self) -> int:
        return self.window

    def propagated(self, n: int) -> int:
        """How many of ``n`` tokens go on behind the layer ``propagate``."""
        budget = Budget(keep=self.tsp_rate) if self.tsp_length is None else Budget(tokens=self.tsp_length)
        return budget.resolve(n)

    def score(self, signals: TokenSignals) -> torch.Tensor:
        """``[layers, kv_heads, tokens]``; 0 outside the candidates."""
        return spread(region_scores(signals, self.window, self.options()), signals)


@dataclass(frozen=True)
class FastKVOfficial(FastKV):
    """FastKV as its authors' code computes and counts it.

    Notes
    -----
    Source: dongwonjo/FastKV, defaults of its command line (window 8, kernel 7, largest neighbour, 0.2 of the
    tokens go on). Shares truncate a float.
    """

    window: int = 8
    kernel: int = 7
    pool: str = "max"
    tsp_rate: float = 0.2
    allocation: ClassVar[str] = "fastkv-official"

    def propagated(self, n: int) -> int:
        return max(1, int(n * self.tsp_rate)) if self.tsp_length is None else min(n, self.tsp_length)


def propagated_tokens(scores: torch.Tensor, count: int, window: int) -> torch.Tensor:
    """Tokens that go on to deeper layers: the top of the scores summed over heads, and the window.

    Parameters
    ----------
    scores : Tensor ``[kv_heads, tokens]``
        Of the layer behind which tokens are left out.
    count : int
        How many go on, the window included.
    window : int
        Last tokens, which always go on.

    Returns
    -------
    int Tensor ``[min(count, tokens)]``
        Ascending.
    """
    return kept_slots(scores.sum(dim=0, keepdim=True), count, recent=window)[0]
