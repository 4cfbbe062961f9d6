"""The full cache: nothing is left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from infokv.scorer import Scorer
from infokv.signals import TokenSignals


@dataclass(frozen=True)
class FullCache(Scorer):
    """Every token stays, whatever the budget; the yardstick of the others."""

    allocation: ClassVar[str] = "full"

    def score(self, signals: TokenSignals) -> torch.Tensor:
        """``[1, 1, tokens]``, zeros."""
        return torch.zeros(1, 1, signals.tokens, device=signals.input_ids.device)
