"""What a method's parameters do: mean KL by the value of one, a curve for each value of another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import seaborn
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from forward_influence.analysis.drawing import (
    FORMATS,
    MARKERS,
    caption,
    interval_note,
    palette,
    save_figure,
    save_tables,
    stem_of,
)
from forward_influence.analysis.frames import Runs
from forward_influence.analysis.parameters import in_order, settings_table
from forward_influence.analysis.rate_distortion import rate_table
from forward_influence.errors import UserError

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

_DASHES = ("-", "--", ":")  # their number and that of colours and markers have no divisor in common
_ENDS = ("kl_low", "kl", "kl_high")

#: Steps between neighbouring values, and means, that differ by more than this would hide the small ones.
_TENFOLD = 10 * (1 + 1e-9)


def parameter_figure(
    runs: Runs,
    *,
    method: str,
    x: str,
    line: str | None = None,
    defaults: Mapping[str, object],
    budget: str | float | None = None,
) -> Figure:
    """Mean KL against a parameter, one curve per value of another, with bootstrap intervals.

    Parameters
    ----------
    runs, method, x, line, defaults, budget
        As in :func:`parameter_table`.

    Returns
    -------
    matplotlib.figure.Figure
        The near and the far band beside each other, or all offsets if the horizon is one band. Values that are not
        all numbers, or whose steps differ more than tenfold, are evenly spaced. Made without pyplot.

    Raises
    ------
    UserError
        As :func:`parameter_table`, and if `x` has a single value.

    Notes
    -----
    Source: the fidelity analogue of Figures 5 (tau by k) and 6 (alpha for restricted and full entropy) of
    arXiv 2606.26875, which draws benchmark accuracy.
    """
    table = settings_table(rate_table(runs), method, x, line, defaults=defaults, budget=budget)
    return _draw(table, runs, method, x, line)


def plot_parameters(
    runs: Runs,
    target: str | Path | None = None,
    *,
    method: str,
    x: str,
    line: str | None = None,
    defaults: Mapping[str, object],
    budget: str | float | None = None,
    formats: Iterable[str] = FORMATS,
) -> list[Path]:
    """Write :func:`parameter_figure` and, beside it, its table with all bands as CSV.

    Parameters
    ----------
    target : path, optional
        A folder, in which the files are called ``parameters-<x>-<line>``, or the files' common path with or without a
        suffix. Default: the (first) run folder.

    Returns
    -------
    list of Path
        The figures in the order of `formats`, then ``<stem>.csv``.
    """
    table = settings_table(rate_table(runs), method, x, line, defaults=defaults, budget=budget)
    stem = stem_of(runs, target, "-".join(["parameters", x, *([line] if line else [])]))
    return save_figure(_draw(table, runs, method, x, line), stem, formats) + save_tables({"": table}, stem)


def _draw(table: pandas.DataFrame, runs: Runs, method: str, x: str, line: str | None) -> Figure:
    values = in_order(table.value)
    if len(values) == 1:
        raise UserError(
            f"Parameter {x!r} has one value in these settings of {method!r} ({written(values[0])}); measure others, "
            "or draw another parameter."
        )
    bands = [band for band in dict.fromkeys(table.band) if band != "all"] or ["all"]
    table = table[table.band.isin(bands)]
    places = values if evenly_numbered(values) else list(range(len(values)))
    with seaborn.axes_style("ticks"), seaborn.plotting_context("paper"):
        figure = Figure(figsize=(7.2, 4.0), layout="constrained")
        FigureCanvasAgg(figure)
        row = figure.subplots(1, len(bands), squeeze=False)[0]
        for axes, band in zip(row, bands):
            part = table[table.band == band]
            handles = _draw_curves(axes, part, dict(zip(values, places)), line)
            axes.set_title(f"{band}: offsets {part.band_start.iloc[0]:,} to {part.band_stop.iloc[0] - 1:,}", loc="left")
            axes.set_xlabel(x)
            if places is not values:
                axes.set_xticks(places, [written(value) for value in values])
                axes.set_xlim(-0.4, len(values) - 0.6)
            _scale(axes, part)
        row[0].set_ylabel("mean KL divergence (nats)")
        if table.default.any():
            handles.append(_ring([], [], label="default"))
        figure.suptitle(_title(table, runs, method, x, line), x=0.01, ha="left")
        figure.supxlabel(_caption(table, runs), x=0.01, ha="left", fontsize="small", color="0.25")
        if line is not None:
            figure.legend(handles=handles, loc="outside right upper", frameon=False, handlelength=3)
        elif table.default.any():
            row[-1].legend(handles=handles[1:], frameon=False)
        seaborn.despine(figure)
    return figure


def evenly_numbered(values: list) -> bool:
    """Whether sorted values are all numbers, and their steps alike enough for a linear axis."""
    if any(isinstance(value, str) for value in values):
        return False
    steps = np.diff(np.array(values, dtype=float))
    return len(steps) == 0 or bool(steps.max() <= _TENFOLD * steps.min())


def written(value: float | str) -> str:
    """A value as an axis writes it: 1 for 1.0."""
    return value if isinstance(value, str) else f"{value:.6g}"


def _draw_curves(axes: Axes, table: pandas.DataFrame, places: dict, line: str | None) -> list[Line2D]:
    """A curve with its band for each value of `line`, a ring around the default; returns the keys of a legend."""
    handles = []
    styles = zip(cycle(palette()), cycle(_DASHES), cycle(MARKERS))
    for name, (colour, dash, marker) in zip(in_order(table.line), styles):
        curve = table if line is None else table[table.line == name]
        at = np.array([places[value] for value in curve.value], dtype=float)
        style = {"color": colour, "linestyle": dash, "marker": marker, "markersize": 4.5, "linewidth": 1.4}
        low, mean, high = (np.where(np.isfinite(curve[part]), curve[part], np.nan) for part in _ENDS)
        axes.fill_between(at, low, high, color=colour, alpha=0.1, linewidth=0)
        if len(at) == 1:  # a band of one point has no width
            axes.vlines(at, low, high, color=colour)
        axes.plot(at, mean, **style)
        if curve.default.any():
            axes.add_line(_ring(at[curve.default], mean[curve.default]))
        handles.append(Line2D([], [], label="" if line is None else f"{line} = {written(name)}", **style))
    return handles


def _ring(x, y, **options) -> Line2D:
    return Line2D(x, y, linestyle="", marker="o", markersize=11, markerfacecolor="none", markeredgecolor="0.1",
                  markeredgewidth=1.2, zorder=5, **options)  # fmt: skip


def _scale(axes: Axes, table: pandas.DataFrame) -> None:
    """A linear KL axis around means and intervals; a logarithmic one where means differ more than tenfold."""
    means = table.kl[np.isfinite(table.kl)]
    if not len(means):
        return
    if means.min() > 0 and means.max() > _TENFOLD * means.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6))


def _title(table: pandas.DataFrame, runs: Runs, method: str, x: str, line: str | None) -> str:
    asked = table.asked.iloc[0]
    amount = asked if asked.endswith("tokens") else f"{100 * float(asked):g}%"
    return f"What {method} loses at {amount} of {runs.spec.prefix:,} prefix tokens, by {x}" + (
        f" and {line}" if line is not None else ""
    )


def _caption(table: pandas.DataFrame, runs: Runs) -> str:
    fewest, most = int(table.n_documents.min()), int(table.n_documents.max())
    infinite = table[np.isinf(table.kl)]
    sentences = (
        ". Point: mean over documents" if most > 1 else "",
        interval_note(most, fewest),
        " Bands are those of each mean alone, not of the differences between settings." if most > 1 else "",
        f" Gaps: infinite mean ({len(infinite)} point{'s' if len(infinite) > 1 else ''})." if len(infinite) else "",
    )
    return caption(runs, f"{fewest} to {most}" if fewest < most else f"{most}", sentences)
