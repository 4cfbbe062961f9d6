"""StreamingLLM: attention sinks and the most recent tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infokv.errors import Refused
from infokv.scorer import Scorer
from infokv.signals import TokenSignals


@dataclass(frozen=True)
class StreamingLLM(Scorer):
    """The first tokens, and the last ones.

    Parameters
    ----------
    n_sink : int
        First tokens that are always kept.

    Notes
    -----
    Source: StreamingLLM (arXiv 2309.17453). Survivors keep their original rotation; the paper's code renumbers them.
    """

    n_sink: int = 4

    def __post_init__(self):
        if self.n_sink < 0:
            raise Refused(f"n_sink is {self.n_sink}; it must be 0 or more.")

    @property
    def sinks(self) -> int:
        return self.n_sink

    def score(self, signals: TokenSignals) -> torch.Tensor:
        """``[1, kv_heads or 1, tokens]``: the position."""
        return signals.positions.float()[None]
