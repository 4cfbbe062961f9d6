"""The study loop: documents x selectors to rows on disk."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from forward_influence.plan import Plan, make_plan
from forward_influence.progress import Progress
from forward_influence.rows import row_key
from forward_influence.selectors import DEFAULT_SELECTORS


@dataclass(frozen=True)
class Outcome:
    """How a study ended.

    Attributes
    ----------
    path : Path
        The run folder.
    ok, skipped, failed : int
        Documents of this request: measured by at least one selector; skipped; failed.
    """

    path: Path
    ok: int
    skipped: int
    failed: int

    def sentence(self) -> str:
        """The outcome for a person."""
        return f"{self.ok} documents measured, {self.skipped} skipped, {self.failed} failed: {self.path}"

    def runs(self):
        """The rows, as :func:`forward_influence.open_runs` gives them."""
        from forward_influence import open_runs

        return open_runs(self.path)


def measure(
    *,
    model="smollm2-135m",
    tokenizer: str | None = None,
    data=None,
    selector: Iterable = DEFAULT_SELECTORS,
    fraction: str | float = "0.01",
    prefix: int = 2048,
    horizon: int = 14000,
    full_horizon: bool = False,
    chunk: int = 128,
    sinks: int = 4,
    recent: int = 64,
    limit: int | None = None,
    seed: int = 0,
    batch: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    offline: bool = False,
    extend_context: str | None = None,
    shard: str | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    dry_run: bool = False,
    quiet: bool = False,
    debug: bool = False,
) -> Outcome:
    """Remove each selector's tokens from the cache of a prefix, and measure what the future loses.

    Run it again with the same arguments to go on after an interruption, or with more selectors or documents
    to extend the run.

    Parameters
    ----------
    model : str, path or LoadedModel
        Hub id, folder, GGUF file, or alias.
    tokenizer : str, optional
        Folder or hub id of a tokenizer other than the model's.
    data : str, path or list of paths, optional
        ``"builtin"``, ``"arxiv"``, or files and folders of .jsonl, .parquet and .txt.
    selector : iterable
        Texts (``"infokv:alpha=0.5"``), classes, or objects.
    fraction : str or float
        Share of the prefix that is removed; 0.01 of 2048 is 20 tokens.
    prefix, horizon : int
        Tokens that are cached, and tokens that follow.
    full_horizon : bool
        Skip documents that end before the horizon.
    chunk : int
        Offsets over which a reported number is averaged.
    sinks, recent : int
        First and last positions of the prefix that are not candidates.
    limit : int, optional
        Documents to measure; by default 100.
    seed : int
        Of the order of documents and of random selections.
    batch : int, optional
        Ablated rows at once; by default as many as free memory allows.
    dtype, device : str
    offline : bool
        No network attempt at all.
    extend_context : {"yarn"}, optional
        Lets a RoPE model go past its limit.
    shard : str, optional
        ``"3/16"``: the third of sixteen parts of the documents.
    out : path, optional
        The run folder; by default ``runs/<model>-<first 8 of the hash>``.
    fresh : bool
        Move the rows that are there aside and start anew.
    dry_run : bool
        Everything up to loading weights.
    quiet : bool
        Neither notices nor progress.
    debug : bool
        Let an error of a document end the study, with its traceback.

    Returns
    -------
    Outcome

    Raises
    ------
    UserError, DataError, Refused
        If the request cannot be met; nothing was measured.

    Notes
    -----
    Source: arXiv 2606.26875, the study of Forward Influence (prefix 2048, 1%, chunks of 128, out to 14,000).
    """
    progress = Progress(0, quiet=quiet)
    _check_batch(batch)
    plan = make_plan(
        model=model, tokenizer=tokenizer, data=data, selector=selector, fraction=fraction, prefix=prefix,
        horizon=horizon, full_horizon=full_horizon, chunk=chunk, sinks=sinks, recent=recent, limit=limit, seed=seed,
        dtype=dtype, device=device, offline=offline, extend_context=extend_context, shard=shard, out=out,
        notify=progress.say,
    )  # fmt: skip
    if dry_run:
        return _dry_run(plan, fresh, progress)
    return _run(plan, model, offline=offline, batch=batch, fresh=fresh, quiet=quiet, debug=debug)


def _check_batch(batch: int | None) -> None:
    from forward_influence.errors import UserError

    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int) or batch < 1):
        raise UserError(f"batch is {batch}; it must be a whole number of at least 1 ablated row.")


def _run(plan: Plan, model, *, offline: bool, batch: int | None, fresh: bool, quiet: bool, debug: bool) -> Outcome:
    from forward_influence.document import blank_row
    from forward_influence.provenance import provenance
    from forward_influence.runs import RunFolder

    facts = provenance(
        requested=plan.requested, device=plan.device, dtype=plan.dtype, batch=batch, corpus=plan.corpus,
        model={"name": plan.source.name, "path": str(plan.source.path)},
        tokenizer_adds_bos=plan.tokenizer.bos, notices=list(plan.notices),
        planned={"documents": len(plan.documents), "selectors": list(plan.selectors),
                 "rows": (len(plan.documents) + len(plan.short)) * len(plan.selectors)},
    )  # fmt: skip
    with RunFolder.open(plan.out, plan.spec, facts, fresh=fresh) as folder:
        done = folder.done()
        skipped = [
            row
            for document, tokens, sha in plan.short
            for row in (
                blank_row(plan.spec, document, sha, tokens, name, "skipped", _too_short(plan.spec))
                for name in plan.selectors
            )
            if row["key"] not in done
        ]
        folder.append(skipped)
        todo = pending(plan, done)
        if todo:
            _measure_documents(plan, todo, folder, model, offline=offline, batch=batch, quiet=quiet, debug=debug)
        return outcome(plan, folder.rows())


def _measure_documents(plan: Plan, todo, folder, model, *, offline, batch, quiet, debug) -> None:
    from forward_influence.document import blank_row, measure_document
    from forward_influence.engine import CHUNK_SIZE
    from forward_influence.estimate import estimate

    rows = sum(len(selectors) for _, selectors in todo)
    horizons = [min(len(one.ids) - plan.spec.prefix, plan.spec.horizon) for one, _ in todo]
    progress = Progress(sum(h * len(s) for h, (_, s) in zip(horizons, todo)), quiet=quiet)
    progress.say(estimate(plan, rows_pending=rows, chunk_size=CHUNK_SIZE).sentence())
    loaded = _loaded(plan, model, offline, progress.say)
    folder.note({"attention": loaded.attention, "reference_check": loaded.check})
    try:
        for number, (document, selectors) in enumerate(todo, start=1):
            progress.label(f"document {number} of {len(todo)}")
            try:
                rows = measure_document(
                    loaded.model, document, selectors, plan.spec, batch=batch, notify=progress.say,
                    progress=progress.advance,
                )  # fmt: skip
            except Exception as error:  # one document's trouble is not that of the others
                if debug:
                    raise
                reason = f"{type(error).__name__}: {error}"
                progress.say(f"Document {document.id} failed ({reason}); going on with the next.")
                rows = [
                    blank_row(plan.spec, document.id, document.sha, len(document.ids), name, "failed", reason)
                    for name in selectors
                ]
            folder.append(rows)
    finally:
        progress.close()


def _loaded(plan: Plan, model, offline: bool, notify):
    from forward_influence.models import LoadedModel, load_model

    if isinstance(model, LoadedModel):
        return model
    return load_model(
        plan.source, dtype=plan.dtype, device=plan.device, offline=offline, extend_context=plan.spec.extend_context,
        target_length=plan.spec.prefix + plan.spec.horizon if plan.spec.extend_context else None, notify=notify,
    )  # fmt: skip


def pending(plan: Plan, done: set[str]) -> list[tuple]:
    """Documents with the selectors whose rows are still missing."""
    out = []
    for document in plan.documents:
        missing = {
            name: one
            for name, one in plan.selectors.items()
            if row_key(plan.spec.hash(), document.id, name) not in done
        }
        if missing:
            out.append((document, missing))
    return out


def outcome(plan: Plan, rows: list[dict]) -> Outcome:
    """Documents of this request by how they ended."""
    wanted = {one.id for one in plan.documents} | {name for name, _, _ in plan.short}
    statuses: dict[str, set[str]] = {}
    for row in rows:
        if row["document"] in wanted and row["selector"] in plan.selectors:
            statuses.setdefault(row["document"], set()).add(row["status"])
    counts = {"ok": 0, "failed": 0, "skipped": 0}
    for found in statuses.values():
        counts[next(status for status in counts if status in found)] += 1
    return Outcome(plan.out, counts["ok"], counts["skipped"], counts["failed"])


def _too_short(spec) -> str:
    from forward_influence.plan import least_length

    return f"shorter than {least_length(spec)} tokens"


def _dry_run(plan: Plan, fresh: bool, progress: Progress) -> Outcome:
    from forward_influence.engine import CHUNK_SIZE
    from forward_influence.estimate import estimate
    from forward_influence.runs import read_run

    rows = [] if fresh or not (plan.out / "run.json").exists() else read_run(plan.out).rows
    done = {row["key"] for row in rows if row["status"] != "failed"}
    todo = pending(plan, done)
    missing = sum(len(selectors) for _, selectors in todo)
    lines = [
        f"model {plan.source.name} ({plan.source.identity}), {plan.dtype} on {plan.device}",
        f"data {plan.corpus['name']}: {len(plan.documents)} documents, {len(plan.short)} too short",
        f"prefix {plan.spec.prefix}, horizon {plan.spec.horizon}, fraction {plan.spec.fraction}, "
        f"chunk {plan.spec.chunk}, seed {plan.spec.seed}",
        f"selectors {', '.join(plan.selectors)}",
        f"{missing} rows to measure, {len(plan.documents) * len(plan.selectors) - missing} there already",
        f"run folder {plan.out} (hash {plan.spec.hash()[:8]})",
    ]
    print("\n".join(lines))
    if missing:
        print(estimate(plan, rows_pending=missing, chunk_size=CHUNK_SIZE).sentence())
    print("Dry run: no weights were loaded and nothing was written.")
    sys.stdout.flush()
    return outcome(plan, rows)
