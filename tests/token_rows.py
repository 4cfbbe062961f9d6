"""Runs of single tokens and sets that are written by hand, and plain loops over them."""

import json
import math

import numpy as np

from forward_influence.analysis import open_runs
from forward_influence.rows import ROW_FIELDS, RunSpec, row_key
from forward_influence.runs import RunFolder
from forward_influence.token_sets import RANDOM

PREFIX, HORIZON, CHUNK = 40, 160, 32
SPEC = RunSpec(
    model="tiny@1", dtype="float32", tokenizer="t", data="local", prefix=PREFIX, horizon=HORIZON, chunk=CHUNK
)
BANDS = {"all": (0, 160), "near": (0, 128), "far": (128, 160)}
inf = math.inf
PLACES = (4, 7, 11, 16, 22, 30)
SETS = ((4, 7), (11, 16), (22, 30), (4, 22), (7, 16, 30), (4, 11, 22), (11, 22, 30))


def make_row(document: str, places: tuple[int, ...], kl: list[float], status: str = "ok") -> dict:
    selector = "positions:at=" + "+".join(map(str, places))
    chunks = [kl[start : start + CHUNK] for start in range(0, len(kl), CHUNK)]
    row = dict.fromkeys(ROW_FIELDS) | {"key": row_key(SPEC.hash(), document, selector), "mode": "remove"}
    row |= {"document": document, "document_sha": f"sha-{document}", "selector": selector, "status": status}
    row |= {"n_tokens": 300, "n_removed": len(places), "removed_fraction": len(places) / PREFIX, "seconds": 0.5}
    if status != "ok":
        return row | {"reason": "too short", "n_removed": None, "removed_fraction": None}
    row |= {"removed": list(places), "kept_fraction": 1 - len(places) / PREFIX, "kl": kl}
    row |= {"chunk_start": list(range(0, len(kl), CHUNK)), "chunk_count": [len(c) for c in chunks]}
    row |= {"kl_mean": [sum(c) / len(c) for c in chunks], "delta_nll": [0.0] * len(chunks)}
    return row | {"nll_count": [len(c) for c in chunks], "top1_changed": [0.0] * len(chunks)}


def write_token_run(folder, costs: dict, scores: dict, skipped=(), chosen=None):
    """A run of costs by document and set of positions, and scores by signal and document.

    Who chose a set is given as (document, who, positions); by default all sets were dealt at random.
    """
    rows = [make_row(document, places, kl) for document, found in costs.items() for places, kl in found.items()]
    rows += [make_row(document, (5,), [], "skipped") for document in skipped]
    with RunFolder.open(folder, SPEC, {}) as run:
        run.append(rows)
    lines = [
        {"hash": SPEC.hash(), "document": document, "document_sha": f"sha-{document}"}
        | {"signal": signal, "scores": values}
        for signal, found in scores.items()
        for document, values in found.items()
    ]
    (folder / "scores.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if chosen is None:
        sets = dict.fromkeys(places for found in costs.values() for places in found if len(places) > 1)
        chosen = [("", RANDOM, places) for places in sets]
    lines = [
        {"hash": SPEC.hash(), "document": document, "document_sha": f"sha-{document}" if document else ""}
        | {"chosen_by": who, "positions": list(places)}
        | {"among": sum(len(one) == 1 for one in costs[document]) if document else None}
        for document, who, places in chosen
    ]
    (folder / "sets.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return open_runs(folder)


def two_levels(near: float, far: float, length: int = HORIZON) -> list[float]:
    """KL that is constant in the near band and in the far one."""
    return [near] * 128 + [far] * (length - 128)


def by_place(values: dict[int, float | None]) -> list:
    """Scores of all positions; -7 where a test gives none, which must not matter."""
    return [values.get(place, -7.0) for place in range(PREFIX)]


def ranks(values: list[float]) -> np.ndarray:
    """Average ranks, by counting."""
    return np.array([sum(b < a for b in values) + (sum(b == a for b in values) + 1) / 2 for a in values])


def spearman(one: list[float], two: list[float]) -> float:
    """The correlation of ranks, written out."""
    a, b = ranks(one), ranks(two)
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


def interval(values: np.ndarray, statistic, seed: int) -> tuple[float, float]:
    """Percentile bootstrap over the first axis, one resample at a time."""
    draws = np.random.default_rng(seed).integers(0, len(values), (4000, len(values)))
    found = [statistic(values[draw]) for draw in draws]
    return np.quantile(found, 0.025), np.quantile(found, 0.975)


def random_run(documents: int = 5):
    rng = np.random.default_rng(3)
    costs, scores = {}, {"one": {}, "two": {}}
    for number in range(documents):
        name, length = f"d{number}", 150 if number == 4 else HORIZON
        costs[name] = {(p,): (rng.lognormal(-5, 1) * rng.lognormal(0, 1, length)).tolist() for p in PLACES}
        for places in SETS:
            costs[name][places] = (rng.uniform(0.5, 1) * sum(np.array(costs[name][p,]) for p in places)).tolist()
        for level, found in zip((1.0, 0.2), scores.values()):
            found[name] = by_place({p: level * math.log(sum(costs[name][p,])) + rng.normal(0, 0.5) for p in PLACES})
    return costs, scores


def mean_in(kl: list[float], band: str) -> float | None:
    start, stop = BANDS[band]
    if band != "all" and len(kl) < stop:
        return None
    return sum(kl[start:stop]) / len(kl[start:stop])


def words(figure) -> str:
    """The caption of a figure in one line."""
    return figure.get_supxlabel().replace("\n", " ")
