"""Per-token figure: how well each signal ranks single tokens, and whether their influence adds up over sets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas
import seaborn
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from forward_influence.analysis.additivity import OTHER, additivity_table, set_table
from forward_influence.analysis.correlations import correlation_table
from forward_influence.analysis.drawing import (
    FORMATS,
    MARKERS,
    caption,
    chosen,
    interval_note,
    palette,
    save_figure,
    save_tables,
    stem_of,
)
from forward_influence.analysis.frames import Runs
from forward_influence.analysis.row_plot import draw_rows, legend_above, rows_of
from forward_influence.errors import UserError
from forward_influence.token_sets import MEASURED, RANDOM

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Inches that all but the rows of signals take, and the least that a figure has.
_FRAME, _HEIGHT = 1.7, 3.6

#: Letters in a line of the caption of a figure with two panels.
_WIDTH = 130

_GREY = "0.45"


def correlation_figure(runs: Runs, selectors: Sequence[str] | None = None) -> Figure:
    """Rank correlation of each signal with single tokens' influence, and sets against the sum of their members.

    Parameters
    ----------
    selectors : sequence of str, optional
        Signals to draw, in this order; default all, the best in the far band first.

    Returns
    -------
    matplotlib.figure.Figure
        The second panel is left out where no set was measured. Made without pyplot.

    Raises
    ------
    UserError
        If the run has no scores, or not that signal.
    """
    return _draw(correlation_table(runs), set_table(runs), runs, selectors)


def plot_correlations(
    runs: Runs,
    target: str | Path | None = None,
    *,
    selectors: Sequence[str] | None = None,
    formats: Iterable[str] = FORMATS,
) -> list[Path]:
    """Write the figure and, beside it, the correlations and the additivity as CSV.

    Parameters
    ----------
    target : path, optional
        A folder, in which the files are called ``correlations``, or the files' common path with or without a
        suffix. Default: the (first) run folder.

    Returns
    -------
    list of Path
        The figures in the order of `formats`, then ``<stem>.csv`` and ``<stem>-additivity.csv``.
    """
    stem = stem_of(runs, target, "correlations")
    table = correlation_table(runs)
    paths = save_figure(_draw(table, set_table(runs), runs, selectors), stem, formats)
    drawn = table[table.signal.isin(chosen(table.signal, selectors))]
    return paths + save_tables({"": drawn, "-additivity": additivity_table(runs)}, stem)


def _draw(table: pandas.DataFrame, sets: pandas.DataFrame, runs: Runs, selectors: Sequence[str] | None) -> Figure:
    if not len(table):
        raise UserError(
            f"The run in {str(runs.runs[0].path)!r} has no scores of signals; "
            "measure single tokens with forward-influence influence."
        )
    names = chosen(table.signal, selectors)
    bands = [band for band in dict.fromkeys(table.band) if band != "all"] or ["all"]
    table = table[table.signal.isin(names) & table.band.isin(bands)]
    sets = sets[sets.band == "all"].drop_duplicates(["document", "positions"])  # chosen by several
    shown = sets[np.isfinite(sets[["set_kl", "sum_kl"]]).all(axis=1) & (sets[["set_kl", "sum_kl"]] > 0).all(axis=1)]
    labels, rows = rows_of(names)
    with seaborn.axes_style("ticks"), seaborn.plotting_context("paper"):
        figure = Figure(figsize=(8.6 if len(shown) else 7.2, max(_HEIGHT, _FRAME + rows.sum())), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, 2 if len(shown) else 1, squeeze=False, width_ratios=(4, 3) if len(shown) else None)
        by_band = {band: table[table.band == band].set_index("signal").loc[names] for band in bands}
        by_band = {band: part.rename(columns={"spearman": "value"}) for band, part in by_band.items()}
        _draw_signals(panels[0, 0], by_band, labels, rows)
        if len(shown):
            _draw_sets(panels[0, 1], shown)
        figure.suptitle(f"Forward Influence of single tokens in a prefix of {runs.spec.prefix:,}", x=0.01, ha="left")
        words = _caption(table, shown, len(sets) - len(shown), runs)
        figure.supxlabel(words, x=0.01, ha="left", fontsize="small", color="0.25")
        seaborn.despine(figure)
    return figure


def _draw_signals(axes: Axes, bands: dict[str, pandas.DataFrame], labels: list[str], heights: np.ndarray) -> None:
    """A row per signal, with a point and an interval for each band."""
    axes.axvline(0, color=_GREY, linewidth=0.8, zorder=0)
    draw_rows(axes, bands, labels, heights)
    axes.set_xlabel("rank correlation of score and KL")
    legend_above(axes)


def _draw_sets(axes: Axes, sets: pandas.DataFrame) -> None:
    """What each set costs against the sum of its members: random ones by size, and what was ranked highest."""
    ends = _ends(sets[["set_kl", "sum_kl"]].to_numpy())
    axes.plot(ends, ends, color=_GREY, linestyle="--", linewidth=1, zorder=1, label="set = sum of its members")
    plain = {"markeredgewidth": 0, "alpha": 0.7}
    styles = [
        {"color": colour, "marker": marker, "markersize": 4} | plain for colour, marker in zip(palette(), MARKERS)
    ]
    parts = {
        f"sets of {size}, {'random' if name == RANDOM else 'other'}": (part, style)
        for ((size, name), part), style in zip(
            sets[sets.chosen_by.isin([RANDOM, OTHER])].groupby(["size", "chosen_by"]), cycle(styles[2:])
        )
    }  # the first two looks are those of the bands
    top = {"color": "0.1", "marker": "*", "markersize": 7} | plain
    parts["ranked highest, by influence"] = (sets[sets.chosen_by == MEASURED], top)
    signals = {"color": "0.6", "marker": ".", "markersize": 3.5, "zorder": 1.5} | plain
    parts["ranked highest, by a signal"] = (sets[~sets.chosen_by.isin([RANDOM, MEASURED, OTHER])], signals)
    for label, (part, style) in parts.items():
        if len(part):
            axes.plot(part.sum_kl, part.set_kl, linestyle="", label=label, **style)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(numticks=6))
        axis.set_minor_formatter(NullFormatter())
    axes.set_box_aspect(1)
    axes.set_anchor("N")
    axes.set_xlabel("sum of the members' mean KL (nats)")
    axes.set_ylabel("mean KL of the set (nats)")
    legend_above(axes)


def _ends(values: np.ndarray) -> tuple[float, float]:
    """Limits around the values with two powers of ten between them at least, for only those have labels."""
    low, high = np.log10(values.min() / 1.5), np.log10(values.max() * 1.5)
    if np.floor(high) - np.ceil(low) < 1:
        low, high = np.floor(low), np.ceil(high)
    return 10**low, 10**high


def _caption(table: pandas.DataFrame, sets: pandas.DataFrame, undrawn: int, runs: Runs) -> str:
    known = table[table.n_documents > 0]
    fewest, most = (int(known.n_documents.min()), int(known.n_documents.max())) if len(known) else (0, 0)
    pointless = [name for name in dict.fromkeys(table.signal) if name not in set(known.signal)]
    sentences = (
        f", {known.n_tokens.median():,.0f} tokens removed one at a time in each" if len(known) else "",
        f". {'Left: ' if len(sets) else ''}Spearman correlation{', mean over documents' if most > 1 else ''}",
        interval_note(most, fewest, "bar") if most else ".",
        f" No point: nothing to rank by ({', '.join(pointless)})." if pointless else "",
        " Right: a point per set and document, over all offsets." if len(sets) else "",
        f" Not drawn: {undrawn} set{'s' if undrawn > 1 else ''} of zero or infinite KL." if undrawn else "",
    )
    return caption(runs, f"{fewest} to {most}" if fewest < most else f"{most}", sentences, _WIDTH if len(sets) else 110)
