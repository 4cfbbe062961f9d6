"""LagKV: tokens that spread out over the channels when measured by the tokens after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from infokv.errors import Refused
from infokv.scorer import Scorer
from infokv.signals import TokenSignals


@dataclass(frozen=True)
class LagKV(Scorer):
    """Tokens whose keys and values vary most over channels, on the scale of the next partition.

    Parameters
    ----------
    n_sink : int
        First tokens that are always kept.
    lag : int
        Tokens of a partition. The last full partition and what follows it are always kept.
    cross : bool
        Compare tokens between partitions by their scores; otherwise by their ranks inside each.

    Notes
    -----
    Source: LagKV (arXiv 2504.04704). Texts shorter than two partitions are kept by recency.
    """

    n_sink: int = 4
    lag: int = 128
    cross: bool = False
    needs: ClassVar[tuple[str, ...]] = ("keys", "values")

    def __post_init__(self):
        if self.n_sink < 0 or self.lag < 1:
            raise Refused(f"n_sink is {self.n_sink} and lag {self.lag}; n_sink >= 0 and lag >= 1.")

    @property
    def sinks(self) -> int:
        return self.n_sink

    def score(self, signals: TokenSignals) -> torch.Tensor:
        """``[layers, kv_heads, tokens]``; 1 for tokens that are always kept."""
        sinks = signals.held_before(self.n_sink)
        pairs = zip(signals.keys, signals.values)
        found = [self._of_layer(keys.float(), values.float(), sinks) for keys, values in pairs]
        return torch.stack([one.to(found[-1].device) for one in found])

    def _of_layer(self, keys: torch.Tensor, values: torch.Tensor, sinks: int) -> torch.Tensor:
        heads, tokens = keys.shape[:2]
        scores = keys.new_ones(heads, tokens)
        inner = tokens - sinks
        if inner < 2 * self.lag:
            if inner > 0:
                scores[:, sinks:] = torch.arange(inner, device=keys.device) / inner
            return scores
        parts = inner // self.lag
        stop = sinks + parts * self.lag
        spread = (self._spread(keys[:, sinks:stop], parts) + self._spread(values[:, sinks:stop], parts)) / 2
        if not self.cross:
            spread = spread.argsort(dim=-1).argsort(dim=-1) / self.lag
        scores[:, sinks : stop - self.lag] = spread.flatten(1)
        return scores

    def _spread(self, states: torch.Tensor, parts: int) -> torch.Tensor:
        """Softmax over each partition of the deviation over channels: ``[heads, parts - 1, lag]``."""
        states = states.reshape(states.shape[0], parts, self.lag, -1)
        scored, reference = states[:, :-1], states[:, 1:]
        low = reference.amin(dim=2, keepdim=True)
        width = (reference.amax(dim=2, keepdim=True) - low).clamp_min(torch.finfo(states.dtype).tiny)
        return ((scored - low) / width).std(dim=-1).softmax(dim=-1)
