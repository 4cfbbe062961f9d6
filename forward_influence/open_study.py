"""A run folder that is being filled: what a plan, or a part of it, still lacks is measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from forward_influence.accepting import check_tuned_for
from forward_influence.document import blank_row, let_through, measure_document
from forward_influence.engine import CHUNK_SIZE
from forward_influence.estimate import estimate
from forward_influence.plan import Plan, least_length
from forward_influence.progress import Progress
from forward_influence.provenance import provenance
from forward_influence.rows import row_key
from forward_influence.runs import RunFolder
from forward_influence.selectors import describe_error
from infokv.identity import identity_of


class OpenStudy:
    """An open run folder and the model that fills it, loaded when it is first needed.

    Parameters
    ----------
    plan : Plan
        Of the whole study.
    folder : RunFolder
    model : str, path or LoadedModel
        As it was asked for.
    batch : int or None
        Rows at once.
    quiet, debug : bool
    """

    def __init__(self, plan: Plan, folder: RunFolder, model, *, batch: int | None, quiet: bool, debug: bool):
        self.folder = folder
        self._plan, self._model = plan, model
        self._batch, self._quiet, self._debug = batch, quiet, debug
        self._loaded = None

    def load(self):
        """The model, loaded now if it is not yet; what was loaded is noted in the run."""
        if self._loaded is None:
            say = Progress(quiet=self._quiet).say
            self._loaded = loaded_model(self._plan, self._model, say)
            self.folder.note({
                "attention": self._loaded.attention, "reference_check": self._loaded.check,
                "identity": identity_of(self._loaded.model).to_dict(),
                "notices": list(dict.fromkeys([*self._plan.notices, *self._loaded.notices])),
            })  # fmt: skip
            self.check_tuned_for(self._plan.selectors.values())
        return self._loaded

    @property
    def model_or_request(self):
        """The model if it is loaded, else what was asked for: to go on with in another folder."""
        return self._model if self._loaded is None else self._loaded

    def check_tuned_for(self, scorers: Iterable) -> None:
        """Refuse scorers that were tuned for another model, or say and note that they are accepted."""
        told = check_tuned_for(scorers, identity_of(self.load().model), self._plan.accept_model)
        for sentence in told:
            if sentence not in self._plan.notices:
                self._plan.notices.append(sentence)
                Progress(quiet=self._quiet).say(sentence)
        if told:
            self.folder.note({"notices": list(dict.fromkeys([*self._plan.notices, *self._loaded.notices]))})

    def fill(self, *plans: Plan) -> None:
        """Measure what the folder lacks of plans: the whole one, or some of its documents, or other selectors.

        A row that has failed since the folder was opened is not tried again.
        """
        done = self.folder.tried()
        self.folder.note({"planned_rows": len(done.union(*map(wanted, plans)))})
        skipped = [
            blank_row(
                plan.spec, document, sha, tokens, name, "skipped", f"shorter than {least_length(plan.spec)} tokens"
            )
            for plan in plans
            for document, tokens, sha in plan.short
            for name in plan.selectors
        ]
        self.folder.append(row for row in skipped if row["key"] not in done)
        if todo := [one for plan in plans for one in pending(plan, done)]:
            self._measure(todo)

    def _measure(self, todo: list[tuple]) -> None:
        plan = self._plan
        horizons = [min(len(document.ids) - plan.spec.prefix, plan.spec.horizon) for document, _ in todo]
        work = [horizon * len(selectors) for horizon, (_, selectors) in zip(horizons, todo)]
        progress = Progress(sum(work), quiet=self._quiet)
        try:
            if not self._quiet and self._loaded is None:  # it takes a third of a second
                progress.say(estimate(plan, todo, chunk_size=CHUNK_SIZE).sentence())
            loaded = self.load()
            for number, (document, selectors) in enumerate(todo, start=1):
                progress.label(f"document {number} of {len(todo)}")
                try:
                    rows = measure_document(
                        loaded.model, document, selectors, plan.spec, batch=self._batch, debug=self._debug,
                        notify=progress.say, progress=progress.advance,
                    )  # fmt: skip
                except (Exception, SystemExit) as error:  # one document's trouble is not that of the others
                    if self._debug:
                        let_through(error)
                    rows = _failed_rows(plan.spec, document, selectors, describe_error(error))
                self.folder.append(rows)
                progress.reach(sum(work[:number]))
                _tell_failures(rows, progress.say)
        finally:
            progress.close()


@contextlib.contextmanager
def opened(plan: Plan, model, *, batch: int | None, fresh: bool, quiet: bool, debug: bool) -> Iterator[OpenStudy]:
    """Open the run folder of a plan, made or resumed; see :class:`OpenStudy`."""
    facts = provenance(
        requested=plan.requested, device=plan.device, dtype=plan.dtype, batch=batch, corpus=plan.corpus,
        model={"name": plan.source.name, "path": str(plan.source.path)},
        tokenizer_adds_bos=plan.tokenizer.bos, notices=list(plan.notices), planned_rows=len(wanted(plan)),
    )  # fmt: skip
    with RunFolder.open(plan.out, plan.spec, facts, plan.inputs, fresh=fresh) as folder:
        yield OpenStudy(plan, folder, model, batch=batch, quiet=quiet, debug=debug)


def _failed_rows(spec, document, selectors, reason: str) -> list[dict]:
    return [blank_row(spec, document.id, document.sha, len(document.ids), name, "failed", reason) for name in selectors]


def _tell_failures(rows: list[dict], say) -> None:
    """One sentence for each reason for which rows of a document failed."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] == "failed":
            by_reason.setdefault(row["reason"], []).append(row["selector"])
    for reason, names in by_reason.items():
        what = "" if len(names) == len(rows) else f" with {', '.join(names)}"
        say(f"Document {rows[0]['document']!r} failed{what} ({reason.rstrip('.')}); going on.")


def loaded_model(plan: Plan, model, say=lambda sentence: None):
    """The model of a plan: the given one if it is loaded, or else loaded as the plan says."""
    from forward_influence.models import LoadedModel, load_model

    if isinstance(model, LoadedModel):
        return model
    extension = plan.spec.extend_context
    return load_model(
        plan.source, dtype=plan.dtype, device=plan.device,
        extend_context=extension.partition(":")[0] if extension else None,
        target_length=plan.spec.prefix + plan.spec.horizon if extension else None,
        notify=lambda sentence: None if sentence in plan.notices else say(sentence),
    )  # fmt: skip


def wanted(plan: Plan) -> set[str]:
    """Keys of all rows that the plan asks for."""
    names = [document.id for document in plan.documents] + [name for name, _, _ in plan.short]
    return {row_key(plan.spec.hash(), name, selector) for name in names for selector in plan.selectors}


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
