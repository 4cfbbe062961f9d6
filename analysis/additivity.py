"""Whether the influence of single tokens adds up over a set, and over which sets."""

from __future__ import annotations

import numpy as np
import pandas
from scipy import stats

from forward_influence.analysis.correlations import BAND, Costs, band_costs, rank_correlation
from forward_influence.analysis.frames import Runs
from forward_influence.analysis.intervals import LEVEL, RESAMPLES, mean_of
from forward_influence.token_files import read_sets
from forward_influence.token_sets import RANDOM

#: Sets of a run that nobody noted as chosen.
OTHER = "other sets"

_SETS = ["document", "positions", "size", "chosen_by", *BAND, "set_kl", "sum_kl"]
_ADDITIVITY = [
    *("size", "chosen_by", *BAND, "n_sets", "n_documents"),
    *("set_kl", "sum_kl", "ratio", "low", "high", "spearman"),
]


def set_table(runs: Runs) -> pandas.DataFrame:
    """What each set cost, against the sum of what its members cost alone.

    Returns
    -------
    pandas.DataFrame
        One line per document, band (as in :func:`~forward_influence.analysis.correlation_table`), set of two or more
        positions all of which were also removed alone in that document, and what chose it: ``positions``, ``size``,
        ``chosen_by``, and ``set_kl`` and ``sum_kl``, mean nats in the band. ``chosen_by`` is a signal, or ``"measured
        influence"`` (over all offsets), where the set is the one that it ranks highest; ``"random sets"`` for one
        that was dealt; ``"other sets"`` for one of which the run does not say why, or that was chosen when fewer
        positions were measured.
    """
    bands, costs = band_costs(runs)
    choosers = _choosers(runs, costs["all"])
    lines = []
    for band, (start, stop) in bands.items():
        for document, found in costs[band].items():
            for places, cost in found.items():
                alone = [found.get((place,)) for place in places]
                if len(places) > 1 and None not in alone:
                    about = (band, start, stop, cost, sum(alone))
                    names = choosers.get((document, places), []) + choosers.get(("", places), [])
                    lines += [(document, places, len(places), name, *about) for name in names or [OTHER]]
    return pandas.DataFrame(lines, columns=_SETS).astype({"set_kl": float, "sum_kl": float})


def _choosers(runs: Runs, costs: Costs) -> dict[tuple[str, tuple[int, ...]], list[str]]:
    """Who chose a set in a document, from all that was measured there; the document is empty for sets of all."""
    measured = {document: sum(len(places) == 1 for places in found) for document, found in costs.items()}
    texts = {"": ""} | {row["document"]: row["document_sha"] for row in runs.rows if row["status"] == "ok"}
    out: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for run in runs.runs:
        for line in read_sets(run.path, runs.hash):
            names = out.setdefault((line["document"], tuple(line["positions"])), [])
            current = line["among"] is None or line["among"] == measured.get(line["document"])
            current = current and texts.get(line["document"]) == line["document_sha"]
            if current and line["chosen_by"] not in names:
                names.append(line["chosen_by"])
    return out


def additivity_table(
    runs: Runs, *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> pandas.DataFrame:
    """Whether influence adds up: sets of positions against the sum of their members, per size, choice and band.

    Parameters
    ----------
    runs : Runs
        Of a per-token run.
    level, resamples, seed
        Of the bootstrap.

    Returns
    -------
    pandas.DataFrame
        Per size, random sets first, then by falling cost. ``set_kl`` and ``sum_kl`` are means over ``n_documents`` of
        each one's mean over its sets (nats; ``n_sets`` counts the sets of all documents); which sets, and chosen by
        whom, says :func:`set_table`. ``ratio`` is the one over the other, with ``low`` and ``high``, its percentile
        bootstrap interval over documents: 1 says that influence adds up, more that members stand in for each other,
        less that they cost the same thing. ``spearman`` is the mean over documents of the rank correlation between
        the two over a document's sets, where it has 3 or more. An infinite mean has the interval of its ratio alone,
        which is NaN where both are infinite. One document, or one whose members cost nothing at all: no interval
        (NaN).
    """
    lines = []
    for (size, name, _), part in set_table(runs).groupby(["size", "chosen_by", "band"], sort=False):
        sets = [one[["set_kl", "sum_kl"]].to_numpy() for _, one in part.groupby("document", sort=False)]
        means = np.array([one.mean(axis=0) for one in sets])
        ranks = np.array([rank_correlation(*one.T) for one in sets])
        low, high = _ratio_interval(means, level=level, resamples=resamples, seed=seed)
        set_kl, sum_kl = mean_of(means)
        lines.append(
            {
                "size": size, "chosen_by": name, **part[list(BAND)].iloc[0], "n_sets": len(part),
                "n_documents": len(sets),
                "set_kl": set_kl, "sum_kl": sum_kl, "ratio": _ratio(set_kl, sum_kl), "low": low, "high": high,
                "spearman": mean_of(ranks[~np.isnan(ranks)]),
            }
        )  # fmt: skip
    cost = {(line["size"], line["chosen_by"]): line["set_kl"] for line in lines if line["band"] == "all"}
    lines.sort(key=lambda line: (line["size"], line["chosen_by"] != RANDOM, -cost[line["size"], line["chosen_by"]],
                                 line["chosen_by"]))  # fmt: skip
    return pandas.DataFrame(lines, columns=_ADDITIVITY)


def _ratio(set_kl: np.ndarray | float, sum_kl: np.ndarray | float) -> np.ndarray | float:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.divide(set_kl, sum_kl)


def _ratio_interval(means: np.ndarray, *, level: float, resamples: int, seed: int) -> tuple[float, float]:
    """Percentile interval of the ratio of two means over documents, from their means ``[documents, 2]``."""
    if len(means) < 2 or not means[:, 1].all():  # a resample of nothing but zeros would have no ratio
        return np.nan, np.nan
    if not np.isfinite(means).all():
        ratio = _ratio(*mean_of(means))
        return ratio, ratio
    return tuple(
        stats.bootstrap(
            tuple(means.T),
            lambda one, two, axis: _ratio(one.mean(axis=axis), two.mean(axis=axis)),
            paired=True,
            vectorized=True,
            method="percentile",
            confidence_level=level,
            n_resamples=resamples,
            rng=np.random.default_rng(seed),
        ).confidence_interval
    )
