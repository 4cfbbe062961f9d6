"""Per-token influence: single positions of a prefix removed one at a time, and what cheap signals say of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from forward_influence.accepting import check_tuned_for
from forward_influence.code_hash import code_hashes
from forward_influence.engine import CHUNK_SIZE
from forward_influence.errors import UserError
from forward_influence.greedy import measure_greedily, positions_text
from forward_influence.open_study import opened
from forward_influence.plan import default_out, document_seed, make_plan
from forward_influence.progress import Progress
from forward_influence.request import check_numbers
from forward_influence.runs import read_run
from forward_influence.selectors import describe_error, make_selectors
from forward_influence.study import Outcome, outcome, tell
from forward_influence.token_files import (
    append_scores,
    append_sets,
    in_order,
    ranking_file,
    rankings_of,
    read_scores,
    scored,
    write_rankings,
)
from forward_influence.token_sets import MEASURED, RANDOM, highest, random_sets, sample_positions
from infokv.calls import evaluation
from infokv.identity import identity_of, sizes_of
from infokv.prefill import prefill

#: What is compared with the measured influence, unless the caller says otherwise.
DEFAULT_SIGNALS = (
    "attention", "entropy", "entropy-next", "self-information", "mixture:terms=evolution*1", "infokv", "knorm",
    "mixture:terms=value-norm*1", "keydiff", "lagkv", "expected-attention", "observed-attention", "h2o", "tova", "rpc",
    "rkv", "streaming-llm", "random",
)  # fmt: skip

#: Sizes of the sets whose influence is compared with the sum of their members'.
DEFAULT_GROUPS = (8, 32)


def token_influence(*, sample: int | None = 128, group: Iterable[int] = DEFAULT_GROUPS, greedy: int = 0,
                    signal: Iterable = DEFAULT_SIGNALS, prefix: int = 2048, horizon: int = 1024, sinks: int = 4,
                    recent: int = 64, seed: int = 0, limit: int | None = 8, skip: int = 0, batch: int | None = None,
                    out: str | Path | None = None, fresh: bool = False, dry_run: bool = False, quiet: bool = False,
                    debug: bool = False, **options) -> Outcome:  # fmt: skip
    """Remove single tokens from the cache of a prefix, and measure what the future loses by each.

    The rows are those of :func:`forward_influence.measure` with explicit positions. Beside them lie ``scores.jsonl``,
    what each signal says of the same positions, ``sets.jsonl``, who chose the sets, and ``influence-all.json``,
    ``-near`` and ``-far``, which the selector ``influence:FILE`` ranks by. Run it again with the same arguments to go
    on after an interruption.

    Parameters
    ----------
    sample : int or None
        Positions to measure: one drawn from each of as many equal parts of the candidates, the same in all documents
        (so intervals over documents do not contain the draw of positions); None: all candidates.
    group : iterable of int
        The measured positions are also removed in sets of these sizes, to see how additive influence is: in random
        ones, and in those that the measured influence and each signal rank highest.
    greedy : int
        So many of them are also chosen one by one, each for what it adds to those before it; the order goes to
        ``influence-greedy.json``, the rows to the folder ``greedy``.
    signal : iterable of str, class or scorer
        Scorers whose scores, averaged over layers and heads, are compared with the influence.
    prefix, horizon, sinks, recent, seed, limit, skip
        As in :func:`forward_influence.measure`.
    **options
        As in :func:`forward_influence.measure`: model, tokenizer, data, full_horizon, chunk, dtype, device, offline,
        extend_context, shard, accept_model.

    Returns
    -------
    Outcome

    Raises
    ------
    UserError, DataError, Refused
        If the request cannot be met; nothing was measured.

    Notes
    -----
    Source: arXiv 2606.26875, Forward Influence of a set; a set of one token here.
    """
    progress = Progress(quiet=quiet)
    check_numbers(prefix=prefix, horizon=horizon, sinks=sinks, recent=recent, seed=seed, limit=limit, skip=skip,
                  batch=batch, greedy=greedy)  # fmt: skip
    signals, group = make_selectors(signal) if signal else {}, tuple(group)
    for name, one in signals.items():
        if not hasattr(one, "shared_scores"):
            raise UserError(f"{name} chooses positions and has no scores; leave it out of the signals.")
    places = sample_positions(range(sinks, prefix - recent), sample, seed)
    dealt = [part for size in group for part in random_sets(places, size, seed)]
    sets = [[place] for place in places] + dealt
    plan = make_plan(
        selector=list(map(positions_text, sets)), prefix=prefix, horizon=horizon,
        sinks=sinks, recent=recent, seed=seed, limit=limit, skip=skip, out=out, notify=progress.say, **options,
    )  # fmt: skip
    if out is None:
        plan = replace(plan, out=Path(f"{default_out(plan.source.name, plan.spec)}-tokens"))
    for sentence in check_tuned_for(signals.values(), sizes_of(plan.source.config), plan.accept_model):
        plan.notices.append(sentence)
        progress.say(sentence)
    model = options.get("model", "smollm2-135m")
    return run_tokens(
        plan, signals, dealt, greedy, model, batch=batch, fresh=fresh, dry_run=dry_run, quiet=quiet, debug=debug
    )


def run_tokens(
    plan, signals: dict, dealt: list[list[int]], greedy: int, model, *, batch, fresh, dry_run, quiet, debug
) -> Outcome:
    """Measure the sets of a plan, score their positions, and write what the selector ``influence`` reads."""
    sizes = dict.fromkeys(map(len, dealt))
    if dry_run:
        told = tell(plan, fresh)
        if sizes:
            more = len(sizes) * (len(signals) + 1)
            share = f"up to {more / len(plan.selectors):.0%} more time"
            print(f"Then at most {more} sets in each document, those that are ranked highest: {share}.", flush=True)
        return told
    with opened(plan, model, batch=batch, fresh=fresh, quiet=quiet, debug=debug) as study:
        _score(plan, signals, study, Progress(quiet=quiet).say)
        append_sets(plan, [(None, RANDOM, None, sorted(places)) for places in dealt])
        study.fill(plan)
        parts = _highest(plan, signals, sizes, list(study.folder.rows()))
        study.fill(plan, *parts)
        rows = list(study.folder.rows())
        model = study.model_or_request
        identity = noted_identity(plan.out) or identity_of(study.load().model).to_dict()
    rankings = rankings_of(plan, rows)
    if short := len(plan.documents) - len(rankings["all"]):
        Progress(quiet=quiet).say(
            f"{short} of {len(plan.documents)} documents were not measured to the horizon and are not in "
            f"{ranking_file('all')}; --full-horizon takes longer ones instead."
        )
    if greedy:
        inside = replace(plan, out=plan.out / "greedy")
        orders = measure_greedily(
            inside, rankings["all"], greedy, model, batch=batch, fresh=fresh, quiet=quiet, debug=debug
        )  # fmt: skip
        rankings["greedy"] = {name: in_order(orders[name], found) for name, found in rankings["all"].items()}
    write_rankings(plan, rankings, identity)
    return outcome(plan, rows, *parts)


def _highest(plan, signals: dict, sizes: Iterable[int], rows: list[dict]) -> list:
    """Plans for the sets that the measured influence and each signal rank highest among the measured positions."""
    alone = rankings_of(plan, rows)["all"]
    newest = {(one["document"], one["signal"]): one for one in read_scores(plan.out, plan.spec.hash())}
    chosen = []
    for document in plan.documents:
        costs = alone.get(document.id, {})
        rankings = {MEASURED: costs}
        for name in signals:
            entry = newest.get((document.id, name))
            if entry is not None and entry["document_sha"] == document.sha:  # a signal may have failed
                rankings[name] = {place: score for place in costs if (score := entry["scores"][place]) is not None}
        for size in sizes:
            for name, ranking in rankings.items():
                if places := highest(ranking, size):
                    chosen.append((document, name, len(costs), places))
    append_sets(plan, chosen)
    return [
        replace(plan, documents=[document], short=[], selectors=make_selectors(map(positions_text, sets)))
        for document in plan.documents
        if (sets := [places for one, *_, places in chosen if one is document])
    ]


def noted_identity(folder: Path) -> dict | None:
    """The identity of the model with which a run was measured, where it was noted."""
    run = read_run(folder)
    return next((one["identity"] for one in (run.provenance, *run.resumed) if "identity" in one), None)


def _score(plan, signals: dict, study, say) -> None:
    """Write the scores that are missing; a signal that fails is left out, and said."""
    codes = code_hashes(signals)
    there = scored(plan, codes)
    todo = [
        (document, missing)
        for document in plan.documents
        if (missing := {name: one for name, one in signals.items() if (document.id, name) not in there})
    ]
    if todo:
        study.check_tuned_for(signals.values())
    for document, missing in todo:
        scores, failed = shared_scores(study.load().model, document, missing, plan.spec)
        append_scores(plan, document, scores, codes)
        for name, reason in failed.items():
            say(f"Document {document.id!r} has no scores of {name} ({reason.rstrip('.')}); going on.")


def shared_scores(model, document, signals: dict, spec) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Scores of all positions of the prefix by each scorer, averaged over layers and heads; and why some have none."""
    ids = torch.tensor([document.ids[: spec.prefix]], device=model.get_input_embeddings().weight.device)
    total = min(len(document.ids), spec.prefix + spec.horizon)
    needs = dict.fromkeys(need for one in signals.values() for need in one.needs)
    with evaluation(model), torch.no_grad():
        _, facts = prefill(
            model, ids, needs, chunk_size=CHUNK_SIZE, total_length=total,
            candidates=range(spec.sinks, spec.prefix - spec.recent), seed=document_seed(spec.seed, document.id),
        )  # fmt: skip
        scores, failed = {}, {}
        for name, one in signals.items():
            try:
                scores[name] = one.shared_scores(facts).tolist()
            except (Exception, SystemExit) as error:  # a third party's code may raise anything; the others go on
                failed[name] = describe_error(error)
        return scores, failed
