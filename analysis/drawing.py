"""What all figures share: their files, the style of curves, the ends of a logarithmic axis, the words below."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
import seaborn
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from forward_influence.analysis.frames import Runs
from forward_influence.analysis.stats import FEW_DOCUMENTS
from forward_influence.errors import UserError
from forward_influence.paths import reachable_path
from forward_influence.rows import removal_count

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

FORMATS = ("png", "pdf", "svg")

#: Up to so many points, each has a marker.
_MARKED = 16

#: Up to so many curves, each has its interval; more would lie upon each other.
_CROWD = 8

# Colour, dash and marker all differ, so that any one of them is enough: grey print, colour blindness.
_COLOURS = (0, 1, 2, 3, 4, 9, 5)  # of seaborn's "colorblind": without its grey (the floor's) and its palest
_DASHES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)), (0, (1, 1)), (0, (8, 2, 2, 2, 2, 2)))
MARKERS = "osD^vPX*"


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


def save_tables(tables: dict[str, pandas.DataFrame], stem: str | Path) -> list[Path]:
    """Write what is behind a figure as ``<stem><name>.csv`` for each name.

    Raises
    ------
    UserError
        If a file cannot be written.
    """
    paths = []
    for name, table in tables.items():
        paths.append(Path(f"{stem}{name}.csv"))
        with _writing(paths[-1]):
            table.to_csv(paths[-1], index=False)
    return paths


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"Cannot write {str(path)!r} ({error.strerror}); give another place for the figure.") from error


def chosen(measured: Iterable[str], selectors: Sequence[str] | None) -> list[str]:
    """The names to draw: those asked for in their order, else all that were measured, each once.

    Raises
    ------
    UserError
        If one was not measured.
    """
    names = list(dict.fromkeys(measured))
    for name in selectors or ():
        if name not in names:
            raise UserError(f"Selector {name!r} was not measured in this run; it has {', '.join(names)}.")
    return list(selectors or names)


def palette() -> list:
    """Colours that colour-blind eyes tell apart, black last; the grey of numerical floors is not among them."""
    colours = seaborn.color_palette("colorblind")
    return [*(colours[index] for index in _COLOURS), "0.1"]


def positive(values: pandas.Series) -> np.ndarray:
    """Values that a logarithmic axis can show; the others become gaps."""
    return np.where(np.isfinite(values) & (values > 0), values, np.nan)


def limits(curves: dict[str, pandas.DataFrame], floor: pandas.DataFrame | None = None) -> tuple[float, float]:
    """Limits of the KL axis, from the columns ``mean``, ``low`` and ``high`` of the curves.

    Bands belong on it down to a decade below the lowest mean, a floor down to two decades below the curves.
    """
    means = np.concatenate([positive(curve["mean"]) for curve in curves.values()])
    lows, highs = (np.concatenate([positive(curve[end]) for curve in curves.values()]) for end in ("low", "high"))
    if np.isnan(means).all():
        return 1e-12, 1.0
    lowest, top = np.nanmin(means), np.nanmax([means, highs]) * 1.5
    bottom = max(min(lowest / 2, np.nanmin([means, lows]) / 1.3), lowest / 10)
    level = 0.0 if floor is None else floor["mean"].median()
    return (level / 2 if bottom / 100 < level < bottom else bottom), top


def shown_name(name: str) -> str:
    """A selector or method in a legend; what ranks by measured influence is said to be a reference."""
    if not name.startswith("influence:"):
        return name
    ranking = name.removeprefix("influence:").partition(".json")[0]
    return f"{ranking} (measured; a reference, not a bound)"


def broken(name: str, letters: int) -> str:
    """A name in lines that end where one of its parts does, or inside a part that is longer than a line."""
    lines = [""]
    for part in re.findall(r".+?(?:[+,: ](?=\S)|$)", name):
        if len(lines[-1]) + len(part.rstrip()) > letters and lines[-1]:
            lines.append("")
        lines[-1] += part
        while len(lines[-1].rstrip()) > letters:
            lines[-1:] = lines[-1][:letters], lines[-1][letters:]
    return "\n".join(line.rstrip() for line in lines)


def uncrowded(curves: dict[str, pandas.DataFrame]) -> dict[str, pandas.DataFrame]:
    """The curves, without ``low`` and ``high`` if they are so many that nobody could tell their bands apart."""
    if len(curves) <= _CROWD:
        return curves
    return {name: curve.assign(low=np.nan, high=np.nan) for name, curve in curves.items()}


def draw_curves(axes: Axes, curves: dict[str, pandas.DataFrame]) -> list[Line2D]:
    """Draw ``mean`` over ``x`` with its band for each curve; returns their keys for a legend."""
    handles = []
    styles = zip(cycle(palette()), cycle(_DASHES), cycle(MARKERS))
    for number, ((name, curve), (colour, dash, marker)) in enumerate(zip(curves.items(), styles)):
        style = {"color": colour, "linestyle": dash, "marker": marker, "markersize": 4.5, "linewidth": 1.4}
        axes.plot(curve.x, positive(curve["mean"]), markevery=_spread(curve.x, number), **style)
        low, high = curve.low.clip(lower=axes.get_ylim()[0]), positive(curve.high)
        axes.fill_between(curve.x, low, high, color=colour, alpha=0.13, linewidth=0)
        handles.append(Line2D([], [], label=shown_name(name), **style))
    return handles


def _spread(x: pandas.Series, number: int) -> list[int]:
    """Points that get a marker: all if few, else even on the logarithmic axis and staggered from curve to curve."""
    if len(x) <= _MARKED:
        return list(range(len(x)))
    targets = np.arange(np.log2(x.min()) + 0.25 * (number % 4), np.log2(x.max()) + 1)
    return sorted({int(np.abs(np.log2(x) - target).argmin()) for target in targets})


def title(runs: Runs) -> str:
    """What was measured, for a figure over selectors or methods."""
    spec = runs.spec
    if spec.mode == "keep":
        return f"What compressed caches of {spec.prefix:,} prefix tokens lose"
    share, k = f"{100 * float(spec.fraction):.3g}%", removal_count(spec.prefix, spec.fraction)
    return f"Forward Influence of {k:,} of {spec.prefix:,} prefix tokens ({share})"


def caption(runs: Runs, number: str, sentences: Iterable[str], width: int = 110) -> str:
    """The words below a figure: model, dtype and documents behind it, then `sentences` as they are, in lines."""
    # What people call the model; its identity where no run says.
    name = runs.runs[0].provenance.get("model", {}).get("name") or runs.spec.model
    extended = f", context extended by {runs.spec.extend_context}" if runs.spec.extend_context else ""
    documents = f"; n = {number} document{'' if number == '1' else 's'}"
    words = (f"{textwrap.shorten(name, 60)}, {runs.spec.dtype}", extended, documents, *sentences)
    return textwrap.fill("".join(words), width)


def band_note(most: int, fewest: int, curves: dict[str, pandas.DataFrame]) -> str:
    """What a caption says about the bands of :func:`uncrowded` curves."""
    left_out = most > 1 and all(curve.low.isna().all() for curve in curves.values())
    return "; intervals: in the table." if left_out else interval_note(most, fewest)


def interval_note(most: int, fewest: int, mark: str = "band") -> str:
    """What a caption says about the intervals, which are drawn as `mark`, of means over so many documents."""
    if most == 1:
        return "; no interval from one document."
    doubt = f", not to be trusted from fewer than {FEW_DOCUMENTS} documents" if fewest < FEW_DOCUMENTS else ""
    return f"; {mark}: its 95% bootstrap interval{doubt}."
