"""TOVA: attention of the newest token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from infokv.scorer import Scorer
from infokv.signals import TokenSignals, signal
from infokv.windows import WindowOptions, region_scores


@dataclass(frozen=True)
class TOVA(Scorer):
    """Tokens that the last query attends to, one set per layer for all heads.

    Notes
    -----
    Source: "Transformers are Multi-State RNNs" (arXiv 2401.06104). The last token itself is kept by rule.
    """

    needs: ClassVar[tuple[str, ...]] = (signal("queries", last=1), "keys")
    recent: ClassVar[int] = 1
    _OPTIONS: ClassVar[WindowOptions] = WindowOptions(heads="layer", kernel=1)

    def score(self, signals: TokenSignals) -> torch.Tensor:
        """``[layers, 1, tokens]``, attention weight averaged over query heads."""
        return region_scores(signals, 1, self._OPTIONS, range(signals.tokens))
