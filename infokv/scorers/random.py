"""Random scores: the control without information."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infokv.scorer import Scorer
from infokv.signals import TokenSignals


@dataclass(frozen=True)
class Random(Scorer):
    """A random order of the tokens, the same for all heads.

    Parameters
    ----------
    seed : int
        Together with the text's own seed it fixes the order, whatever was drawn before.
    """

    seed: int = 0

    def score(self, signals: TokenSignals) -> torch.Tensor:
        """``[1, kv_heads or 1, tokens]``: ranks without ties."""
        generator = torch.Generator().manual_seed((signals.seed * 1_000_003 + self.seed) % 2**63)
        order = torch.randperm(signals.seen, generator=generator).float()
        return order.to(signals.positions.device)[signals.positions][None]
