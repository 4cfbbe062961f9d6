"""Greedy re-ranking: tokens chosen one by one, each for what it adds to those before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from forward_influence.objectives import kl_by_document
from forward_influence.open_study import opened
from forward_influence.plan import Plan
from forward_influence.selectors import make_selectors

#: Candidates that are measured again in each round, those with the largest gains so far.
POOL = 32


def greedy_order(
    cost: Callable[[Sequence[list[int]]], list[float | None]], alone: dict[int, float], count: int, pool: int = POOL
) -> list[int]:
    """Positions in the order in which each adds most to the influence of those before it.

    Parameters
    ----------
    cost : callable
        Takes sets of positions and gives the influence of each, in nats; None where it could not be measured.
    alone : dict of int to float
        Influence of each candidate alone.
    count : int
        Positions to choose; fewer where there are fewer candidates.
    pool : int
        Candidates that are measured in a round: those that added most when they were last measured. The others are
        taken to add less still, which is so where influence has diminishing returns.
    """
    gains, chosen, worth = dict(alone), [], 0.0
    while gains and len(chosen) < count:
        ahead = sorted(gains, key=lambda place: (-gains[place], place))[:pool]
        if chosen:
            costs = cost([sorted([*chosen, place]) for place in ahead])
            gains |= {place: _gain(found, worth) for place, found in zip(ahead, costs)}
        best = min(ahead, key=lambda place: (-gains[place], place))
        worth += gains.pop(best)
        chosen.append(best)
    return chosen


def _gain(cost: float | None, worth: float) -> float:
    """What a set costs more than its part; nothing where either is unknown or both are infinite."""
    return 0.0 if cost is None or math.isinf(worth) else cost - worth


def measure_greedily(
    plan: Plan, alone: dict[str, dict[int, float]], count: int, model, *, batch, fresh: bool, quiet: bool, debug: bool
) -> dict[str, list[int]]:
    """Greedy orders of documents, measured in the folder of a plan; see :func:`greedy_order`.

    Parameters
    ----------
    plan : Plan
        Its selectors are of no interest.
    alone : dict
        Influence of each position alone, by document.
    """
    band = (0, plan.spec.horizon)
    with opened(plan, model, batch=batch, fresh=fresh, quiet=quiet, debug=debug) as study:

        def cost(document, sets: Sequence[list[int]]) -> list[float | None]:
            selectors = make_selectors([positions_text(one) for one in sets])
            part = replace(plan, documents=[document], short=[], selectors=selectors)
            study.fill(part)
            found = kl_by_document(study.folder.rows(), part, band)
            return [kl[0] if (kl := found[positions_text(one)]) else None for one in sets]

        return {
            document.id: greedy_order(lambda sets, document=document: cost(document, sets), alone[document.id], count)
            for document in plan.documents
            if document.id in alone
        }


def positions_text(places: Sequence[int]) -> str:
    """The selector of explicit positions."""
    return "positions:at=" + "+".join(map(str, sorted(places)))
