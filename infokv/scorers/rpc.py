"""RPC: Reasoning Path Compression, for tokens that were generated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infokv.budget import Schedule
from infokv.errors import Refused
from infokv.scorer import Scorer
from infokv.scorers.snapkv import spread
from infokv.signals import TokenSignals, signal
from infokv.windows import WindowOptions, window_scores


@dataclass(frozen=True)
class RPC(Scorer):
    """Generated tokens that the last queries attend to, one set per layer for all heads.

    Parameters
    ----------
    window : int
        Last queries whose attention counts; their tokens are kept beside the budget.
    kernel : int
        Width of the average pool, odd.
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
    every: int = 1024
    heads: str = "layer"

    def __post_init__(self):
        if self.window < 1:
            raise Refused(f"window is {self.window}; it must be at least 1 query.")
        if self.heads not in ("layer", "kv"):
            raise Refused(f"heads is {self.heads!r}; it must be 'layer' or 'kv'.")
        self.options()  # refuses an unfit kernel

    def options(self) -> WindowOptions:
        """How its window attention becomes a score."""
        return WindowOptions(support="region", rows="sum", heads=self.heads, order="before", kernel=self.kernel)

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
        slots = torch.arange(signals.tokens, device=signals.input_ids.device)
        scores = [
            window_scores(q, k, slots[-q.shape[1] :], slots, signals.candidates, facts, self.options())
            for q, k, facts in zip(signals[self.needs[0]], signals.keys, signals.facts)
        ]
        return spread(torch.stack(scores), signals)
