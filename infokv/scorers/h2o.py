"""H2O: heavy hitters, the tokens that received most attention in all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from infokv.errors import Refused
from infokv.scorer import Scorer
from infokv.scorers.observed_attention import group_mean
from infokv.signals import TokenSignals


@dataclass(frozen=True)
class H2O(Scorer):
    """Tokens that received most attention in all, and the most recent ones.

    Parameters
    ----------
    recency : int
        Last tokens that are always kept, inside the budget.

    Notes
    -----
    Source: H2O (arXiv 2306.14048). The sum favours old tokens, which many queries have seen.
    """

    recency: int = 64
    needs: ClassVar[tuple[str, ...]] = ("attention_mass",)

    def __post_init__(self):
        if self.recency < 0:
            raise Refused(f"recency is {self.recency}; it must be 0 or more.")

    @property
    def recent(self) -> int:
        return self.recency

    def score(self, signals: TokenSignals) -> torch.Tensor:
        """``[layers, kv_heads, tokens]``, summed weight."""
        return group_mean(signals["attention_mass"], signals.kv_heads)
