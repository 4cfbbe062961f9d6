"""PyramidKV: SnapKV's score, with more tokens in lower layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from infokv.errors import Refused
from infokv.scorers.snapkv import SnapKV
from infokv.windows import WindowOptions


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV's score; a budget that falls from the first layer to the last.

    Parameters
    ----------
    window, kernel, pool, heads, norm
        As in :class:`infokv.SnapKV`.
    beta : int
        The last layer has 1 / beta of the mean budget (the window aside), the first nearly twice the mean.

    Notes
    -----
    Source: PyramidKV, arXiv 2406.02069; window 64 and kernel 9 as compared in arXiv 2606.26875.
    """

    beta: int = 20
    allocation: ClassVar[str] = "pyramid"

    def __post_init__(self):
        super().__post_init__()
        if self.beta < 1:
            raise Refused(f"beta is {self.beta}; it must be at least 1.")


@dataclass(frozen=True)
class PyramidKVKvpress(PyramidKV):
    """PyramidKV as kvpress computes and counts it.

    Notes
    -----
    Source: kvpress 0.5.5, PyramidKVPress (window 64, kernel 5, unscaled mean). Where the last layer would have
    less than the window, all layers keep alike: with a mean of less than beta x window tokens there is no pyramid.
    """

    kernel: int = 5
    norm: str = "mean"
    allocation: ClassVar[str] = "pyramid-kvpress"


@dataclass(frozen=True)
class PyramidKVOfficial(PyramidKV):
    """PyramidKV as its authors' code computes and counts it, with a set for each query head.

    Parameters
    ----------
    window, kernel, pool, heads, norm, beta
        As in :class:`infokv.PyramidKV`.
    group : {"mean", "sum", "max"}
        How query heads are joined, before the pool, where ``heads`` is not ``query``.

    Notes
    -----
    Source: KVCache-Factory, PyramidKVCluster, the defaults that its patched models take (window 32, kernel 5).
    """

    window: int = 32
    kernel: int = 5
    heads: str = "query"
    norm: str = "sum"
    group: str = "mean"
    allocation: ClassVar[str] = "pyramid-official"

    def options(self) -> WindowOptions:
        return WindowOptions(
            rows="sum", heads=self.heads, pool=self.pool, kernel=self.kernel, group=self.group, order="before"
        )
