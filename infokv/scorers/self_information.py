"""Self-information: how surprising each token was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from infokv.scorer import Scorer
from infokv.signals import TokenSignals


@dataclass(frozen=True)
class SelfInformation(Scorer):
    """Tokens that were surprising: minus the log-probability of each, given those before it.

    Notes
    -----
    Source: the signal of Selective Context (arXiv 2310.06201), taken from the same model in full context. The first
    token has no value and is kept by rule.
    """

    needs: ClassVar[tuple[str, ...]] = ("self_information",)
    sinks: ClassVar[int] = 1

    def score(self, signals: TokenSignals) -> torch.Tensor:
        """``[1, 1, tokens]``, nats."""
        return signals.self_information[None, None]
