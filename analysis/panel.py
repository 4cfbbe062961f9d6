"""The measured rows of a run as dense arrays, NaN where a document has no value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forward_influence.analysis.frames import Runs
from forward_influence.errors import UserError

CHUNK_ARRAYS = ("kl_mean", "chunk_count", "delta_nll", "nll_count", "top1_changed")


@dataclass(frozen=True)
class Panel:
    """Selectors, documents and chunks are in the order of the rows.

    Attributes
    ----------
    selectors, documents : tuple of str
    edges : ndarray of int [chunks + 1]
        First offset of each chunk, and the end of the last as if it were whole.
    kl_mean, chunk_count, delta_nll, nll_count, top1_changed : ndarray [selectors, documents, chunks]
    kl : ndarray [selectors, documents, offsets]
        Nats at each offset, to the 6 digits that a row keeps.
    """

    selectors: tuple[str, ...]
    documents: tuple[str, ...]
    edges: np.ndarray
    kl_mean: np.ndarray
    chunk_count: np.ndarray
    delta_nll: np.ndarray
    nll_count: np.ndarray
    top1_changed: np.ndarray
    kl: np.ndarray

    @property
    def reach(self) -> np.ndarray:
        """Measured offsets of each document, `[selectors, documents]`; 0 where there is no row."""
        return (~np.isnan(self.kl)).sum(axis=-1)

    @property
    def horizon(self) -> int:
        """The largest offset that at least half of the documents reach.

        The longest document would be no measure: behind the others' end it stands alone.
        """
        longest_first = np.sort(self.reach.max(axis=0))[::-1]
        return int(longest_first[(len(longest_first) - 1) // 2])

    def chunks_to(self, offset: int) -> int:
        """Number of chunks that begin before an offset."""
        return int(np.searchsorted(self.edges[:-1], offset))

    def index(self, selector: str) -> int:
        """Position of a selector; a UserError names those that were measured."""
        if selector not in self.selectors:
            raise UserError(f"Selector {selector!r} was not measured in this run; it has {', '.join(self.selectors)}.")
        return self.selectors.index(selector)


def build_panel(runs: Runs) -> Panel:
    """Arrays of the rows with status ``ok``.

    Raises
    ------
    UserError
        If there is none.
    """
    rows = [row for row in runs.rows if row["status"] == "ok"]
    if not rows:
        next_step = "`forward-influence show` says why" if runs.rows else "measure a document first"
        raise UserError(
            f"The run in {str(runs.runs[0].path)!r} has no measured row yet "
            f"({runs.count('skipped')} skipped, {runs.count('failed')} failed); {next_step}."
        )
    chunk = runs.spec.chunk
    selectors = tuple(dict.fromkeys(row["selector"] for row in rows))
    documents = tuple(dict.fromkeys(row["document"] for row in rows))
    place = {name: i for i, name in enumerate(selectors)}, {name: i for i, name in enumerate(documents)}
    shape = len(selectors), len(documents)
    chunks = max(len(row["chunk_start"]) for row in rows)
    arrays = {name: np.full((*shape, chunks), np.nan) for name in CHUNK_ARRAYS}
    kl = np.full((*shape, max(len(row["kl"]) for row in rows)), np.nan)
    for row in rows:
        cell = place[0][row["selector"]], place[1][row["document"]]
        if list(row["chunk_start"]) != list(range(0, len(row["kl"]), chunk)):
            raise UserError(
                f"The row of document {row['document']!r}, selector {row['selector']!r} does not have chunks "
                f"of {chunk} offsets, as its run says; measure it again with --fresh."
            )
        for name, array in arrays.items():
            array[cell][: len(row[name])] = np.array(row[name], dtype=float)  # None becomes NaN
        kl[cell][: len(row["kl"])] = row["kl"]
    return Panel(selectors, documents, np.arange(chunks + 1) * chunk, kl=kl, **arrays)


def merge(panel: Panel, edges: Sequence[int]) -> Panel:
    """The panel with wider chunks, whose boundaries are boundaries of its chunks."""
    first = [panel.chunks_to(edge) for edge in edges[:-1]]
    offsets, tokens = panel.chunk_count, panel.nll_count
    return replace(
        panel,
        edges=np.array(edges),
        kl_mean=merged_means(panel.kl_mean, offsets, first),
        delta_nll=merged_means(panel.delta_nll, tokens, first),
        top1_changed=merged_means(panel.top1_changed, offsets, first),
        chunk_count=np.add.reduceat(np.nan_to_num(offsets), first, axis=-1),
        nll_count=np.add.reduceat(np.nan_to_num(tokens), first, axis=-1),
    )


def merged_means(values: np.ndarray, counts: np.ndarray, first: Sequence[int]) -> np.ndarray:
    """Means weighted by counts over runs of the last axis that begin at `first`; NaN where all is NaN."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        weighted = np.multiply(values, counts, where=known, out=np.zeros_like(values))
        return np.add.reduceat(weighted, first, axis=-1) / np.add.reduceat(np.where(known, counts, 0), first, axis=-1)
