"""Measuring one document: prefix, selections, lockstep continuation, rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch

from forward_influence.builtin_selectors import Recompute
from forward_influence.engine import CHUNK_SIZE, compare_rows, recomputed_states
from forward_influence.errors import UserError
from forward_influence.evicting import compare_kept
from forward_influence.kl import Comparison
from forward_influence.plan import document_seed
from forward_influence.removal import removal_flags
from forward_influence.rows import RunSpec, removal_count, row_key
from forward_influence.selection import chosen_positions
from forward_influence.selectors import NotListed, Selector, describe_error
from infokv.calls import evaluation
from infokv.errors import is_out_of_memory
from infokv.prefill import prefill, record
from infokv.signals import TokenSignals


@dataclass(frozen=True)
class Choice:
    """What a selector chose for a document, or why it did not.

    Attributes
    ----------
    chosen : list of int, or list of Tensor, or None
        Positions to remove; or, in mode ``"keep"``, those that each layer keeps.
    """

    chosen: list | None
    status: str = "ok"
    reason: str | None = None


def measure_document(
    model,
    document,
    selectors: dict[str, Selector],
    spec: RunSpec,
    *,
    batch: int | None = None,
    chunk_size: int = CHUNK_SIZE,
    debug: bool = False,
    notify: Callable[[str], None] = lambda sentence: None,
    progress: Callable[[int], None] = lambda row_tokens: None,
) -> list[dict]:
    """Rows of one document, one for each selector.

    Parameters
    ----------
    model : PreTrainedModel
    document : TokenizedDocument
        At least as long as the spec asks for; what lies beyond the horizon is not used.
    selectors : dict of str to Selector
        By canonical text.
    spec : RunSpec
    batch : int, optional
        Ablated rows of one pass; by default as many as free memory allows.
    chunk_size : int
        Tokens of a call; changes the speed only.
    debug : bool
        Let the error of a selector through.

    Returns
    -------
    list of dict
        With the fields of :data:`forward_influence.rows.ROW_FIELDS`. A selector that raises gets a row with
        status ``failed``; so do all where memory runs out with a single ablated row.

    Raises
    ------
    UserError
        If the model gives no distribution for this document (NaN, say).
    """
    began = time.perf_counter()
    device = model.get_input_embeddings().weight.device
    ids = torch.tensor([document.ids[: spec.prefix + spec.horizon]], device=device)
    try:
        run = _keep if spec.mode == "keep" else _remove
        choices, comparison = run(model, document.id, ids, selectors, spec, batch, chunk_size, debug, notify, progress)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = "memory ran out with a single ablated row; use a smaller horizon or prefix"
        choices, comparison = dict.fromkeys(selectors, Choice(None, "failed", reason)), None
    seconds = (time.perf_counter() - began) / len(selectors)
    rows = []
    measured = iter(range(len(selectors)))
    for name, choice in choices.items():
        row = blank_row(spec, document.id, document.sha, len(document.ids), name, choice.status, choice.reason)
        row["seconds"] = round(seconds, 3)
        if choice.status == "ok":
            row |= describe(choice.chosen, spec.prefix) | chunk_numbers(comparison, next(measured), spec.chunk)
        rows.append(row)
    order = {name: place for place, name in enumerate(selectors)}
    return sorted(rows, key=lambda row: order[row["selector"]])


def _remove(model, name, ids, selectors, spec, batch, chunk_size, debug, notify, progress):
    """Choices, recompute last, and the comparison whose rows are those with status ``ok``, in this order."""
    with evaluation(model):
        needs = dict.fromkeys(need for one in selectors.values() for need in one.needs)
        store, signals = prefill(
            model, ids[:, : spec.prefix], needs, chunk_size=chunk_size, total_length=ids.shape[1],
            candidates=range(spec.sinks, spec.prefix - spec.recent), seed=document_seed(spec.seed, name),
        )  # fmt: skip
        count = removal_count(spec.prefix, spec.fraction)
        floors = {text: one for text, one in selectors.items() if isinstance(one, Recompute)}
        choices = {
            text: choose(one, signals, count, name, debug=debug)
            for text, one in selectors.items()
            if text not in floors
        } | dict.fromkeys(floors, Choice([]))
        flags = [
            removal_flags(choice.chosen, spec.prefix)
            for text, choice in choices.items()
            if choice.status == "ok" and text not in floors
        ]
        if not flags and not floors:
            return choices, None
        companion = (lambda: recomputed_states(model, ids, spec.prefix, chunk_size)) if floors else None
        comparison = compare_rows(
            model, store, ids[:, spec.prefix :], flags, chunk_size=chunk_size, batch=batch,
            companion=companion, notify=notify, progress=progress,
        )  # fmt: skip
    return choices, comparison


def _keep(model, name, ids, methods, spec, batch, chunk_size, debug, notify, progress):
    """Choices of compression methods, and the comparison whose rows are those with status ``ok``, in this order."""
    with evaluation(model):
        needs = dict.fromkeys(need for one in methods.values() for need in one.needs)
        store, recorder = record(
            model, ids[:, : spec.prefix], needs, chunk_size=chunk_size, total_length=ids.shape[1]
        )  # fmt: skip
        choices = {text: attempt(lambda one=one: one.kept(store, recorder), debug) for text, one in methods.items()}
        kept = [choice.chosen for choice in choices.values() if choice.status == "ok"]
        if not kept:
            return choices, None
        comparison = compare_kept(
            model, store, ids[:, spec.prefix :], kept, chunk_size=chunk_size, batch=batch, notify=notify,
            progress=progress,
        )  # fmt: skip
    return choices, comparison


def choose(selector: Selector, signals: TokenSignals, count: int, document: str, *, debug: bool = False) -> Choice:
    """What a selector chooses, checked; a selector that raises fails alone."""
    return attempt(lambda: chosen_positions(selector, signals, count, document), debug)


def attempt(choice: Callable[[], list], debug: bool) -> Choice:
    """What somebody's code chooses, or how it failed."""
    try:
        return Choice(choice())
    except NotListed as reason:
        return Choice(None, "skipped", str(reason))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a third party's code may raise anything, and the other selectors go on
        if debug:
            let_through(error)
        return Choice(None, "failed", describe_error(error))


def let_through(error: BaseException) -> NoReturn:
    """Raise it again; what would end the program without a word, such as ``sys.exit()``, as the cause of an error."""
    if isinstance(error, Exception):
        raise error
    raise RuntimeError(f"a selector's code tried to end the program ({describe_error(error)})") from error


def blank_row(spec: RunSpec, document: str, sha: str, tokens: int, selector: str, status: str, reason) -> dict:
    """A row without numbers."""
    return {
        "key": row_key(spec.hash(), document, selector),
        "document": document, "document_sha": sha, "selector": selector, "mode": spec.mode,
        "status": status, "reason": reason, "n_tokens": tokens,
        "removed": None, "n_removed": None, "removed_fraction": None, "kept_fraction": None, "kept_counts": None,
        "chunk_start": [], "chunk_count": [], "kl_mean": [], "kl": [], "delta_nll": [], "nll_count": [],
        "top1_changed": [], "seconds": 0.0,
    }  # fmt: skip


def describe(chosen: list, prefix: int) -> dict:
    """The fields of a row that say what was removed or kept."""
    if chosen and isinstance(chosen[0], torch.Tensor):
        counts = [layer.shape[-1] for layer in chosen]
        share = sum(counts) / len(counts) / prefix
        return {
            "kept_counts": counts,
            "n_removed": round(prefix * (1 - share)),
            "removed_fraction": 1 - share,
            "kept_fraction": share,
        }
    share = len(chosen) / prefix
    return {"removed": chosen, "n_removed": len(chosen), "removed_fraction": share, "kept_fraction": 1 - share}


def chunk_numbers(comparison: Comparison, index: int, chunk: int) -> dict:
    """Chunk means of one row of a comparison."""
    kl, nll, changed = comparison.kl[index], comparison.delta_nll[index], comparison.top1_changed[index]
    starts = list(range(0, len(kl), chunk))
    out = {
        "chunk_start": starts,
        "chunk_count": [],
        "kl_mean": [],
        "delta_nll": [],
        "nll_count": [],
        "top1_changed": [],
    }
    for start in starts:
        part = slice(start, start + chunk)
        known = nll[part][~nll[part].isnan()]
        change = known.mean().item() if len(known) else None
        if change is not None and math.isnan(change):
            raise UserError(
                f"the change of log-likelihood is +inf and -inf at offsets of the chunk from {start}; it has no mean"
            )
        out["chunk_count"].append(len(kl[part]))
        out["kl_mean"].append(kl[part].mean().item())
        out["nll_count"].append(len(known))
        out["delta_nll"].append(change)
        out["top1_changed"].append(changed[part].double().mean().item())
    out["kl"] = [float(f"{value:.6g}") for value in kl.tolist()]
    return out
