"""Figure 2: log-scaled KL against the horizon, one curve per selector, with what it rests on written below.

The horizontal axis is logarithmic and each chunk is drawn at its centre: what tells selectors apart
happens within the first chunks and again after thousands of tokens, and a linear axis would give the
first chunk of a 14,000-token horizon one percent of the width. Far out, where chunks of equal width
would crowd on it, neighbours are merged into one point.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
import seaborn
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator, StrMethodFormatter

from forward_influence.analysis.frames import Runs
from forward_influence.analysis.stats import FEW_DOCUMENTS, curve_table
from forward_influence.errors import UserError
from forward_influence.paths import reachable_path
from forward_influence.rows import removal_count

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

FORMATS = ("png", "pdf", "svg")

#: Controls are drawn apart: they say what zero looks like, not how a selector does.
FLOOR, NOTHING = "recompute", "none"

#: Up to so many points, each has a marker; up to so many, each has a tick.
_MARKED, _TICKED = 16, 5

_GREY = "0.45"

# Colour, dash and marker all differ, so that any one of them is enough: grey print, colour blindness.
_COLOURS = (0, 1, 2, 3, 4, 9, 5)  # of seaborn's "colorblind": without its grey (the floor's) and its palest
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
    for name, table in (("", drawn), ("-chunks", curve_table(runs, common=common))):
        paths.append(Path(f"{stem}{name}.csv"))
        with _writing(paths[-1]):
            table[table.selector.isin(_chosen(table, selectors))].to_csv(paths[-1], index=False)
    return paths


def stem_of(runs: Runs, target: str | Path | None, name: str) -> Path:
    """Common path of a figure's files: called `name` in a folder, else `target` without a figure's suffix."""
    stem = runs.runs[0].path if target is None else reachable_path(target, "out")
    if stem.is_dir():
        return stem / name
    return stem.with_suffix("") if stem.suffix.lstrip(".") in (*FORMATS, "csv") else stem


def save_figure(figure: Figure, stem: str | Path, formats: Iterable[str] = FORMATS) -> list[Path]:
    """Write a figure as ``<stem>.<format>`` for each format; the same figure gives the same bytes.

    Raises
    ------
    UserError
        If a format is unknown, or a file cannot be written.
    """
    known = figure.canvas.get_supported_filetypes()
    paths = []
    for name in formats:
        if name not in known:
            raise UserError(f"Figure format {name!r} is unknown; give some of {', '.join(sorted(known))}.")
        path = Path(f"{stem}.{name}")
        undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(name)
        # Text stays text, in TrueType fonts, as publishers ask.
        fonts = {"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "figure2"}
        with _writing(path), matplotlib.rc_context(fonts):
            figure.savefig(path, dpi=200, metadata=undated)
        paths.append(path)
    return paths


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"Cannot write {str(path)!r} ({error.strerror}); give another place for the figure.") from error


def _draw(table: pandas.DataFrame, runs: Runs, selectors: Sequence[str] | None) -> Figure:
    table = table.assign(x=(table.chunk_start + table.chunk_stop - 1) / 2)
    curves = {name: table[table.selector == name] for name in _chosen(table, selectors)}
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
        axes.set_ylim(*_limits(plain or curves, curves.get(FLOOR)))
        handles = _draw_curves(axes, plain)
        if FLOOR in curves:
            handles.append(_draw_floor(axes, curves[FLOOR]))
        if NOTHING in curves:
            handles.append(_name_nothing(curves[NOTHING]))
        axes.set_ylabel("mean KL divergence (nats)")
        axes.set_title(_title(runs), loc="left")
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


def _chosen(table: pandas.DataFrame, selectors: Sequence[str] | None) -> list[str]:
    measured = list(dict.fromkeys(table.selector))
    for name in selectors or ():
        if name not in measured:
            raise UserError(f"Selector {name!r} was not measured in this run; it has {', '.join(measured)}.")
    return list(selectors or measured)


def _positive(values: pandas.Series) -> np.ndarray:
    """Values that a logarithmic axis can show; the others become gaps."""
    return np.where(np.isfinite(values) & (values > 0), values, np.nan)


def _limits(curves: dict[str, pandas.DataFrame], floor: pandas.DataFrame | None) -> tuple[float, float]:
    """Limits of the KL axis.

    Bands belong on it down to a decade below the lowest mean, a floor down to two decades below the curves.
    """
    means = np.concatenate([_positive(curve["mean"]) for curve in curves.values()])
    lows, highs = (np.concatenate([_positive(curve[end]) for curve in curves.values()]) for end in ("low", "high"))
    if np.isnan(means).all():
        return 1e-12, 1.0
    lowest, top = np.nanmin(means), np.nanmax([means, highs]) * 1.5
    bottom = max(min(lowest / 2, np.nanmin([means, lows]) / 1.3), lowest / 10)
    level = 0.0 if floor is None else floor["mean"].median()
    return (level / 2 if bottom / 100 < level < bottom else bottom), top


def _draw_curves(axes: Axes, curves: dict[str, pandas.DataFrame]) -> list[Line2D]:
    palette = seaborn.color_palette("colorblind")
    colours = [*(palette[index] for index in _COLOURS), "0.1"]
    styles = zip(cycle(colours), cycle(_DASHES), cycle(_MARKERS))
    handles = []
    for number, ((name, curve), (colour, dash, marker)) in enumerate(zip(curves.items(), styles)):
        style = {"color": colour, "linestyle": dash, "marker": marker, "markersize": 4.5, "linewidth": 1.4}
        axes.plot(curve.x, _positive(curve["mean"]), markevery=_spread(curve.x, number), **style)
        low, high = curve.low.clip(lower=axes.get_ylim()[0]), _positive(curve.high)
        axes.fill_between(curve.x, low, high, color=colour, alpha=0.13, linewidth=0)
        handles.append(Line2D([], [], label=name, **style))
    return handles


def _spread(x: pandas.Series, number: int) -> list[int]:
    """Points that get a marker: all if few, else even on the logarithmic axis and staggered from curve to curve."""
    if len(x) <= _MARKED:
        return list(range(len(x)))
    targets = np.arange(np.log2(x.min()) + 0.25 * (number % 4), np.log2(x.max()) + 1)
    return sorted({int(np.abs(np.log2(x) - target).argmin()) for target in targets})


def _draw_floor(axes: Axes, curve: pandas.DataFrame) -> Patch:
    """The mean KL between two computations of the same thing: what lies in this region is not signal."""
    bottom, top = axes.get_ylim()
    hatched = {"facecolor": "0.92", "edgecolor": _GREY, "hatch": "////", "linewidth": 0, "zorder": 0}
    level = curve["mean"].max()
    where = ""
    if level > bottom:
        axes.fill_between(curve.x, bottom, curve["mean"].clip(bottom, top), **hatched)
        axes.plot(curve.x, _positive(curve["mean"]), color=_GREY, linestyle="--", linewidth=1, zorder=1)
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


def _title(runs: Runs) -> str:
    spec = runs.spec
    if spec.mode == "keep":
        return f"What compressed caches of {spec.prefix:,} prefix tokens lose"
    share, k = f"{100 * float(spec.fraction):.3g}%", removal_count(spec.prefix, spec.fraction)
    return f"Forward Influence of {k:,} of {spec.prefix:,} prefix tokens ({share})"


def _model_name(runs: Runs) -> str:
    """What people call the model; its identity where no run says."""
    return runs.runs[0].provenance.get("model", {}).get("name") or runs.spec.model


def _caption(table: pandas.DataFrame, curves: dict[str, pandas.DataFrame], counts: pandas.Series, runs: Runs) -> str:
    spec = runs.spec
    first, last = counts.iloc[0], counts.iloc[-1]
    number = f"{first} to {last}" if counts.nunique() > 1 else f"{first}"
    wide = table[table.chunk_stop - table.chunk_start > spec.chunk].chunk_start
    wider = f" (wider from offset {wide.min():,} on)" if len(wide) else ""
    infinite = [name for name, curve in curves.items() if np.isinf(curve["mean"]).any()]
    parts = (
        f"{textwrap.shorten(_model_name(runs), 60)}, {spec.dtype}",
        f", context extended by {spec.extend_context}" if spec.extend_context else "",
        f"; n = {number} document{'' if number == '1' else 's'}",
        f". Line: mean over documents per chunk of {spec.chunk} offsets{wider}, drawn at its middle",
        _band(first, int(counts.min())),
        f" Gaps: infinite mean ({', '.join(infinite)})." if infinite else "",
    )
    return textwrap.fill("".join(parts), 110)


def _band(first: int, fewest: int) -> str:
    """What the caption says about the bands."""
    if first == 1:
        return "; no interval from one document."
    doubt = f", not to be trusted from fewer than {FEW_DOCUMENTS} documents" if fewest < FEW_DOCUMENTS else ""
    return f"; band: its 95% bootstrap interval{doubt}."
