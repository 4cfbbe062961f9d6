"""Compression methods below each other, the one that loses least first: for many methods at few budgets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas
import seaborn
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from forward_influence.analysis.drawing import (
    FORMATS,
    caption,
    chosen,
    interval_note,
    positive,
    shown_name,
    stem_of,
    title,
)
from forward_influence.analysis.frames import Runs
from forward_influence.analysis.rate_curves import save_rates
from forward_influence.analysis.rate_distortion import rate_table
from forward_influence.analysis.row_plot import draw_rows, legend_above, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Inches that the names and each panel take, and those above and below the rows.
_NAMES, _PANEL, _FRAME = 2.4, 2.6, 1.9

#: An axis shorter than this has numbers between the powers of ten.
_DECADES = 1.7


def ranking_figure(runs: Runs, selectors: Sequence[str] | None = None) -> Figure:
    """Mean KL of each method with its bootstrap interval, near and far, in a panel for each budget.

    Parameters
    ----------
    selectors : sequence of str, optional
        Methods to draw; default all. The order is that of log KL against its mean at each budget.

    Returns
    -------
    matplotlib.figure.Figure
        Made without pyplot.

    Raises
    ------
    UserError
        If the run removes tokens, or has not that method.
    """
    return _draw(rate_table(runs), runs, selectors)


def plot_ranking(
    runs: Runs,
    target: str | Path | None = None,
    *,
    selectors: Sequence[str] | None = None,
    formats: Iterable[str] = FORMATS,
) -> list[Path]:
    """Write :func:`ranking_figure` and, beside it, the rates and the methods' differences as CSV.

    Parameters
    ----------
    target : path, optional
        A folder, in which the files are called ``ranking``, or the files' common path with or without a suffix.
        Default: the (first) run folder.

    Returns
    -------
    list of Path
        The figures in the order of `formats`, then ``<stem>.csv`` and ``<stem>-differences.csv``.
    """
    return save_rates(runs, stem_of(runs, target, "ranking"), _draw, selectors, formats)


def _draw(rates: pandas.DataFrame, runs: Runs, selectors: Sequence[str] | None) -> Figure:
    asked_for = chosen(rates.method, selectors)
    names = [name for name in _least_first(rates) if name in asked_for]
    bands = [band for band in dict.fromkeys(rates.band) if band != "all"] or ["all"]
    table = rates[rates.method.isin(names) & rates.band.isin(bands)]
    budgets = list(dict.fromkeys(table.asked))
    labels, heights = rows_of(map(shown_name, names))
    with seaborn.axes_style("ticks"), seaborn.plotting_context("paper"):
        size = (_NAMES + _PANEL * len(budgets), _FRAME + heights.sum())
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        row = figure.subplots(1, len(budgets), sharey=True, sharex=True, squeeze=False)[0]
        for axes, asked in zip(row, budgets):
            part = table[table.asked == asked]
            draw_rows(axes, {band: _values(part[part.band == band], names) for band in bands}, labels, heights)
            _scale(axes)
            axes.grid(axis="x", color="0.92", linewidth=0.8)
            axes.set_xlabel(f"mean KL (nats), budget {asked}")
        legend_above(row[0])
        figure.suptitle(title(runs), x=0.01, ha="left")
        figure.supxlabel(_caption(table, runs, len(budgets)), x=0.01, ha="left", fontsize="small", color="0.25")
        seaborn.despine(figure)
    return figure


def _scale(axes: Axes) -> None:
    """A logarithmic axis with numbers on it, also where no power of ten lies within."""
    values = np.concatenate([line.get_xdata() for line in axes.lines])
    if np.isnan(values).all():
        axes.set_xlim(1e-12, 1)
    axes.set_xscale("log")
    few = np.diff(np.log10(axes.get_xlim())) < _DECADES
    axes.xaxis.set_major_locator(LogLocator(numticks=6, subs=(1, 2, 5) if few else (1,)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def _least_first(rates: pandas.DataFrame) -> list[str]:
    """By log KL against the mean of each budget, so that a method is not judged by which budgets it has."""
    whole = rates[rates.band == "all"]
    with np.errstate(divide="ignore", invalid="ignore"):
        logarithm = np.log(whole.kl.where(whole.kl > 0))  # what a budget of everything loses tells no two apart
        usual = logarithm.where(np.isfinite(logarithm)).groupby(whole.asked).transform("mean").fillna(0)
        typical = (logarithm - usual).groupby(whole.method, sort=False).mean()
        return list(typical.fillna(-np.inf).sort_values(kind="stable").index)


def _values(rates: pandas.DataFrame, names: list[str]) -> pandas.DataFrame:
    """A line per name for :func:`draw_rows`, with gaps where a method has nothing that a logarithmic axis shows."""
    found = rates.set_index("method").reindex(names)
    least = np.nanmin(positive(found.kl), initial=np.inf) / 10  # an interval down to 0 goes a decade down
    low = np.where(found.kl_low == 0, least, positive(found.kl_low))
    found = found.assign(value=positive(found.kl), low=low, high=positive(found.kl_high))
    return found.assign(band_start=rates.band_start.iloc[0], band_stop=rates.band_stop.iloc[0])


def _caption(table: pandas.DataFrame, runs: Runs, budgets: int) -> str:
    drawn = table[table.n_documents > 0]  # a method may have no document that reaches a band
    fewest, most = int(drawn.n_documents.min()), int(drawn.n_documents.max())
    gaps = list(dict.fromkeys(drawn[~(np.isfinite(drawn.kl) & (drawn.kl > 0))].method))
    sentences = (
        f". Point: mean{' over documents' if most > 1 else ''}",
        interval_note(most, fewest, "bar"),
        " Paired differences are surer than these bars: they are in the table." if most > 1 else "",
        f" No point: zero or infinite mean ({', '.join(gaps)})." if gaps else "",
    )
    width = round(13.5 * (_NAMES + _PANEL * budgets))
    return caption(runs, f"{fewest} to {most}" if fewest < most else f"{most}", sentences, width)
