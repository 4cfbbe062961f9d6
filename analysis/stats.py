"""Tables per selector: the curve over chunks, and its summary."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas

from forward_influence.analysis.frames import Runs
from forward_influence.analysis.intervals import LEVEL, RESAMPLES, mean_interval, mean_of
from forward_influence.analysis.panel import CHUNK_ARRAYS, Panel, build_panel, merge, merged_means
from forward_influence.errors import UserError
from forward_influence.horizon_bands import default_bands

#: From fewer documents than about this many, a bootstrap interval is much too narrow to be trusted.
FEW_DOCUMENTS = 10


def few_documents(count: int) -> str | None:
    """The sentence about intervals from so few documents; None where there are enough."""
    if count >= FEW_DOCUMENTS:
        return None
    given = "One document gives no interval" if count == 1 else (
        f"Intervals from {count} documents are not to be trusted, narrow or not"
    )  # fmt: skip
    return f"{given}: measure {FEW_DOCUMENTS} or more."


def curve_table(
    runs: Runs,
    *,
    common: bool = False,
    widening: bool = False,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> pandas.DataFrame:
    """KL per selector and chunk, with the documents and offsets behind each line.

    Parameters
    ----------
    common : bool
        Count only documents in which every selector was measured up to the horizon that at least half
        of the documents reach, and stop there: then all chunks speak of the same documents.
    widening : bool
        Merge neighbouring chunks to a sixth of an octave at least, so that points are even on a
        logarithmic axis and the far ones rest on more offsets.
    level, resamples, seed
        Of the bootstrap.

    Returns
    -------
    pandas.DataFrame
        ``mean`` and ``median`` over documents of their chunk means, with ``low`` and ``high``, the BCa
        bootstrap interval of the mean over documents; ``q90``, ``q95``, ``q99`` and ``max`` over all
        offsets of all documents (a quantile is a value that occurred: the smallest with at least that
        share of the offsets at or below it); all in nats. ``delta_nll`` (nats per token, over
        ``n_documents_nll``) and ``top1_changed`` (share) are means over documents.

        An infinite KL stays infinite: in the mean and both ends of its interval, in the quantiles it
        reaches, and ``n_infinite`` counts the documents concerned. One document: no interval (NaN).
    """
    panel = build_panel(runs)
    if common:
        panel = _common(panel)
    if widening:
        panel = merge(panel, widening_edges(panel.edges))
    selectors, documents, chunks = panel.kl_mean.shape
    by_document = panel.kl_mean.transpose(1, 0, 2).reshape(documents, selectors * chunks)
    low, high = mean_interval(by_document, "BCa", level=level, resamples=resamples, seed=seed)
    lines = []
    for s, selector in enumerate(panel.selectors):
        for c in range(chunks):
            values = _known(panel.kl_mean[s, :, c])
            if not len(values):
                continue
            start, stop = panel.edges[c : c + 2]
            offsets = _known(panel.kl[s, :, start:stop])
            nll = _known(panel.delta_nll[s, :, c])
            lines.append(
                {
                    "selector": selector,
                    "chunk_start": start,
                    "chunk_stop": start + int(np.nanmax(panel.chunk_count[s, :, c])),
                    "n_documents": len(values),
                    "n_offsets": len(offsets),
                    "mean": values.mean(),
                    "low": low[s * chunks + c],
                    "high": high[s * chunks + c],
                    "median": np.median(values),
                    **quantiles(offsets, (0.9, 0.95, 0.99)),
                    "max": offsets.max(),
                    "n_infinite": int(np.isinf(values).sum()),
                    "delta_nll": mean_of(nll),
                    "n_documents_nll": len(nll),
                    "top1_changed": mean_of(_known(panel.top1_changed[s, :, c])),
                }
            )
    return pandas.DataFrame(lines)


def summary_table(runs: Runs) -> pandas.DataFrame:
    """One line per selector: KL near and far, its distribution, and what it does to the predictions.

    Returns
    -------
    pandas.DataFrame
        ``kl_mean`` is the mean over documents of each one's mean over its offsets. ``kl_near`` and
        ``kl_far`` are means over the first and the last band of :func:`default_bands` (offsets 0 to
        ``near_stop``, ``far_start`` to ``far_stop``), in the ``n_documents_far`` documents that reach
        the end of both.
        ``q50`` to ``max`` are over all offsets of all documents. Nats; infinities stay infinite.
        ``delta_nll`` (nats per token) and ``top1_changed`` (share): each document's mean over its
        offsets, then over documents. ``skipped`` and ``failed`` count documents.
    """
    panel = build_panel(runs)
    reach, horizon = panel.reach, panel.horizon
    bands = default_bands(horizon)
    near, far = bands[0], bands[-1]
    lines = []
    for s, selector in enumerate(panel.selectors):
        to_end = panel.kl[s, reach[s] >= horizon]
        rows = [row for row in runs.rows if row["selector"] == selector]
        offsets = _known(panel.kl[s])
        lines.append(
            {
                "selector": selector,
                "n_removed": max(row["n_removed"] for row in rows if row["status"] == "ok"),
                "n_documents": int((reach[s] > 0).sum()),
                "n_offsets": len(offsets),
                "kl_mean": mean_of(_document_means(panel.kl_mean[s], panel.chunk_count[s])),
                "kl_near": mean_of(to_end[:, slice(*near)].mean(axis=-1)),
                "kl_far": mean_of(to_end[:, slice(*far)].mean(axis=-1)),
                "near_stop": near[1],
                "far_start": far[0],
                "far_stop": far[1],
                "n_documents_far": len(to_end),
                **quantiles(offsets, (0.5, 0.9, 0.95, 0.99)),
                "max": offsets.max(),
                "delta_nll": mean_of(_document_means(panel.delta_nll[s], panel.nll_count[s])),
                "top1_changed": mean_of(_document_means(panel.top1_changed[s], panel.chunk_count[s])),
                "skipped": sum(row["status"] == "skipped" for row in rows),
                "failed": sum(row["status"] == "failed" for row in rows),
            }
        )
    return pandas.DataFrame(lines)


def quantiles(values: np.ndarray, shares: tuple[float, ...]) -> dict[str, float]:
    """For each share q the smallest value with at least q of all values at or below it, as ``q90``, ...

    Takes values that occurred; interpolation would make NaN between infinities.
    """
    ordered = np.sort(values)
    # 1e-9: a product such as 0.95 * 20 must not be lifted over its integer by rounding
    ranks = {q: max(0, int(np.ceil(q * len(ordered) - 1e-9)) - 1) for q in shares}
    return {f"q{round(100 * q)}": float(ordered[rank]) for q, rank in ranks.items()}


def widening_edges(edges: np.ndarray) -> list[int]:
    """Some of the edges, a factor of 2^(1/6) or one chunk apart; a narrow rest joins the last chunk."""
    chosen = [int(edges[0])]
    for edge in map(int, edges[1:]):
        if edge >= chosen[-1] * 2 ** (1 / 6):
            chosen.append(edge)
    if chosen[-1] != edges[-1]:
        rest, last = edges[-1] - chosen[-1], chosen[-1] - chosen[-2]
        chosen[-1 if rest < last / 2 else len(chosen) :] = [int(edges[-1])]
    return chosen


def _common(panel: Panel) -> Panel:
    whole = (panel.reach >= panel.horizon).all(axis=0)
    if not whole.any():
        raise UserError(
            f"No document has all of {', '.join(panel.selectors)} measured to offset {panel.horizon}; "
            "measure the missing selectors, or do without `common`."
        )
    chunks = panel.chunks_to(panel.horizon)
    edges = panel.edges[: chunks + 1]
    cut = {name: getattr(panel, name)[:, whole, :chunks] for name in CHUNK_ARRAYS}
    documents = tuple(name for name, keep in zip(panel.documents, whole) if keep)
    return replace(panel, documents=documents, edges=edges, kl=panel.kl[:, whole, : edges[-1]], **cut)


def _known(values: np.ndarray) -> np.ndarray:
    return values[~np.isnan(values)]


def _document_means(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Mean over each document's offsets, from `[documents, chunks]`; documents without a value left out."""
    return _known(merged_means(values, counts, [0])[:, 0])
