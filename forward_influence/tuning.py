"""Choosing a scorer's parameters by measurement: search on some documents, judgement on others."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from forward_influence.engine import CHUNK_SIZE
from forward_influence.errors import NothingMeasured, UserError
from forward_influence.estimate import estimate
from forward_influence.objectives import Objective, measuring, parse_band
from forward_influence.paths import reachable_path, write_whole
from forward_influence.plan import Plan, default_out, make_plan
from forward_influence.progress import Progress, duration
from forward_influence.provenance import versions
from forward_influence.request import check_numbers
from forward_influence.run_files import TUNED
from forward_influence.search import ROUNDS, RUNGS, Found, Space, make_space, search, share
from infokv.identity import identity_of
from infokv.scorer import SCORERS, Scorer


@dataclass(frozen=True)
class Tuned:
    """What a search chose, and what it is worth on documents that it never saw.

    Attributes
    ----------
    method : str
        Name of the scorer.
    parameters : dict
        Those that differ from its defaults.
    objective : str
        One of :data:`forward_influence.objectives.OBJECTIVES`.
    keep : str or None
        The budget, as a share of the prefix; None with objective ``"influence"``.
    band : tuple of int
        Offsets that count, the second not included.
    tried : int
        Settings that were sought, the default included.
    train_kl : dict
        Mean KL in nats on all training documents, by setting, of those that were measured on all of them, the default
        among them; None where one failed or is infinite.
    held_out_kl : dict
        Mean KL in nats on the held-out documents: ``tuned``, ``default``, ``attention`` (snapkv), ``random`` (the
        best of as many random settings on the training documents) and, unless it is the default, ``paper`` (InfoKV
        with its defaults).
    judged : dict
        The selector name under which each of these has its rows in the folder ``held-out``.
    path : str
        The tuned file; ``METHOD:FILE`` names the scorer.
    """

    method: str
    parameters: dict
    objective: str
    keep: str | None
    band: tuple[int, int]
    tried: int
    train_kl: dict[str, float | None]
    held_out_kl: dict[str, float | None]
    judged: dict[str, str]
    path: str


def tune(*, out: str | Path | None = None, method: str = "infokv", vary: Mapping[str, Sequence] | None = None,
         objective: str = "fidelity", keep: str = "0.4", fraction: str = "0.01",
         band: str | tuple[int, int] = "all", trials: int = 24, train: int = 16, held_out: int = 16, seed: int = 0,
         prefix: int = 2048, horizon: int = 512, batch: int | None = None, dry_run: bool = False, quiet: bool = False,
         **options) -> Tuned | None:  # fmt: skip
    """Choose the setting with the smallest mean KL against the full cache, and judge it on other documents.

    All settings that are measured together share a document's prefill and its reference row; the worse half is dropped
    after a quarter and after half of the training documents, by the mean logarithm of KL, and the best of the others
    is that with the best mean KL. Run it again with the same arguments to go on after an
    interruption.

    Parameters
    ----------
    out : path, optional
        Folder for the rows of the search (``search``) and of the judgement (``held-out``), and for ``tuned.json``; by
        default ``runs/<model>-<hash>-tuned-<method>-<hash of this request>``.
    method : str
        A scorer: a registered name, or ``module.path:Class``.
    vary : mapping of str to sequence, optional
        Values of each parameter; by default :data:`forward_influence.search.SPACES`.
    objective : {"fidelity", "influence"}
        Whether mean KL after compression at budget ``keep`` is made small, or mean KL after removal of the top
        ``fraction`` (Forward Influence) is made large.
    keep, fraction : str
        Shares of the prefix.
    band : {"all", "near", "far"} or tuple of int
        Offsets that count.
    trials : int
        Settings to try, the default included; half of them at random, half around the best so far. As many random ones
        are tried beside, to see what trying alone brings.
    train, held_out : int
        Documents for the search, and for the judgement; each as long as prefix and horizon together.
    seed : int
        Of the settings, and of the order of documents.
    dry_run : bool
        Everything up to loading weights; returns None.
    **options
        As in :func:`forward_influence.measure`: model, tokenizer, data, chunk, skip, dtype, device, offline,
        extend_context, sinks, recent; the last two matter to objective ``"influence"`` alone.

    Raises
    ------
    UserError, DataError, Refused
        If the request cannot be met.

    Notes
    -----
    Source: arXiv 2606.26875 fixes alpha, tau and k by hand; maximising Forward Influence is its outlook.
    """
    progress = Progress(quiet=quiet)
    check_numbers(trials=trials, train=train, held_out=held_out, prefix=prefix, horizon=horizon, batch=batch, seed=seed)
    space = make_space(method, vary)
    aim = Objective(objective, str(keep) if objective == "fidelity" else None)
    aim.selectors(space.single_values())  # refuses what no study takes
    plan = make_plan(
        selector=aim.selectors([space.setting({})]), fraction=fraction, prefix=prefix, horizon=horizon,
        full_horizon=True, limit=train + held_out, seed=seed, out=out, notify=progress.say, **options,
    )  # fmt: skip
    offsets = parse_band(band, plan.spec.horizon)
    if len(plan.documents) < train + held_out:
        raise UserError(
            f"{train} training and {held_out} held-out documents are needed, and {len(plan.documents)} have the "
            f"{prefix} + {plan.spec.horizon} tokens of prefix and horizon; ask for fewer, or give more data."
        )
    request = {
        "method": space.method, "vary": {name: list(values) for name, values in space.values.items()},
        "objective": objective, "keep": aim.keep, "band": list(offsets), "trials": trials, "train": train,
        "held_out": held_out, "skip": options.get("skip", 0), "spec": plan.spec.to_dict(),
    }  # fmt: skip
    home = reachable_path(out, "out") if out is not None else _default_home(plan, request)
    check_request(home / TUNED, request)
    searched = replace(plan, documents=plan.documents[:train], short=[], out=home / "search")
    others = replace(plan, documents=plan.documents[train : train + held_out], short=[], out=home / "held-out")
    if dry_run:
        print(describe(searched, others, aim, space, trials), flush=True)
        return None
    asked = {"model": options.get("model", "smollm2-135m"), "batch": batch, "quiet": quiet}
    if not quiet and not (home / TUNED).exists():
        whole = estimate(searched, most_work(searched, others, trials), chunk_size=CHUNK_SIZE)
        progress.say(f"All of it is expected to take at most about {duration(whole.seconds)} on a quiet machine.")
    with measuring(searched, aim, offsets, **asked) as (measured, study):

        def loss(settings: Sequence[Scorer], count: int) -> dict[Scorer, float]:
            weigh = aim.loss if count == train else aim.typical_loss
            return {one: weigh(kl) for one, kl in measured(settings, count).items()}

        sought, drawn = search(space, loss, trials, train, seed)
        asked["model"] = study.model_or_request
    if sought.losses[sought.best] == math.inf:
        raise NothingMeasured(
            f"No setting of {space.method} has a finite KL on the training documents; `forward-influence show "
            f"{searched.out}` says why."
        )
    judged = judges(space, sought.best, drawn.best)
    with measuring(others, aim, offsets, **asked) as (measured, study):
        found = {one: aim.loss(kl) for one, kl in measured(list(judged.values()), held_out).items()}
        model = identity_of(study.load().model)
    result = Tuned(
        method=space.method, parameters=own_parameters(sought.best), objective=objective, keep=aim.keep, band=offsets,
        tried=sought.tried, train_kl=by_name(sought, aim), path=str(home / TUNED),
        held_out_kl={name: _finite(abs(found[one])) for name, one in judged.items()},
        judged={name: aim.name(one) for name, one in judged.items()},
    )  # fmt: skip
    provenance = {
        "request": request, "objective": objective, "keep": aim.keep, "fraction": None if aim.keep else str(fraction),
        "band": list(offsets), "tried": sought.tried, "train_kl": result.train_kl, "held_out_kl": result.held_out_kl,
        "judged": result.judged, "random": {"tried": drawn.tried, "train_kl": by_name(drawn, aim)},
        "train": [one.id for one in searched.documents], "held_out": [one.id for one in others.documents],
        "model": plan.source.name, "packages": versions(),
    }  # fmt: skip
    content = {"method": result.method, "parameters": result.parameters, "model": model.to_dict(),
               "provenance": provenance}  # fmt: skip
    write_whole(home / TUNED, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return result


def judges(space: Space, best: Scorer, drawn: Scorer) -> dict[str, Scorer]:
    """What the held-out documents are asked about."""
    default, paper = space.setting({}), SCORERS.create("infokv")
    others = {"default": default, "attention": SCORERS.create("snapkv"), "random": drawn}
    return {"tuned": best} | others | ({} if space.method in ("infokv", "mixture") else {"paper": paper})


def own_parameters(scorer: Scorer) -> dict:
    """Parameters that differ from the defaults."""
    plain = type(scorer)()
    values = {one.name: getattr(scorer, one.name) for one in fields(scorer) if one.init}
    return {name: value for name, value in values.items() if value != getattr(plain, name)}


def by_name(found: Found, aim: Objective) -> dict[str, float | None]:
    """Mean KL on all training documents by the name of each setting."""
    return {aim.name(one): _finite(abs(loss)) for one, loss in found.losses.items()}


def _finite(kl: float) -> float | None:
    return kl if math.isfinite(kl) else None


def _default_home(plan: Plan, request: dict) -> Path:
    digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:8]
    return Path(f"{default_out(plan.source.name, plan.spec)}-tuned-{request['method'].rpartition(':')[2]}-{digest}")


def check_request(file: Path, request: dict) -> None:
    """Refuse a folder that holds the outcome of another tuning, which would be lost.

    Raises
    ------
    UserError
        In a sentence that names the first difference.
    """
    if not file.exists():
        return
    try:
        there = json.loads(file.read_text(encoding="utf-8"))["provenance"]["request"]
        different = [name for name in request if there.get(name) != request[name]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{str(file)!r} is no file of this version's tuning; move it, or give another --out.") from None
    if different:
        name = different[0]
        raise UserError(
            f"{str(file)!r} is the outcome of another tuning ({name} {there.get(name)!r} there, {request[name]!r} "
            "here); give another --out, or move it."
        )


def most_work(searched: Plan, others: Plan, trials: int) -> list[tuple]:
    """Documents with as many settings as a tuning measures on them at most, for :func:`estimate`."""
    train = len(searched.documents)
    rungs = [share(train, rung) for rung in RUNGS]
    # On a quarter all settings, random ones first and then in rounds; half of each kind on half; a quarter on all.
    around = trials // 2
    todo = [(document, dict.fromkeys(range(trials))) for document in searched.documents[: rungs[0]]]
    todo += [
        (document, dict.fromkeys(range(around // ROUNDS or 1)))
        for _ in range(ROUNDS)
        for document in searched.documents[: rungs[0]]
    ]
    todo += [(document, dict.fromkeys(range(trials + 1))) for document in searched.documents[rungs[0] : rungs[1]]]
    todo += [(document, dict.fromkeys(range(trials // 2 + 2))) for document in searched.documents[rungs[1] :]]
    todo += [(document, dict.fromkeys(range(5))) for document in others.documents]
    return todo


def _listed(values: Sequence, most: int = 12) -> str:
    """Values, or the first of very many."""
    more = f" ... ({len(values)} in all)" if len(values) > most else ""
    return ", ".join(map(str, values[: most // 2 if more else most])) + more


def describe(searched: Plan, others: Plan, aim: Objective, space: Space, trials: int) -> str:
    """What a tuning would do, for ``--dry-run``: at most so many rows, and their cost."""
    train, todo = len(searched.documents), most_work(searched, others, trials)
    rows = sum(len(one) for _, one in todo)
    names = "\n".join(f"           {name}: {_listed(values)}" for name, values in space.values.items())
    budget = f" at budget {aim.keep}" if aim.keep else f" of the top {searched.spec.fraction}"
    return "\n".join([
        f"tune       {space.method} for {aim.kind}{budget}",
        f"settings   {trials} to seek, and as many random ones",
        f"varied\n{names}",
        f"documents  {train} for training, {len(others.documents)} held out",
        f"study      {searched.spec.sentence()}",
        f"rows       at most {rows}, those that are there included",
        f"folder     {searched.out.parent}",
        estimate(searched, todo, chunk_size=CHUNK_SIZE).sentence(),
        "Dry run: no weights were loaded and nothing was written.",
    ])  # fmt: skip
