"""Rows of names, each with a point and an interval for every band of offsets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from forward_influence.analysis.drawing import MARKERS, broken, palette

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

#: Letters of a line of a name, and inches that a line, the space between names and that between bands take.
_LETTERS, _LINE, _SPACE, _DODGE = 30, 0.14, 0.13, 0.07


def rows_of(names: Iterable[str]) -> tuple[list[str], np.ndarray]:
    """Names in lines, and the height of each one's row in inches."""
    labels = [broken(name, _LETTERS) for name in names]
    return labels, np.array([_SPACE + _LINE * (label.count("\n") + 1) for label in labels])


def draw_rows(axes: Axes, bands: dict[str, pandas.DataFrame], labels: list[str], heights: np.ndarray) -> None:
    """Draw them from above, one after the other.

    Parameters
    ----------
    bands : dict of str to DataFrame
        A line per row in each: ``value``, ``low`` and ``high``, which may be NaN, ``band_start`` and ``band_stop``.
    labels, heights
        By :func:`rows_of`.
    """
    middles = heights.cumsum() - heights / 2
    for index, ((band, table), colour, marker) in enumerate(zip(bands.items(), palette(), MARKERS)):
        start, stop = table[["band_start", "band_stop"]].iloc[0]
        places = middles + _DODGE * (index - (len(bands) - 1) / 2)
        axes.hlines(places, table.low, table.high, color=colour, linewidth=1.4)
        label = f"{band}: offsets {start:,} to {stop - 1:,}"
        axes.plot(table.value, places, color=colour, marker=marker, markersize=4.5, linestyle="", label=label)
    axes.set_yticks(middles, labels)
    axes.set_ylim(heights.sum(), 0)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)


def legend_above(axes: Axes) -> None:
    """A legend over the axes, from their left end."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, borderaxespad=0.3, handlelength=1.8)
