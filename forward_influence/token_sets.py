"""Which positions, and which sets of them, a per-token run removes. No torch."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import pairwise

from forward_influence.errors import UserError

#: Who chose a set of positions: chance; or the measured influence itself. Other names are those of signals.
RANDOM, MEASURED = "random sets", "measured influence"


def sample_positions(candidates: range, sample: int | None, seed: int) -> list[int]:
    """One position from each of ``sample`` equal parts of the candidates, ascending; None: all of them.

    Raises
    ------
    UserError
        If there are fewer candidates than that.
    """
    if sample is None:
        return list(candidates)
    if type(sample) is not int or not 1 <= sample <= len(candidates):
        raise UserError(
            f"sample is {sample}; it must be from 1 to the {len(candidates)} candidates of this prefix, or all of them."
        )
    draw = random.Random(f"sample {seed}")
    edges = [candidates.start + len(candidates) * part // sample for part in range(sample + 1)]
    return [draw.randrange(start, stop) for start, stop in pairwise(edges)]


def random_sets(places: list[int], size: int, seed: int) -> list[list[int]]:
    """Positions dealt into as many random sets of one size as they fill.

    Raises
    ------
    UserError
        If they do not fill one.
    """
    if type(size) is not int or not 2 <= size <= len(places):
        raise UserError(f"group is {size}; it must be from 2 to the {len(places)} positions that are measured.")
    dealt = random.Random(f"sets of {size}, {seed}").sample(places, len(places))
    return [dealt[start : start + size] for start in range(0, len(dealt) - size + 1, size)]


def highest(scores: Mapping[int, float], size: int) -> tuple[int, ...] | None:
    """The positions with the highest scores, ascending, lower positions first among equals.

    None where that is no choice: there are not more positions than that, or all have the same score.
    """
    if len(scores) <= size or len(set(scores.values())) < 2:
        return None
    return tuple(sorted(sorted(scores, key=lambda place: (-scores[place], place))[:size]))
