"""The measured rows of a run as dense arrays, NaN where a document has no value."""

from __future__ import annotations

from dataclasses import dataclass

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
    chunk : int
        Width of a chunk, offsets.
    kl_mean, chunk_count, delta_nll, nll_count, top1_changed : ndarray [selectors, documents, chunks]
    kl : ndarray [selectors, documents, offsets]
        Nats at each offset, to the 6 digits that a row keeps.
    """

    selectors: tuple[str, ...]
    documents: tuple[str, ...]
    chunk: int
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

    def index(self, selector: str) -> int:
        """Position of a selector; a UserError names those that were measured."""
        if selector not in self.selectors:
            raise UserError(
                f"Selector {selector!r} was not measured in this run; it has {', '.join(self.selectors)}."
            )
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
        raise UserError(
            f"The run in {str(runs.runs[0].path)!r} has no measured row yet "
            f"({runs.count('skipped')} skipped, {runs.count('failed')} failed); measure a document first."
        )
    chunk = runs.spec.chunk
    selectors = tuple(dict.fromkeys(row["selector"] for row in rows))
    documents = tuple(dict.fromkeys(row["document"] for row in rows))
    place = {name: i for i, name in enumerate(selectors)}, {name: i for i, name in enumerate(documents)}
    shape = len(selectors), len(documents)
    arrays = {
        name: np.full((*shape, max(len(row["chunk_start"]) for row in rows)), np.nan) for name in CHUNK_ARRAYS
    }
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
    return Panel(selectors, documents, chunk, kl=kl, **arrays)
