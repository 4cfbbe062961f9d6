"""Figure 2: log-scaled KL against the horizon, one curve per selector, with what it rests on written below.

The horizontal axis is logarithmic and each chunk is drawn at its centre: what tells selectors apart
happens within the first chunks and again after thousands of tokens, and a linear axis would give the
first chunk of a 14,000-token horizon one percent of the width. Far out, where chunks of equal width
would crowd on it, neighbours are merged into one point.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import seaborn
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator, StrMethodFormatter

from forward_influence.analysis.drawing import (
    FORMATS,
    band_note,
    caption,
    chosen,
    draw_curves,
    limits,
    positive,
    save_figure,
    save_tables,
    stem_of,
    title,
)
from forward_influence.analysis.frames import Runs
from forward_influence.analysis.stats import curve_table

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

#: Controls are drawn apart: they say what zero looks like, not how a selector does.
FLOOR, NOTHING = "recompute", "none"

#: Up to so many points, each has a tick.
_TICKED = 5

_GREY = "0.45"


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
    return _draw(curve_table(runs, common=common, widening=True), runs, selectors)


def plot_runs(
    runs: Runs,
    target: str | Path | None = None,
    *,
    selectors: Sequence[str] | None = None,
    formats: Iterable[str] = FORMATS,
    common: bool = False,
) -> list[Path]:
    """Write Figure 2 and, beside it, what is behind it as CSV: the points drawn, and every chunk.

    Parameters
    ----------
    target : path, optional
        A folder, in which the files are called ``figure2``, or the files' common path with or without
        a suffix. Default: the (first) run folder.

    Returns
    -------
    list of Path
        The figures in the order of `formats`, then ``<stem>.csv`` and ``<stem>-chunks.csv``.
    """
    stem = stem_of(runs, target, "figure2")
    drawn = curve_table(runs, common=common, widening=True)
    paths = save_figure(_draw(drawn, runs, selectors), stem, formats)
    tables = {"": drawn, "-chunks": curve_table(runs, common=common)}
    names = chosen(drawn.selector, selectors)
    return paths + save_tables({name: table[table.selector.isin(names)] for name, table in tables.items()}, stem)


def _draw(table: pandas.DataFrame, runs: Runs, selectors: Sequence[str] | None) -> Figure:
    table = table.assign(x=(table.chunk_start + table.chunk_stop - 1) / 2)
    curves = {name: table[table.selector == name] for name in chosen(table.selector, selectors)}
    plain = {name: curve for name, curve in curves.items() if name not in (FLOOR, NOTHING)}
    counts = table[table.selector.isin(curves)].groupby("x").n_documents.max()
    with seaborn.axes_style("ticks"), seaborn.plotting_context("paper"):
        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        if counts.nunique() > 1:
            axes, lowest = figure.subplots(2, 1, sharex=True, height_ratios=(8, 1))
            _draw_counts(lowest, counts)
        else:
            axes = lowest = figure.subplots()
        axes.set_yscale("log")
        axes.set_ylim(*limits(plain or curves, curves.get(FLOOR)))
        handles = draw_curves(axes, plain)
        if FLOOR in curves:
            handles.append(_draw_floor(axes, curves[FLOOR]))
        if NOTHING in curves:
            handles.append(_name_nothing(curves[NOTHING]))
        axes.set_ylabel("mean KL divergence (nats)")
        axes.set_title(title(runs), loc="left")
        lowest.set_xlabel("offset after the prefix (tokens)")
        lowest.set_xscale("log", base=2)
        lowest.set_xlim(counts.index.min() / 1.15, counts.index.max() * 1.15)
        few = len(counts) <= _TICKED  # powers of two would be numbers at which nothing stands
        lowest.xaxis.set_major_locator(FixedLocator(counts.index) if few else LogLocator(base=2, numticks=20))
        lowest.xaxis.set_minor_locator(NullLocator())
        lowest.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        figure.legend(handles=handles, loc="outside right upper", frameon=False, handlelength=4)
        figure.supxlabel(_caption(table, plain, counts, runs), x=0.01, ha="left", fontsize="small", color="0.25")
        seaborn.despine(figure)
    return figure


def _draw_floor(axes: Axes, curve: pandas.DataFrame) -> Patch:
    """The mean KL between two computations of the same thing: what lies in this region is not signal."""
    bottom, top = axes.get_ylim()
    hatched = {"facecolor": "0.92", "edgecolor": _GREY, "hatch": "////", "linewidth": 0, "zorder": 0}
    level = curve["mean"].max()
    where = ""
    if level > bottom:
        axes.fill_between(curve.x, bottom, curve["mean"].clip(bottom, top), **hatched)
        axes.plot(curve.x, positive(curve["mean"]), color=_GREY, linestyle="--", linewidth=1, zorder=1)
    else:
        axes.add_patch(Rectangle((0, 0), 1, 0.02, transform=axes.transAxes, **hatched))
        where = ",\nbelow this axis"
    return Patch(**hatched, label=f"numerical floor\n({FLOOR}): up to {_short(level)} nats{where}")


def _name_nothing(curve: pandas.DataFrame) -> Line2D:
    """A logarithmic axis has no 0, so the control that removes nothing is named, not drawn."""
    largest = curve["max"].max()
    value = "0 at every offset" if largest == 0 else f"at most {_short(largest)} nats"
    return Line2D([], [], linestyle="", label=f"{NOTHING}: {value}")


def _short(value: float) -> str:
    return f"{value:.0e}" if value else "0"


def _draw_counts(axes: Axes, counts: pandas.Series) -> None:
    axes.fill_between(counts.index, 0, counts, step="mid", color="0.8", linewidth=0)
    axes.set_ylim(0, counts.max())
    axes.set_yticks([0, counts.max()])
    axes.set_ylabel("n")


def _caption(table: pandas.DataFrame, curves: dict[str, pandas.DataFrame], counts: pandas.Series, runs: Runs) -> str:
    chunk, first, last = runs.spec.chunk, counts.iloc[0], counts.iloc[-1]
    wide = table[table.chunk_stop - table.chunk_start > chunk].chunk_start
    wider = f" (wider from offset {wide.min():,} on)" if len(wide) else ""
    infinite = [name for name, curve in curves.items() if np.isinf(curve["mean"]).any()]
    sentences = (
        f". Line: mean over documents per chunk of {chunk} offsets{wider}, drawn at its middle",
        band_note(first, int(counts.min()), curves),
        f" Gaps: infinite mean ({', '.join(infinite)})." if infinite else "",
    )
    return caption(runs, f"{first} to {last}" if counts.nunique() > 1 else f"{first}", sentences)
