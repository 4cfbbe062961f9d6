"""The study loop: documents x selectors to rows on disk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from forward_influence.errors import UserError
from forward_influence.plan import Plan, make_plan
from forward_influence.progress import Progress
from forward_influence.request import check_numbers
from forward_influence.selectors import DEFAULT_SELECTORS


@dataclass(frozen=True)
class Outcome:
    """How a study ended.

    Attributes
    ----------
    path : Path
        The run folder.
    ok, skipped, failed : int
        Documents of this request: measured with at least one selector; skipped; failed.
    failed_rows : int
        Rows that failed, those of single selectors included.
    missing : int
        Documents of this request without any row, because the study had to end early (or has not begun).
    reason : str or None
        Why documents were skipped, if it was the same for all of them.
    """

    path: Path
    ok: int
    skipped: int
    failed: int
    failed_rows: int = 0
    missing: int = 0
    reason: str | None = None

    def sentence(self) -> str:
        """The outcome for a person."""
        noun = "document" if self.ok == 1 else "documents"
        rows = f" ({self.failed_rows} rows; forward-influence show says why)" if self.failed_rows else ""
        missing = f", {self.missing} not reached" if self.missing else ""
        return f"{self.ok} {noun} measured, {self.skipped} skipped, {self.failed} failed{rows}{missing}: {self.path}"

    def runs(self):
        """The rows, as :func:`forward_influence.open_runs` gives them."""
        from forward_influence import open_runs

        return open_runs(self.path)


class Incomplete(UserError):
    """A study that had to end early, because the disk takes no more; what was measured is kept.

    Attributes
    ----------
    outcome : Outcome
    """

    def __init__(self, sentence: str, outcome: Outcome):
        super().__init__(sentence)
        self.outcome = outcome


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
    skip: int = 0,
    seed: int = 0,
    batch: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    offline: bool = False,
    extend_context: str | None = None,
    shard: str | None = None,
    accept_model: bool = False,
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
    selector : str, class, object, or iterable of these
        Texts such as ``"infokv:alpha=0.5"``; selectors and scorers as classes or objects.
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
    skip : int
        Documents to leave out at the start of the order: after tuning on the first ones, say.
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
    accept_model : bool
        Use parameters that were tuned for another model; the run says so.
    out : path, optional
        The run folder; by default ``runs/<model>-<first 8 of the hash>``.
    fresh : bool
        Move the rows that are there aside and start anew.
    dry_run : bool
        Everything up to loading weights.
    quiet : bool
        Neither notices nor progress.
    debug : bool
        Let an error of a document or a selector end the study, with its traceback.

    Returns
    -------
    Outcome

    Raises
    ------
    UserError, DataError, Refused
        If the request cannot be met; nothing was measured.
    Incomplete
        If the disk is full after something was measured; a UserError that has the ``outcome``.

    Notes
    -----
    Source: arXiv 2606.26875, the study of Forward Influence (prefix 2048, 1%, chunks of 128, out to 14,000).
    """
    progress = Progress(quiet=quiet)
    check_numbers(batch=batch)
    plan = make_plan(
        model=model, tokenizer=tokenizer, data=data, selector=selector, fraction=fraction, prefix=prefix,
        horizon=horizon, full_horizon=full_horizon, chunk=chunk, sinks=sinks, recent=recent, limit=limit, skip=skip,
        seed=seed, dtype=dtype, device=device, offline=offline, extend_context=extend_context,
        shard=shard, accept_model=accept_model, out=out, notify=progress.say,
    )  # fmt: skip
    if dry_run:
        return tell(plan, fresh)
    return run_plan(plan, model, batch=batch, fresh=fresh, quiet=quiet, debug=debug)


def tell(plan: Plan, fresh: bool) -> Outcome:
    """Print what a plan would do, for ``--dry-run``; the outcome is that of the rows that are there."""
    from forward_influence.dry_run import describe_plan, rows_there
    from forward_influence.open_study import pending

    rows = rows_there(plan, fresh)
    done = {row["key"] for row in rows if row["status"] != "failed"}
    print(describe_plan(plan, pending(plan, done)), flush=True)
    return outcome(plan, rows)


def run_plan(plan: Plan, model, *, batch: int | None, fresh: bool, quiet: bool, debug: bool) -> Outcome:
    """Measure a plan into its folder."""
    from forward_influence.open_study import opened
    from forward_influence.runs import CannotWrite

    with opened(plan, model, batch=batch, fresh=fresh, quiet=quiet, debug=debug) as study:
        try:
            study.fill(plan)
        except CannotWrite as error:
            ended = outcome(plan, study.folder.rows())
            if ended.ok or ended.failed:
                raise Incomplete(str(error), ended) from error
            raise
        return outcome(plan, study.folder.rows())


def outcome(plan: Plan, rows: Iterable[dict], *parts: Plan) -> Outcome:
    """Documents of this request by how they ended, with the rows of the parts that came to it later."""
    from forward_influence.open_study import wanted

    keys = set().union(*map(wanted, (plan, *parts)))
    statuses: dict[str, list[str]] = {}
    reasons: dict[str, set[str]] = {}
    for row in rows:
        if row["key"] in keys:
            statuses.setdefault(row["document"], []).append(row["status"])
            reasons.setdefault(row["document"], set()).add(row["reason"])
    counts, why = {"ok": 0, "failed": 0, "skipped": 0}, set()
    for document, found in statuses.items():
        status = next(status for status in counts if status in found)
        counts[status] += 1
        why |= reasons[document] if status == "skipped" else set()
    failed_rows = sum(found.count("failed") for found in statuses.values())
    missing = len(plan.documents) + len(plan.short) - len(statuses)
    reason = why.pop() if len(why) == 1 else None
    return Outcome(plan.out, counts["ok"], counts["skipped"], counts["failed"], failed_rows, missing, reason)
