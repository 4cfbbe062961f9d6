"""What compression methods lose at the budgets at which they were measured, and how they differ."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pandas

from forward_influence.analysis.frames import Runs
from forward_influence.analysis.intervals import LEVEL, RESAMPLES, mean_interval, mean_of
from forward_influence.analysis.panel import Panel, build_panel, merged_means
from forward_influence.errors import UserError
from forward_influence.horizon_bands import named_bands

#: What is measured, and the bootstrap that suits its mean: delta NLL has both signs, the others are skewed.
METRICS = {"kl": "BCa", "delta_nll": "percentile", "top1_changed": "BCa"}

_VALUES = [name + part for name in METRICS for part in ("", "_low", "_high")]
_BAND = ("band", "band_start", "band_stop", "n_documents", "n_infinite")
_RATES = ["method", "asked", "budget", *_BAND, *_VALUES]
_DIFFERENCES = ["asked", "a", "b", "budget_a", "budget_b", *_BAND, *_VALUES]


def split_selector(selector: str) -> tuple[str, str]:
    """Method and budget of a row's selector, at its last ``@``.

    A spread over layers that was asked for belongs to the method: ``snapkv@0.4,pyramid`` is
    ``("snapkv (pyramid)", "0.4")``, which may be compared with ``snapkv`` at 0.4.
    """
    method, _, budget = selector.rpartition("@")
    asked, _, layers = budget.partition(",")
    return f"{method} ({layers})" if layers else method, asked


def rate_table(runs: Runs, *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0) -> pandas.DataFrame:
    """What each method loses at each budget: the points of its rate-distortion curve.

    Parameters
    ----------
    runs : Runs
        Of mode ``keep``.
    level, resamples, seed
        Of the bootstrap.

    Returns
    -------
    pandas.DataFrame
        One line per method, budget and band. ``asked`` is the budget as it was asked for, ``budget`` the share
        of the prefix that was kept (mean over layers and documents). Bands: ``all`` is every offset of every
        document; ``near`` and ``far`` are the first and the last of :func:`default_bands`, offsets from
        ``band_start`` up to but without ``band_stop``, in documents that reach the end of the band; a horizon of
        one band has ``all`` alone.

        ``kl`` (nats), ``delta_nll`` (nats per token) and ``top1_changed`` (share) are means over the
        ``n_documents`` of each one's mean over its offsets, with ``_low`` and ``_high``, their bootstrap
        interval over documents; methods with the same documents share the resamples, so they are paired. Delta
        NLL and top-1 are stored per chunk: a band's are those of the chunks that begin in it, NaN where none
        does. An infinite KL makes its mean infinite; ``n_infinite`` counts the documents. One document: no
        interval (NaN).

    Raises
    ------
    UserError
        If the run removes tokens, or has no measured row.
    """
    panel = _panel(runs)
    bands = offset_bands(panel)
    values = {name: by_document(panel, name, *band) for name, band in bands.items()}
    lines = []
    for index, selector in enumerate(panel.selectors):
        method, asked = split_selector(selector)
        for band in bands:
            line = {"method": method, "asked": asked, "budget": _budget(runs, selector)}
            lines.append(line | _describe(band, bands, values[band]["kl"][[index]]))
    table = pandas.DataFrame(lines)
    for metric, method in METRICS.items():
        columns = [values[band][metric][index] for index in range(len(panel.selectors)) for band in bands]
        means = [mean_of(column[~np.isnan(column)]) for column in columns]
        low, high = mean_interval(np.stack(columns, axis=1), method, level=level, resamples=resamples, seed=seed)
        table = table.assign(**{metric: means, f"{metric}_low": low, f"{metric}_high": high})
    return table[_RATES]


def rate_differences(
    runs: Runs, *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> pandas.DataFrame:
    """How each two methods differ at equal budgets, paired over documents.

    Returns
    -------
    pandas.DataFrame
        As :func:`rate_table`, one line per budget, pair and band: values are means of (``a`` minus ``b``) over the
        ``n_documents`` in which both were measured, with the percentile bootstrap interval of that difference. Below
        zero: ``a`` loses less. Budgets are equal as they were asked for; ``budget_a`` and ``budget_b`` are what was
        kept. The intervals are per line, not corrected for the number of lines. A difference of two infinities
        is NaN.
    """
    panel = _panel(runs)
    bands = offset_bands(panel)
    values = {name: by_document(panel, name, *band) for name, band in bands.items()}
    budgets: dict[str, list[int]] = {}
    for index, selector in enumerate(panel.selectors):
        budgets.setdefault(split_selector(selector)[1], []).append(index)
    lines, differences = [], {metric: [] for metric in METRICS}
    order = list(dict.fromkeys(split_selector(selector)[0] for selector in panel.selectors))
    for asked, members in budgets.items():  # a pair has one direction, whatever the order in which a run was extended
        members.sort(key=lambda index: order.index(split_selector(panel.selectors[index])[0]))
        for pair in combinations(members, 2):
            (a, b), shares = zip(*((split_selector(name)[0], _budget(runs, name)) for name in _named(panel, pair)))
            for band in bands:
                line = {"asked": asked, "a": a, "b": b, "budget_a": shares[0], "budget_b": shares[1]}
                line |= _describe(band, bands, values[band]["kl"][list(pair)])
                for metric, found in differences.items():
                    one, two = values[band][metric][list(pair)]
                    with np.errstate(invalid="ignore"):  # infinity minus infinity
                        found.append(one - two)
                    line[metric] = mean_of(found[-1][~np.isnan(one) & ~np.isnan(two)])
                lines.append(line)
    table = pandas.DataFrame(lines, columns=_DIFFERENCES)
    if lines:
        for metric, found in differences.items():
            bounds = mean_interval(np.stack(found, axis=1), "percentile", level=level, resamples=resamples, seed=seed)
            undefined = table[metric].isna()
            for end, bound in zip(("low", "high"), bounds):
                table[f"{metric}_{end}"] = np.where(undefined, np.nan, bound)
    return table


def _panel(runs: Runs) -> Panel:
    if runs.spec.mode != "keep":
        raise UserError(
            f"The run in {str(runs.runs[0].path)!r} removes tokens and has no budgets; "
            "measure compression methods with forward-influence fidelity."
        )
    return build_panel(runs)


def offset_bands(panel: Panel) -> dict[str, tuple[int, int]]:
    """``all`` offsets, ``near`` and ``far`` of a panel: the first up to but without the second number."""
    return named_bands(panel.horizon) | {"all": (0, int(panel.reach.max()))}


def by_document(panel: Panel, band: str, start: int, stop: int) -> dict[str, np.ndarray]:
    """Each document's mean of each metric in a band, `[selectors, documents]`; NaN where there is none.

    Those of delta NLL and top-1 changes are over the whole chunks that begin in the band.
    """
    # "all" goes as far as each document does; one that does not reach another band's end has NaN there.
    whole = band == "all"
    kl = _mean(panel.kl_mean, panel.chunk_count) if whole else panel.kl[:, :, start:stop].mean(axis=-1)
    inside = slice(panel.chunks_to(start), panel.chunks_to(stop))
    found = {
        "delta_nll": _mean(panel.delta_nll[..., inside], panel.nll_count[..., inside]),
        "top1_changed": _mean(panel.top1_changed[..., inside], panel.chunk_count[..., inside]),
    }
    return {"kl": kl} | {name: np.where(np.isnan(kl), np.nan, means) for name, means in found.items()}


def _mean(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Mean over the last axis, weighted by counts; NaN of nothing."""
    return merged_means(values, counts, [0])[..., 0] if values.shape[-1] else np.full(values.shape[:-1], np.nan)


def _budget(runs: Runs, selector: str) -> float:
    kept = [row["kept_fraction"] for row in runs.rows if row["selector"] == selector and row["status"] == "ok"]
    return sum(kept) / len(kept)


def _named(panel: Panel, indices: Sequence[int]) -> list[str]:
    return [panel.selectors[index] for index in indices]


def _describe(band: str, bands: dict[str, tuple[int, int]], kl: np.ndarray) -> dict:
    """A band and the documents behind it, those that have all of `kl` `[methods, documents]`."""
    known = kl[:, ~np.isnan(kl).any(axis=0)]
    return {
        "band": band, "band_start": bands[band][0], "band_stop": bands[band][1], "n_documents": known.shape[1],
        "n_infinite": int(np.isinf(known).any(axis=0).sum()),
    }  # fmt: skip
