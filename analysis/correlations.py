"""What single tokens were measured to be worth, and which signal knew it."""

from __future__ import annotations

import numpy as np
import pandas
from scipy import stats

from forward_influence.analysis.frames import Runs
from forward_influence.analysis.intervals import LEVEL, RESAMPLES, mean_interval, mean_of
from forward_influence.analysis.panel import build_panel
from forward_influence.analysis.rate_distortion import offset_bands
from forward_influence.errors import UserError
from forward_influence.rows import NOISE
from forward_influence.token_files import SCORES, read_scores

#: Two points always lie on a line, so a rank correlation takes one more.
FEWEST = 3

#: Columns that say what a line is about.
BAND = ("band", "band_start", "band_stop")
_CORRELATIONS = ["signal", *BAND, "n_documents", "n_tokens", "spearman", "low", "high"]

#: What each removed set of positions cost, by document.
Costs = dict[str, dict[tuple[int, ...], float]]


def is_token_run(runs: Runs) -> bool:
    """Whether these are the rows of ``forward-influence influence``: explicit positions, with scores beside them."""
    return all(map(_explicit, runs.rows)) and any((run.path / SCORES).is_file() for run in runs.runs)


def correlation_table(
    runs: Runs, *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> pandas.DataFrame:
    """How well each signal ranks the positions that were removed alone.

    Parameters
    ----------
    runs : Runs
        Of a per-token run.
    level, resamples, seed
        Of the bootstrap.

    Returns
    -------
    pandas.DataFrame
        One line per signal and band, the signals in falling order of ``spearman`` in the far band (of all offsets,
        if the horizon is one band). ``all`` is every offset of every document; ``near`` and ``far`` are the offsets
        from ``band_start`` up to but without ``band_stop``, in documents that reach the end of the band.

        ``spearman`` is the mean over documents of each one's rank correlation between the signal's score and the
        mean KL in the band, an infinite KL ranking highest and all below 1e-12
        nats alike; ``low`` and ``high`` are its percentile bootstrap
        interval over documents, with resamples shared by signals that have the same documents. Positions without
        a score do not count, and neither do documents with fewer than 3 positions left, or in which the signal or
        the KL is constant. ``n_documents`` counts the others, and ``n_tokens`` is the median of their positions.
        One document: no interval (NaN). No line if nothing is scored.

    Raises
    ------
    UserError
        If the run has no measured row, or its scores are broken.
    """
    bands, costs = band_costs(runs)
    scores = signal_scores(runs)
    documents = dict.fromkeys(document for found in scores.values() for document in found)
    lines, columns = [], []
    for signal, of_document in scores.items():
        for band, (start, stop) in bands.items():
            pairs = [_singles(costs[band].get(name, {}), of_document.get(name)) for name in documents]
            found = np.array([rank_correlation(*pair) for pair in pairs])
            known = ~np.isnan(found)
            columns.append(found)
            lines.append(
                {
                    "signal": signal, "band": band, "band_start": start, "band_stop": stop,
                    "n_documents": int(known.sum()), "spearman": mean_of(found[known]),
                    "n_tokens": float(np.median([len(pair[0]) for pair, one in zip(pairs, known) if one]))
                    if known.any() else np.nan,
                }
            )  # fmt: skip
    table = pandas.DataFrame(lines, columns=_CORRELATIONS)
    if not lines:
        return table
    low, high = mean_interval(np.stack(columns, axis=1), "percentile", level=level, resamples=resamples, seed=seed)
    table = table.assign(low=low, high=high)
    last = table[table.band == list(bands)[-1]].sort_values(["spearman", "signal"], ascending=[False, True])
    place = {signal: index for index, signal in enumerate(last.signal)}
    return table.sort_values("signal", key=lambda names: names.map(place), kind="stable", ignore_index=True)


def _explicit(row: dict) -> bool:
    return row["selector"].startswith("positions:")


def band_costs(runs: Runs) -> tuple[dict[str, tuple[int, int]], dict[str, Costs]]:
    """The bands, and in each the mean KL of every set of explicit positions in documents that have all of it."""
    panel = build_panel(runs)
    bands = offset_bands(panel)
    costs: dict[str, Costs] = {band: {} for band in bands}
    for row in runs.rows:
        if row["status"] != "ok" or not _explicit(row) or not row["removed"]:
            continue
        for band, (start, stop) in bands.items():
            if band == "all" or len(row["kl"]) >= stop:
                kl = row["kl"][start:stop]
                costs[band].setdefault(row["document"], {})[tuple(row["removed"])] = sum(kl) / len(kl)
    return bands, costs


def signal_scores(runs: Runs) -> dict[str, dict[str, np.ndarray]]:
    """Scores ``[prefix]`` by signal and document, for the texts that were measured; NaN where there is none."""
    texts = {row["document"]: row["document_sha"] for row in runs.rows if row["status"] == "ok"}
    found: dict[str, dict[str, np.ndarray]] = {}
    for run in runs.runs:
        for entry in read_scores(run.path, runs.hash):
            name, scores = entry["document"], np.array(entry["scores"], dtype=float)
            if len(scores) != runs.spec.prefix:
                raise UserError(
                    f"{str(run.path / SCORES)!r} has {len(scores)} scores of {entry['signal']!r} for document {name!r} "
                    f"and should have {runs.spec.prefix}; delete the file and run the same command again."
                )
            if texts.get(name) == entry["document_sha"]:
                found.setdefault(entry["signal"], {})[name] = scores
    return found


def _singles(costs: dict[tuple[int, ...], float], scores: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Scores and costs of the positions that were removed alone and have a score; costs below noise are equal."""
    pairs = [] if scores is None else [(scores[places[0]], cost) for places, cost in costs.items() if len(places) == 1]
    values = np.array(pairs, dtype=float).reshape(-1, 2)
    one, two = values[~np.isnan(values[:, 0])].T
    return one, np.where(two < NOISE, 0.0, two)


def rank_correlation(one: np.ndarray, two: np.ndarray) -> float:
    """Rank correlation; NaN from too few values, or where all of one side are equal."""
    if len(one) < FEWEST or (one == one[0]).all() or (two == two[0]).all():
        return np.nan
    return float(stats.spearmanr(one, two).statistic)
