"""Choosing a scorer's parameters by measurement: search on some documents, judgement on others."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from forward_influence.errors import UserError
from forward_influence.methods import Method, make_methods
from forward_influence.plan import Plan, make_plan
from forward_influence.progress import Progress
from forward_influence.selectors import make_selectors
from forward_influence.study import loaded_model, run_plan
from infokv.registry import construct
from infokv.scorer import SCORERS

#: What is varied unless the caller says otherwise. Values are tried in all combinations, or a random part of them.
SPACES: dict[str, dict[str, Sequence]] = {
    "infokv": {
        "alpha": (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0), "tau": (0.0, 0.5, 1.0, 2.0), "k": (64, 256, None),
        "align": ("self", "next"), "temperature": (0.5, 1.0, 2.0), "window": (32, 64), "kernel": (5, 9, 15),
    },
    "snapkv": {"window": (16, 32, 64), "kernel": (1, 5, 9, 15), "pool": ("avg", "max")},
}  # fmt: skip


@dataclass(frozen=True)
class Tuned:
    """What a search chose, and what it is worth on documents that it never saw.

    Attributes
    ----------
    method : str
        Name of the scorer.
    parameters : dict
        Those that differ from its defaults.
    keep : str
        The budget, as a share of the prefix.
    band : tuple of int
        Offsets over which mean KL was made small, the second not included.
    settings : int
        How many were tried, the default included.
    search : dict
        Mean KL in nats on the training documents, by setting, of those that were tried on all of them.
    held_out : dict
        Mean KL in nats on the held-out documents: ``tuned``, ``default``, ``attention`` (snapkv) and ``chance`` (a
        setting drawn at random from those tried).
    path : str
        The file that holds all of this; ``METHOD:FILE`` names the tuned scorer.
    """

    method: str
    parameters: dict
    keep: str
    band: tuple[int, int]
    settings: int
    search: dict[str, float]
    held_out: dict[str, float]
    path: str


def tune(*, out: str | Path, method: str = "infokv", vary: Mapping[str, Sequence] | None = None, keep: str = "0.4",
         trials: int = 24, train: int = 16, held_out: int = 16, band: tuple[int, int] | None = None, seed: int = 0,
         quiet: bool = False, batch: int | None = None, **options) -> Tuned:  # fmt: skip
    """Choose the setting with the smallest mean KL against the full cache, and judge it on other documents.

    All settings of a document share its prefill and its reference row; the worse half is dropped after a quarter and
    after half of the training documents. Run it again with the same arguments to go on after an interruption.

    Parameters
    ----------
    out : path
        Folder for the rows of the search and of the judgement, and for ``tuned.json``.
    method : str
        A registered scorer.
    vary : mapping of str to sequence, optional
        Values of each parameter; by default :data:`SPACES`.
    keep : str
        The budget, as a share of the prefix.
    trials : int
        Settings to try, the default included.
    train, held_out : int
        Documents for the search, and for the judgement.
    band : tuple of int, optional
        Offsets to look at; by default all.
    seed : int
        Of the settings, and of the order of documents.
    **options
        As in :func:`forward_influence.measure`: model, tokenizer, data, prefix, horizon, chunk, dtype, device, offline.

    Raises
    ------
    UserError, DataError, Refused
        If the request cannot be met.
    """
    candidates = settings(method, vary, keep, trials, seed)
    plan = make_plan(
        selector=candidates, limit=train + held_out, seed=seed, out=Path(out) / "search",
        notify=Progress(quiet=quiet).say, **options,
    )  # fmt: skip
    if len(plan.documents) < train + held_out:
        raise UserError(
            f"{train} training and {held_out} held-out documents are needed, and {len(plan.documents)} are long "
            "enough; ask for fewer, or give more data."
        )
    band = band or (0, plan.spec.horizon)
    run = {"model": loaded_model(plan, options.get("model")), "batch": batch, "quiet": quiet}
    alive, losses = candidates, {}
    for share in (4, 2, 1):
        documents = plan.documents[: max(1, train // share)]
        losses = mean_losses(measured(plan, alive, documents, **run), documents, alive, band)
        alive = sorted(alive, key=lambda one: losses[one.canonical()])
        if share > 1:
            alive = alive[: max(2, math.ceil(len(alive) / 2))]
    best = alive[0]
    judged = judges(best, candidates, keep, seed)
    others = plan.documents[train : train + held_out]
    away = replace(plan, out=Path(out) / "held-out")
    found = mean_losses(measured(away, list(judged.values()), others, **run), others, list(judged.values()), band)
    result = Tuned(
        method=method, parameters=own_parameters(best.scorer), keep=str(keep), band=band, settings=len(candidates),
        search=losses, held_out={name: found[one.canonical()] for name, one in judged.items()},
        path=str(Path(out) / "tuned.json"),
    )  # fmt: skip
    write(result, plan)
    return result


def settings(method: str, vary: Mapping[str, Sequence] | None, keep: str, trials: int, seed: int) -> list[Method]:
    """The settings to try at one budget: the default, then a random part of all combinations, in a fixed order."""
    space = SPACES.get(method) if vary is None else vary
    if not space:
        raise UserError(f"Nothing is varied; say what to vary of {method}, such as vary={{'window': [32, 64]}}.")
    if type(trials) is not int or trials < 2:
        raise UserError(f"trials is {trials}; it must be at least 2, the default and another one.")
    cls = SCORERS.get(method)
    every = [dict(zip(space, values)) for values in itertools.product(*space.values())]
    random.Random(seed).shuffle(every)
    scorers = dict.fromkeys([cls(), *(construct(cls, method, values) for values in every)])
    return make_methods(list(scorers)[:trials], keep=[keep])


def judges(best: Method, candidates: list[Method], keep: str, seed: int) -> dict[str, Method]:
    """What the held-out documents are asked about."""
    chance = random.Random(seed + 1).choice(candidates)
    attention = make_methods("snapkv", keep=[keep])[0]
    return {"tuned": best, "default": candidates[0], "attention": attention, "chance": chance}


def measured(plan: Plan, methods: list[Method], documents: list, *, model, batch, quiet) -> list[dict]:
    """Rows of these methods on these documents, measured where they are not there yet."""
    from forward_influence import open_runs

    part = replace(plan, selectors=make_selectors(methods), documents=documents, short=[])
    run_plan(part, model, batch=batch, fresh=False, quiet=quiet, debug=False)
    return open_runs(plan.out).rows


def mean_losses(rows: list[dict], documents: list, methods: list[Method], band: tuple[int, int]) -> dict[str, float]:
    """Mean KL over documents and the offsets of a band, nats, by the method's name; infinite where a row failed."""
    wanted = {document.id for document in documents}
    values: dict[str, list[float]] = {one.canonical(): [] for one in methods}
    for row in rows:
        if row["document"] in wanted and row["selector"] in values:
            part = row["kl"][band[0] : band[1]] if row["status"] == "ok" else []
            values[row["selector"]].append(sum(part) / len(part) if part else math.inf)
    return {name: sum(found) / len(found) if len(found) == len(wanted) else math.inf for name, found in values.items()}


def own_parameters(scorer) -> dict:
    """Parameters that differ from the defaults."""
    plain = type(scorer)()
    return {
        one.name: getattr(scorer, one.name)
        for one in fields(scorer)
        if getattr(scorer, one.name) != getattr(plain, one.name)
    }


def write(result: Tuned, plan: Plan) -> None:
    """The file of a result: parameters, and where they come from."""
    content = {**asdict(result), "spec": plan.spec.to_dict(), "model": plan.source.name}
    text = json.dumps(content, indent=2, ensure_ascii=False)
    Path(result.path).write_text(text + "\n", encoding="utf-8")
