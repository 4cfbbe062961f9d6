"""Figure 2: log-scaled KL against the horizon, one curve per selector, with what it rests on written below.

The horizontal axis is logarithmic and each chunk is drawn at its centre: what tells selectors apart
happens within the first chunks and again after thousands of tokens, and a linear axis would give the
first chunk of a 14,000-token horizon one percent of the width.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
import seaborn
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from forward_influence.analysis.frames import Runs
from forward_influence.analysis.stats import curve_table
from forward_influence.errors import UserError

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

FORMATS = ("png", "pdf", "svg")

#: Controls are drawn apart: they say what zero looks like, not how a selector does.
FLOOR, NOTHING = "recompute", "none"
_GREY = "0.45"

# Colour, dash and marker all differ, so that any one of them is enough: grey print, colour blindness.
_DASHES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)), (0, (1, 1)), (0, (8, 2, 2, 2, 2, 2)))
_MARKERS = "osD^vPX*"


def figure2(runs: Runs, selectors: Sequence[str] | None = None, *, common: bool = False) -> Figure:
    """Mean KL per chunk with its bootstrap interval, the floor of ``recompute`` marked.

    Parameters
    ----------
    selectors : sequence of str, optional
        Which to draw, in this order; default all.
    common : bool
        Only documents measured to the end of the horizon, see :func:`curve_table`.

    Returns
    -------
    matplotlib.figure.Figure
        Made without pyplot: needs no display and leaves the caller's backend alone.
    """
    return _draw(curve_table(runs, common=common), runs, selectors)


def plot_runs(
    runs: Runs,
    target: str | Path | None = None,
    *,
    selectors: Sequence[str] | None = None,
    formats: Iterable[str] = FORMATS,
    common: bool = False,
) -> list[Path]:
    """Write Figure 2 and, beside it, the table behind it as CSV.

    Parameters
    ----------
    target : path, optional
        A folder, in which the files are called ``figure2``, or the files' common path with or without
        a suffix. Default: the (first) run folder.

    Returns
    -------
    list of Path
        The figures in the order of `formats`, then the CSV.
    """
    stem = Path(target if target is not None else runs.runs[0].path)
    stem = stem / "figure2" if stem.is_dir() else stem.with_suffix("")
    table = curve_table(runs, common=common)
    paths = save_figure(_draw(table, runs, selectors), stem, formats)
    path = Path(f"{stem}.csv")
    table[table.selector.isin(selectors or list(table.selector))].to_csv(path, index=False)
    return [*paths, path]
