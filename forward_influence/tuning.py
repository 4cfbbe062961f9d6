"""Choosing a scorer's parameters by measurement: search on some documents, judgement on others."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from forward_influence.errors import UserError
from forward_influence.objectives import Objective, measuring, parse_band
from forward_influence.plan import Plan, default_out, make_plan
from forward_influence.progress import Progress
from forward_influence.request import check_numbers
from forward_influence.search import Found, Space, at_random, guided, make_space
from infokv.identity import identity_of
from infokv.scorer import Scorer

TUNED = "tuned.json"


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
        Settings that were measured in the search, the default included.
    train_kl : dict
        Mean KL in nats on all training documents, by setting, of those that were tried on all of them.
    held_out_kl : dict
        Mean KL in nats on the held-out documents: ``tuned``, ``default``, ``attention`` (snapkv) and ``random`` (the
        best of as many random settings on the training documents).
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
    train_kl: dict[str, float]
    held_out_kl: dict[str, float]
    judged: dict[str, str]
    path: str


def tune(*, out: str | Path | None = None, method: str = "infokv", vary: Mapping[str, Sequence] | None = None,
         objective: str = "fidelity", keep: str = "0.4", fraction: str = "0.01",
         band: str | tuple[int, int] = "all", trials: int = 24, train: int = 16, held_out: int = 16, seed: int = 0,
         prefix: int = 2048, horizon: int = 512, batch: int | None = None, dry_run: bool = False, quiet: bool = False,
         **options) -> Tuned | None:  # fmt: skip
    """Choose the setting with the smallest mean KL against the full cache, and judge it on other documents.

    All settings of a document share its prefill and its reference row; the worse half is dropped after a quarter and
    after half of the training documents. Run it again with the same arguments to go on after an interruption.

    Parameters
    ----------
    out : path, optional
        Folder for the rows of the search (``search``) and of the judgement (``held-out``), and for ``tuned.json``; by
        default ``runs/<model>-<hash>-tuned-<method>``.
    method : str
        A registered scorer.
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
        Documents for the search, and for the judgement.
    seed : int
        Of the settings, and of the order of documents.
    dry_run : bool
        Everything up to loading weights; returns None.
    **options
        As in :func:`forward_influence.measure`: model, tokenizer, data, full_horizon, chunk, skip, dtype, device,
        offline, extend_context; with objective ``"influence"`` also sinks and recent.

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
    aim = Objective(objective, keep if objective == "fidelity" else None)
    plan = make_plan(
        selector=aim.selectors([space.setting({})]),
        fraction=fraction, prefix=prefix, horizon=horizon, limit=train + held_out, seed=seed, out=out,
        notify=progress.say, **options,
    )  # fmt: skip
    offsets = parse_band(band, plan.spec.horizon)
    if len(plan.documents) < train + held_out:
        raise UserError(
            f"{train} training and {held_out} held-out documents are needed, and {len(plan.documents)} are long "
            "enough; ask for fewer, or give more data."
        )
    home = plan.out if out is not None else Path(f"{default_out(plan.source.name, plan.spec)}-tuned-{method}")
    search = replace(plan, documents=plan.documents[:train], short=[], out=home / "search")
    others = replace(plan, documents=plan.documents[train : train + held_out], short=[], out=home / "held-out")
    if dry_run:
        print(describe(search, others, aim, space, trials, seed), flush=True)
        return None
    asked = {"model": options.get("model", "smollm2-135m"), "batch": batch, "quiet": quiet}
    with measuring(search, aim, offsets, **asked) as (loss, study):
        best = guided(space, loss, trials, train, seed)
        chance = at_random(space, loss, trials, train, seed)
        asked["model"] = study.loaded
    if math.isinf(best.losses[best.best]):
        raise UserError(f"No setting of {method} could be measured on the training documents; see {str(search.out)!r}.")
    judged = {"tuned": best.best, "default": space.setting({}), "attention": make_space("snapkv", None).setting({}),
              "random": chance.best}  # fmt: skip
    with measuring(others, aim, offsets, **asked) as (loss, study):
        found = loss(list(judged.values()), held_out)
        model = study.loaded.model
    result = Tuned(
        method=method, parameters=own_parameters(best.best), objective=objective, keep=aim.keep, band=offsets,
        tried=best.tried, train_kl={aim.name(one): abs(value) for one, value in best.losses.items()},
        held_out_kl={name: abs(found[one]) for name, one in judged.items()},
        judged={name: aim.name(one) for name, one in judged.items()}, path=str(home / TUNED),
    )  # fmt: skip
    write(result, search, others, identity_of(model).to_dict(), chance, aim)
    return result


def own_parameters(scorer: Scorer) -> dict:
    """Parameters that differ from the defaults."""
    plain = type(scorer)()
    values = {one.name: getattr(scorer, one.name) for one in fields(scorer)}
    return {name: value for name, value in values.items() if value != getattr(plain, name)}


def describe(search: Plan, others: Plan, aim: Objective, space: Space, trials: int, seed: int) -> str:
    """What a tuning would do, for ``--dry-run``: at most so many rows, and their cost."""
    from forward_influence.engine import CHUNK_SIZE
    from forward_influence.estimate import estimate

    settings = dict.fromkeys(range(trials + trials // 2))
    train = len(search.documents)
    todo = []
    for place, document in enumerate(search.documents):  # all on a quarter, half on half, a quarter on all
        left = 1 if place < max(1, train // 4) else 2 if place < max(1, train // 2) else 4
        todo.append((document, dict(list(settings.items())[: max(2, len(settings) // left)])))
    todo += [(document, dict.fromkeys(range(4))) for document in others.documents]
    rows = sum(len(one) for _, one in todo)
    names = "\n".join(f"  {name}: {', '.join(map(str, values))}" for name, values in space.values.items())
    return (
        f"tune {space.method} for {aim.kind}" + (f" at budget {aim.keep}" if aim.keep else "")
        + f": {trials} settings and as many random ones, {train} training and {len(others.documents)} held-out "
        f"documents, at most {rows} rows\nvaried:\n{names}\n{search.spec.sentence()}\n"
        + estimate(search, todo, chunk_size=CHUNK_SIZE).sentence()
        + f"\nfolder: {search.out.parent}"
    )  # fmt: skip


def write(result: Tuned, search: Plan, others: Plan, model: dict, chance: Found, aim: Objective) -> None:
    """The tuned file: method, parameters, model, and where they come from."""
    provenance = {
        "objective": result.objective, "keep": result.keep, "fraction": None if result.keep else search.spec.fraction,
        "band": list(result.band), "tried": result.tried, "train_kl": result.train_kl,
        "held_out_kl": result.held_out_kl, "judged": result.judged,
        "random": {"tried": chance.tried, "train_kl": {aim.name(one): abs(x) for one, x in chance.losses.items()}},
        "train": [one.id for one in search.documents], "held_out": [one.id for one in others.documents],
        "spec": search.spec.to_dict(), "model": search.source.name,
    }  # fmt: skip
    content = {"method": result.method, "parameters": result.parameters, "model": model, "provenance": provenance}
    path = Path(result.path)
    draft = path.with_suffix(".tmp")
    try:
        draft.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be written ({error.strerror}); make room and run again.") from error
