"""KNorm: keys of small norm are attended to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from infokv.scorer import Scorer
from infokv.signals import TokenSignals


@dataclass(frozen=True)
class KNorm(Scorer):
    """Tokens whose keys have a small norm.

    Notes
    -----
    Source: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (arXiv 2406.11430). RoPE keeps
    norms, so keys of the first layer depend on the token alone, and equal tokens tie there.
    """

    needs: ClassVar[tuple[str, ...]] = ("keys",)

    def score(self, signals: TokenSignals) -> torch.Tensor:
        """``[layers, kv_heads, tokens]``, minus the norm."""
        return torch.stack([-keys.float().norm(dim=-1) for keys in signals.keys])
