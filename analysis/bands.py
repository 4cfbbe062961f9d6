"""Pairs of selectors: their difference per horizon band, and the offset from which one stays above."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas

from forward_influence.analysis.frames import Runs
from forward_influence.analysis.intervals import LEVEL, RESAMPLES, mean_interval, mean_of
from forward_influence.analysis.panel import build_panel
from forward_influence.errors import UserError
from forward_influence.horizon_bands import default_bands

_COLUMNS = [
    *("a", "b", "band_start", "band_stop", "n_documents", "mean_a", "mean_b"),
    *("difference", "low", "high", "n_infinite"),
]


def band_table(
    runs: Runs,
    bands: Sequence[tuple[int, int]] | None = None,
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> pandas.DataFrame:
    """Difference of mean KL between each two selectors, per band of offsets.

    Parameters
    ----------
    bands : sequence of (start, stop), optional
        Offsets, without `stop`. Default: 0-128, 128-1024, 1024-4096 and 4096 to the horizon, cut at
        the largest offset that at least half of the documents reach.
    level, resamples, seed
        Of the bootstrap.

    Returns
    -------
    pandas.DataFrame
        ``difference`` is the mean over documents of (mean KL of ``a`` in the band minus that of
        ``b``), in nats, with ``low`` and ``high``, its paired percentile bootstrap interval over
        documents; ``mean_a`` and ``mean_b`` are over the same ``n_documents``: those in which both
        were measured through the whole band. The intervals are per line, not corrected for the
        number of lines. An infinite KL makes the difference infinite, or NaN where both are
        (``n_infinite`` counts the documents). One document: no interval (NaN).
    """
    panel = build_panel(runs)
    bands = default_bands(panel.horizon) if bands is None else [_check_band(band) for band in bands]
    # A document that does not reach a band's end has NaN there, and so has its mean.
    nobody = np.full(panel.kl.shape[:2], np.nan)
    means = [
        panel.kl[:, :, start:stop].mean(axis=-1) if stop <= panel.kl.shape[-1] else nobody for start, stop in bands
    ]
    lines, differences = [], []
    for i, j in combinations(range(len(panel.selectors)), 2):
        for (start, stop), by_document in zip(bands, means):
            pair = by_document[[i, j]]
            both = ~np.isnan(pair).any(axis=0)
            with np.errstate(invalid="ignore"):  # infinity minus infinity
                difference = pair[0] - pair[1]
            differences.append(difference)
            lines.append(
                {
                    "a": panel.selectors[i],
                    "b": panel.selectors[j],
                    "band_start": start,
                    "band_stop": stop,
                    "n_documents": int(both.sum()),
                    "mean_a": mean_of(pair[0, both]),
                    "mean_b": mean_of(pair[1, both]),
                    "difference": mean_of(difference[both]),
                    "n_infinite": int(np.isinf(pair[:, both]).any(axis=0).sum()),
                }
            )
    table = pandas.DataFrame(lines, columns=_COLUMNS)
    if lines:
        low, high = mean_interval(
            np.stack(differences, axis=1), "percentile", level=level, resamples=resamples, seed=seed
        )
        undefined = table.difference.isna()
        table = table.assign(low=np.where(undefined, np.nan, low), high=np.where(undefined, np.nan, high))
    return table


@dataclass(frozen=True)
class Crossover:
    """Where one selector's curve rises above the other's for good.

    Attributes
    ----------
    above, below : str
        The selector that is above at the end, and the other.
    offset : int
        First offset of the chunk from which it stays above up to `horizon`; 0 if it always was.
    low, high : float
        Percentile interval of `offset` over bootstrap resamples of the documents that agree on who
        ends above; NaN with one document.
    support : float
        Share of the resamples that agree on it; NaN with one document.
    n_documents, horizon : int
        Documents behind both curves, all of which reach the horizon.
    """

    above: str
    below: str
    offset: int
    low: float
    high: float
    support: float
    n_documents: int
    horizon: int


def crossover(
    runs: Runs, a: str, b: str, *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> Crossover | None:
    """The offset from which the mean curve of one selector stays above the other's to the end.

    Both curves are means per chunk over the same documents: those in which both selectors were
    measured up to the largest offset that at least half of the documents reach.

    Returns
    -------
    Crossover or None
        None if no document qualifies, or neither curve is above in the last chunk.
    """
    panel = build_panel(runs)
    pair = [panel.index(a), panel.index(b)]
    whole = (panel.reach[pair] >= panel.horizon).all(axis=0)
    curves = panel.kl_mean[pair][:, whole, : panel.chunks_to(panel.horizon)]
    documents = curves.shape[1]
    if documents == 0:
        return None
    sign, onset = _onset(curves)
    if sign == 0:
        return None
    low = high = support = float("nan")
    if documents > 1:
        draws = np.random.default_rng(seed).integers(documents, size=(resamples, documents))
        onsets = [o for s, o in (_onset(curves[:, draw]) for draw in draws) if s == sign]
        support = len(onsets) / resamples
        if onsets:
            tail = (1 - level) / 2
            bounds = np.quantile(onsets, (tail, 1 - tail), method="inverted_cdf")
            low, high = panel.edges[bounds].astype(float).tolist()
    above, below = (a, b) if sign > 0 else (b, a)
    return Crossover(above, below, int(panel.edges[onset]), low, high, support, documents, panel.horizon)


def _onset(curves: np.ndarray) -> tuple[int, int]:
    """Who is above at the end (1 first, -1 second, 0 neither) and the chunk from which it stays so.

    `curves` is `[2, documents, chunks]`.
    """
    first, second = curves.mean(axis=1)
    sign = (first > second).astype(int) - (first < second)
    other = np.flatnonzero(sign != sign[-1])
    return int(sign[-1]), int(other[-1]) + 1 if len(other) else 0


def _check_band(band: tuple[int, int]) -> tuple[int, int]:
    start, stop = band
    if not 0 <= start < stop:
        raise UserError(f"Band {tuple(band)} is empty; give (start, stop) offsets with 0 <= start < stop.")
    return start, stop
