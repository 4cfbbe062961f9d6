"""KeyDiff: keys that differ from the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from infokv.scorer import Scorer
from infokv.signals import TokenSignals


@dataclass(frozen=True)
class KeyDiff(Scorer):
    """Tokens whose keys point away from the mean direction of all keys.

    Notes
    -----
    Source: KeyDiff (arXiv 2504.15364), scored once over the whole prefix.
    """

    needs: ClassVar[tuple[str, ...]] = ("keys",)

    def score(self, signals: TokenSignals) -> torch.Tensor:
        """``[layers, kv_heads, tokens]``, minus the cosine with the mean of normalised keys."""
        return torch.stack([self._of_layer(keys.float()) for keys in signals.keys])

    @staticmethod
    def _of_layer(keys: torch.Tensor) -> torch.Tensor:
        anchor = F.normalize(keys, dim=-1).mean(dim=1, keepdim=True)
        return -F.cosine_similarity(keys, anchor, dim=-1)
