"""Rate-distortion curves: what each compression method loses against how much it keeps, near and far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import seaborn
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from forward_influence.analysis.drawing import (
    FORMATS,
    band_note,
    broken,
    caption,
    chosen,
    draw_curves,
    limits,
    save_figure,
    save_tables,
    shown_name,
    stem_of,
    title,
    uncrowded,
)
from forward_influence.analysis.frames import Runs
from forward_influence.analysis.rate_distortion import rate_differences, rate_table

if TYPE_CHECKING:
    import pandas

#: Ticks of the horizontal axis are at least this share of it apart, so that their labels do not touch.
_APART = 0.19

#: Letters of a line of a method's name; inches that all but the legend's entries, a line and an entry's rest take.
_LETTERS, _FRAME, _LINE, _ENTRY = 28, 0.5, 0.165, 1.35


def rate_figure(runs: Runs, selectors: Sequence[str] | None = None) -> Figure:
    """Mean KL against the share of the prefix kept, one curve per method with its bootstrap interval.

    Parameters
    ----------
    selectors : sequence of str, optional
        Methods to draw as :func:`rate_table` names them (``snapkv``, without a budget), in this order; default all.

    Returns
    -------
    matplotlib.figure.Figure
        The near and the far band beside each other, or all offsets if the horizon is one band. Made without
        pyplot.
    """
    return _draw(rate_table(runs), runs, selectors)


def plot_rates(
    runs: Runs,
    target: str | Path | None = None,
    *,
    selectors: Sequence[str] | None = None,
    formats: Iterable[str] = FORMATS,
) -> list[Path]:
    """Write the rate-distortion curves and, beside them, the rates and the methods' differences as CSV.

    Parameters
    ----------
    target : path, optional
        A folder, in which the files are called ``fidelity``, or the files' common path with or without a
        suffix. Default: the (first) run folder.

    Returns
    -------
    list of Path
        The figures in the order of `formats`, then ``<stem>.csv`` and ``<stem>-differences.csv``.
    """
    return save_rates(runs, stem_of(runs, target, "fidelity"), _draw, selectors, formats)


def save_rates(
    runs: Runs,
    stem: Path,
    draw: Callable[[pandas.DataFrame, Runs, Sequence[str] | None], Figure],
    selectors: Sequence[str] | None,
    formats: Iterable[str],
) -> list[Path]:
    """Write a figure that is drawn from the rates and, beside it, the rates and the methods' differences as CSV."""
    rates, differences = rate_table(runs), rate_differences(runs)
    paths = save_figure(draw(rates, runs, selectors), stem, formats)
    names = chosen(rates.method, selectors)
    differences = differences[differences.a.isin(names) & differences.b.isin(names)]
    return paths + save_tables({"": rates[rates.method.isin(names)], "-differences": differences}, stem)


def _draw(rates: pandas.DataFrame, runs: Runs, selectors: Sequence[str] | None) -> Figure:
    table = rates.rename(
        columns={"method": "selector", "budget": "x", "kl": "mean", "kl_low": "low", "kl_high": "high"}
    )
    names = chosen(table.selector, selectors)
    bands = [band for band in dict.fromkeys(table.band) if band != "all"] or ["all"]
    table = table[table.selector.isin(names) & table.band.isin(bands)].sort_values("x", kind="stable")
    panels = {
        band: uncrowded({name: table[(table.selector == name) & (table.band == band)] for name in names})
        for band in bands
    }
    with seaborn.axes_style("ticks"), seaborn.plotting_context("paper"):
        labels = [_label(name, table) for name in names]
        height = _FRAME + _LINE * sum(label.count("\n") + _ENTRY for label in labels)
        figure = Figure(figsize=(7.2, max(4.6, height)), layout="constrained")
        FigureCanvasAgg(figure)
        row = figure.subplots(1, len(bands), sharey=True, squeeze=False)[0]
        row[0].set_yscale("log")
        row[0].set_ylim(*limits({(band, name): panels[band][name] for band in bands for name in names}))
        row[0].set_ylabel("mean KL divergence (nats)")
        for axes, (band, curves) in zip(row, panels.items()):
            handles = draw_curves(axes, curves)
            _draw_bars(axes, curves, handles)
            first = table[table.band == band].iloc[0]
            axes.set_title(f"{band}: offsets {first.band_start:,} to {first.band_stop - 1:,}", loc="left")
            _scale(axes, table.x)
        for handle, label in zip(handles, labels):
            handle.set_label(label)
        figure.suptitle(title(runs), x=0.01, ha="left")
        figure.supxlabel(_caption(table, panels[bands[0]], runs), x=0.01, ha="left", fontsize="small", color="0.25")
        figure.legend(handles=handles, loc="outside right upper", frameon=False, handlelength=4)
        seaborn.despine(figure)
    return figure


def _label(name: str, table: pandas.DataFrame) -> str:
    nothing = (table[table.selector == name]["mean"] == 0).all()  # a logarithmic axis has no 0
    return broken(f"{shown_name(name)}: 0" if nothing else shown_name(name), _LETTERS)


def _draw_bars(axes, curves: dict[str, pandas.DataFrame], handles) -> None:
    """The interval of a method with one budget: its band would have no width."""
    for curve, handle in zip(curves.values(), handles):
        if len(curve) == 1:
            axes.vlines(curve.x, curve.low.clip(lower=axes.get_ylim()[0]), curve.high, color=handle.get_color())


def _scale(axes, budgets: pandas.Series) -> None:
    """A logarithmic axis of shares, with ticks at the measured ones as far as there is room."""
    low, high = budgets.min() / 1.15, budgets.max() * 1.15
    ticks: list[float] = []
    for share in sorted(set(budgets)):
        if not ticks or np.log(share / ticks[-1]) >= _APART * np.log(high / low):
            ticks.append(share)
    axes.set_xlabel("share of the prefix kept")
    axes.set_xscale("log", base=2)
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0 if ticks[0] >= 0.1 else 1))


def _caption(table: pandas.DataFrame, curves: dict[str, pandas.DataFrame], runs: Runs) -> str:
    fewest, most = int(table.n_documents.min()), int(table.n_documents.max())
    infinite = list(dict.fromkeys(table[np.isinf(table["mean"])].selector))
    sentences = (
        ". Point: mean over documents" if most > 1 else "",
        band_note(most, fewest, curves),
        f" Gaps: infinite mean ({', '.join(infinite)})." if infinite else "",
    )
    return caption(runs, f"{fewest} to {most}" if fewest < most else f"{most}", sentences)
