"""What a tuning is worth on held-out documents, and how the settings came out in training."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import seaborn
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

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
from forward_influence.analysis.tuning_report import Tuning, open_tuning, tuning_table

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

#: Each metric's axis, and by what its values are multiplied there.
_PANELS = {
    "kl": ("KL (nats)", 1),
    "delta_nll": ("delta NLL (nats per token)", 1),
    "top1_changed": ("top-1 changes (% points)", 100),
}

#: Distance of two bands in a row, of which each is 1 high; and letters in a line of the title and of the caption.
_DODGE, _TITLE, _WIDTH = 0.18, 100, 140


def tuning_figure(path: str | Path) -> Figure:
    """The tuned setting minus each other on held-out documents, and the training results of the settings.

    Parameters
    ----------
    path : path
        A folder written by ``tune``, or its ``tuned.json``.

    Returns
    -------
    matplotlib.figure.Figure
        Above: mean paired differences with bootstrap intervals, a row per pair of settings and a mark per band, for KL,
        delta NLL and top-1 changes. Below: mean KL over the training documents by rank, of the settings that were
        measured on all of them. Made without pyplot.

    Raises
    ------
    UserError
        If the folder holds no tuning.
    """
    tuning = open_tuning(path)
    return _draw(tuning, tuning_table(tuning))


def plot_tuning(path: str | Path, target: str | Path | None = None, *, formats: Iterable[str] = FORMATS) -> list[Path]:
    """Write :func:`tuning_figure` and, beside it, :func:`tuning_table` as CSV.

    Parameters
    ----------
    path : path
        As for :func:`tuning_figure`.
    target : path, optional
        A folder, in which the files are called ``tuning``, or the files' common path with or without a suffix.
        Default: the folder of the tuned file.

    Returns
    -------
    list of Path
        The figures in the order of `formats`, then ``<stem>.csv``.
    """
    tuning = open_tuning(path)
    table = tuning_table(tuning)
    stem = stem_of(tuning.runs, tuning.path.parent if target is None else target, "tuning")
    return save_figure(_draw(tuning, table), stem, formats) + save_tables({"": table}, stem)


def _draw(tuning: Tuning, table: pandas.DataFrame) -> Figure:
    bands = drawn_bands(table)
    with seaborn.axes_style("ticks"), seaborn.plotting_context("paper"):
        figure = Figure(figsize=(8.6, 6.1), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(2, len(_PANELS), height_ratios=(0.5 + 0.25 * len(bands) + 1.2, 1.5))
        for column, metric in enumerate(_PANELS):
            axes = figure.add_subplot(grid[0, column])
            handles = _draw_differences(axes, tuning, table[table.metric == metric], bands)
            if column:
                axes.set_yticklabels([])
        _draw_training(figure.add_subplot(grid[1, :2]), tuning)
        corner = figure.add_subplot(grid[1, 2])
        corner.axis("off")
        corner.legend(handles=handles, title="bands above", loc="upper left", frameon=False, alignment="left")
        words = f"What tuning {tuning.content['method']} is worth on held-out documents"
        setting = textwrap.fill(f"tuned for {tuning.aim}: {tuning.setting}", _TITLE, break_on_hyphens=False)
        figure.suptitle(f"{words}\n{setting}", x=0.01, ha="left", fontsize="medium", linespacing=1.4)
        figure.supxlabel(_caption(tuning, table), x=0.01, ha="left", fontsize="small", color="0.25")
        seaborn.despine(figure)
    return figure


def drawn_bands(table: pandas.DataFrame) -> dict[str, str]:
    """Bands of a tuning's table with their labels; that of the search is told of one with the same offsets."""
    spans = {line.band: (line.band_start, line.band_stop) for line in table.itertuples()}
    aimed = spans.pop("tuned")
    if aimed not in spans.values():
        spans["tuned"] = aimed
    return {
        band: f"{'' if band == 'tuned' else f'{band}: '}offsets {start:,} to {stop - 1:,}"
        + (", tuned for" if (start, stop) == aimed else "")
        for band, (start, stop) in spans.items()
    }


def _draw_differences(axes: Axes, tuning: Tuning, table: pandas.DataFrame, bands: dict[str, str]) -> list[Line2D]:
    """A row per pair of settings with a point and an interval for each band; returns the keys of the bands."""
    name, factor = _PANELS[table.metric.iloc[0]]
    axes.axvline(0, color="0.45", linewidth=0.8, zorder=0)
    handles, pairs = [], tuning.pairs
    for index, ((band, label), colour, marker) in enumerate(zip(bands.items(), palette(), MARKERS)):
        part = table[table.band == band].set_index(["one", "other"]).loc[pairs]
        low, middle, high = (
            factor * np.where(np.isfinite(part[column]), part[column], np.nan)
            for column in ("low", "difference", "high")
        )
        heights = np.arange(len(pairs)) + _DODGE * (index - (len(bands) - 1) / 2)
        axes.hlines(heights, low, high, color=colour, linewidth=1.4)
        axes.plot(middle, heights, color=colour, marker=marker, markersize=4.5, linestyle="")
        handles.append(Line2D([], [], color=colour, marker=marker, markersize=4.5, linewidth=1.4, label=label))
    axes.set_yticks(range(len(pairs)), [_row(tuning, *pair) for pair in pairs])
    axes.set_ylim(len(pairs) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    better = "the first is better"
    better = f"\N{LEFTWARDS ARROW} {better}" if tuning.sign > 0 else f"{better} \N{RIGHTWARDS ARROW}"
    axes.set_xlabel(f"{name}\n{better}")
    return handles


def _row(tuning: Tuning, one: str, other: str) -> str:
    count = tuning.facts["random"]["tried"]
    words = {
        ("tuned", "default"): "tuned minus\ndefaults",
        ("tuned", "paper"): "tuned minus\nInfoKV of the paper",
        ("tuned", "attention"): "tuned minus\nattention alone",
        ("tuned", "random"): f"tuned minus best of\n{count} random settings",
        ("random", "default"): f"best of {count} random\nsettings minus defaults",
    }
    return words[one, other] + ("\n(the same setting)" if tuning.same(one, other) else "")


def _draw_training(axes: Axes, tuning: Tuning) -> None:
    """Training KL by rank, of the search and of random settings; a ring around the default where it came so far."""
    facts = tuning.facts
    found = {"search": facts["train_kl"], "random settings": facts["random"]["train_kl"]}
    for (name, settings), colour, marker in zip(found.items(), ("0.1", "0.55"), "o^"):
        ranked = sorted((kl for kl in settings.values() if kl is not None), reverse=tuning.sign < 0)
        axes.plot(range(1, len(ranked) + 1), ranked, label=name, color=colour, marker=marker, markersize=4.5,
                  linewidth=1)  # fmt: skip
    default = facts["train_kl"].get(facts["judged"]["default"])
    if default is not None:
        known = [value for value in facts["train_kl"].values() if value is not None]
        better = sum(tuning.sign * value < tuning.sign * default for value in known)
        axes.plot([better + 1], [default], label="defaults", color="0.1", marker="o", markersize=10, linestyle="",
                  markerfacecolor="none")  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.set_xlabel("rank among settings measured on all training documents")
    axes.set_ylabel("training KL (nats)")
    axes.margins(y=0.15)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, borderaxespad=0.2)


def _caption(tuning: Tuning, table: pandas.DataFrame) -> str:
    facts = tuning.facts
    fewest, most = int(table.n_documents.min()), int(table.n_documents.max())
    infinite = int(np.isinf(table.difference).sum())
    sentences = (
        f". Above: {'mean paired difference' if most > 1 else 'difference'} on held-out documents",
        interval_note(most, fewest, "bar"),
        f" Below: {len(facts['train'])} training documents; {facts['tried']} settings were searched and "
        f"{facts['random']['tried']} drawn at random.",
        f" Not drawn: {infinite} infinite differences." if infinite else "",
    )
    return caption(tuning.runs, f"{fewest} to {most}" if fewest < most else f"{most}", sentences, _WIDTH)
