"""The full cache, as a method among others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infokv.scorer import Scorer
from infokv.signals import TokenSignals


@dataclass(frozen=True)
class FullCache(Scorer):
    """Nothing is cut, whatever the budget: the reference of every comparison."""

    keeps_all = True

    def score(self, signals: TokenSignals) -> torch.Tensor:
        """``[1, 1, tokens]``, all alike."""
        return torch.zeros(1, 1, signals.tokens, device=signals.input_ids.device)
