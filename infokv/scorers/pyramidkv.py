"""PyramidKV: SnapKV's score, with more room in lower layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from infokv.scorers.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV's score; the budget falls from the first layer to the last.

    Parameters
    ----------
    window, kernel : int
        Observation window and average pool; see :class:`infokv.SnapKV`.

    Notes
    -----
    Source: PyramidKV (arXiv 2406.02069). As a selector, where all layers share one set, it is SnapKV.
    """

    allocation: ClassVar[str] = "pyramid"
