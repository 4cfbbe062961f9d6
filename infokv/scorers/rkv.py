"""R-KV: importance minus redundancy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from infokv.budget import Schedule
from infokv.errors import Refused
from infokv.scorer import Scorer
from infokv.signals import TokenSignals, signal
from infokv.windows import WindowOptions, region_scores, spread

#: Keys whose cosine is above this are taken for the same thought.
_SIMILAR = 0.5

#: Rows of the similarity matrix held at a time.
_BLOCK = 512


@dataclass(frozen=True)
class RKV(Scorer):
    """Tokens that the last queries attend to, and whose keys are not repeated elsewhere.

    Parameters
    ----------
    weight : float
        Of importance, 0 to 1; the rest is the weight of redundancy, which is subtracted.
    window : int
        Last queries whose attention counts; their tokens are kept by rule.
    kernel : int
        Width of the pool, odd.
    every : int
        Generated tokens between two cuts.

    Notes
    -----
    Source: R-KV (arXiv 2505.24133) and its code, defaults included. Of similar tokens the latest is spared.
    The prompt is cut like what was generated.
    """

    weight: float = 0.07
    window: int = 8
    kernel: int = 7
    every: int = 128

    def __post_init__(self):
        if not 0 <= self.weight <= 1:
            raise Refused(f"weight is {self.weight}; it must be from 0 to 1.")
        if self.window < 1:
            raise Refused(f"window is {self.window}; it must be at least 1 query.")
        self._options()  # these two refuse what is unfit
        Schedule(every=self.every)

    @property
    def needs(self) -> tuple[str, ...]:
        return (signal("queries", last=self.window), "keys")

    @property
    def recent(self) -> int:
        return self.window

    @property
    def schedule(self) -> Schedule:
        return Schedule(every=self.every, recent=self.window, protect_prompt=False)

    def _options(self) -> WindowOptions:
        return WindowOptions(support="region", group="logits", pool="max", kernel=self.kernel)

    def score(self, signals: TokenSignals) -> torch.Tensor:
        """``[layers, kv_heads, tokens]``; 0 outside the candidates."""
        important = region_scores(signals, self.window, self._options())
        redundant = torch.stack([redundancy(keys.float()).to(important.device) for keys in signals.keys])
        mixed = self.weight * important - (1 - self.weight) * redundant[..., signals.candidates]
        return spread(mixed, signals)


def redundancy(keys: torch.Tensor) -> torch.Tensor:
    """How much each key repeats others: softmax over tokens of its mean cosine with them, ``[kv_heads, tokens]``.

    For each token the latest similar one is not counted against it, so that of repeated tokens the last has the
    smallest redundancy. In blocks of rows; the whole matrix is never held.
    """
    heads, tokens, _ = keys.shape
    unit = F.normalize(keys, dim=-1)
    totals = keys.new_zeros(heads, tokens)
    columns = torch.arange(tokens, device=keys.device)
    for start in range(0, tokens, _BLOCK):
        rows = columns[start : start + _BLOCK]
        similar = unit[:, rows] @ unit.transpose(1, 2)
        similar[:, torch.arange(len(rows)), rows] = 0
        latest = torch.where(similar > _SIMILAR, columns, 0).amax(dim=-1, keepdim=True)
        totals += similar.scatter_(-1, latest, 0.0).sum(dim=1)
    return (totals / tokens).softmax(dim=-1)
