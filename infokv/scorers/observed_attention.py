"""Observed attention: what each token received, averaged over the queries that saw it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from infokv.scorer import Scorer
from infokv.signals import TokenSignals


@dataclass(frozen=True)
class ObservedAttention(Scorer):
    """Tokens that received most attention per query that could see them.

    Notes
    -----
    Source: kvpress, ObservedAttentionPress. The mean favours late tokens, which few queries have seen.
    """

    needs: ClassVar[tuple[str, ...]] = ("attention_mass",)

    def score(self, signals: TokenSignals) -> torch.Tensor:
        """``[layers, kv_heads, tokens]``, mean weight."""
        mass = group_mean(signals["attention_mass"], signals.kv_heads)
        seen_by = (signals.seen - signals.positions).to(mass.device)
        windows = [facts.window or signals.seen for facts in signals.facts]  # later queries have left it behind
        return torch.stack([one / seen_by.clamp_max(window) for one, window in zip(mass, windows, strict=True)])


def group_mean(scores: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """``[layers, query_heads, tokens]`` to ``[layers, kv_heads, tokens]``."""
    layers, query_heads, tokens = scores.shape
    return scores.reshape(layers, kv_heads, query_heads // kv_heads, tokens).mean(dim=2)
