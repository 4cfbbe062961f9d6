"""Which settings of a scorer are tried, and which of them go on: the search behind tuning. Sees losses, no model."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from forward_influence.errors import UserError
from infokv.registry import construct
from infokv.scorer import SCORERS, Scorer

#: What terms of a mixture are joined with attention, unless the caller says otherwise.
_PARTNERS = ("entropy", "entropy-next", "evolving-entropy", "self-information", "evolution", "key-norm/rank",
             "value-norm/rank")  # fmt: skip

_ALPHAS = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


def mixtures() -> tuple[str, ...]:
    """Terms of mixtures: attention with one or two other signals, in several shares and scales."""
    alone = [f"attention*{1 - share:g}+{one}*{share:g}" for one in _PARTNERS for share in (0.05, 0.2, 0.5)]
    ranked = [
        f"attention/rank*{1 - share:g}+{one.partition('/')[0]}/rank*{share:g}"
        for one in _PARTNERS
        for share in (0.2, 0.5)
    ]
    pairs = [f"attention*0.8+{one}*0.1+{two}*0.1" for one, two in itertools.combinations(_PARTNERS, 2)]
    return ("attention*1", *alone, *ranked, *pairs)


#: What is varied unless the caller says otherwise.
SPACES: dict[str, dict[str, Sequence]] = {
    "infokv": {
        "alpha": _ALPHAS, "tau": (0.0, 0.5, 1.0, 2.0), "k": (64, 256, None), "align": ("self", "next"),
        "temperature": (0.5, 1.0, 2.0), "window": (16, 32, 64), "kernel": (5, 9, 15), "sinks": (0, 4),
        "pool_target": ("attn", "both"),
    },
    "mixture": {
        "terms": mixtures(), "k": (256, None), "temperature": (0.5, 1.0, 2.0), "window": (16, 32, 64),
        "kernel": (5, 9, 15), "sinks": (0, 4),
    },
    "snapkv": {"window": (16, 32, 64), "kernel": (1, 5, 9, 15), "pool": ("avg", "max")},
}  # fmt: skip


@dataclass(frozen=True)
class Space:
    """Parameters of a scorer and the values that they may take.

    Attributes
    ----------
    method : str
        Name of the scorer.
    values : mapping of str to sequence
    """

    method: str
    values: Mapping[str, Sequence]

    def setting(self, values: Mapping) -> Scorer:
        """The scorer with these parameters.

        Raises
        ------
        Refused
            If one is unknown or out of range.
        """
        return construct(SCORERS.get(self.method), self.method, dict(values))

    def random(self, seed: int) -> Iterator[Scorer]:
        """Settings in a random order that the seed fixes, each once; the default comes first."""
        seen = {self.setting({})}
        yield self.setting({})
        size = math.prod(map(len, self.values.values()))
        draw = random.Random(seed)
        for place in draw.sample(range(size), size) if size <= 1 << 16 else _endless(draw, size):
            one = self.setting(self._at(place))
            if one not in seen:
                seen.add(one)
                yield one

    def _at(self, place: int) -> dict:
        """The combination with this number."""
        found = {}
        for name, values in self.values.items():
            place, index = divmod(place, len(values))
            found[name] = values[index]
        return found

    def neighbours(self, scorer: Scorer, seed: int) -> list[Scorer]:
        """Settings that differ from a scorer in one parameter, in a random order that the seed fixes."""
        here = {name: getattr(scorer, name) for name in self.values}
        around = [
            self.setting({**here, name: value})
            for name, values in self.values.items()
            for value in values
            if self.setting({**here, name: value}) != scorer
        ]
        random.Random(seed).shuffle(around)
        return list(dict.fromkeys(around))


def _endless(draw: random.Random, size: int) -> Iterator[int]:
    while True:
        yield draw.randrange(size)


def make_space(method: str, vary: Mapping[str, Sequence] | None) -> Space:
    """The space of a method, checked value by value.

    Raises
    ------
    UserError, Refused
        If nothing is varied, or the method, a parameter or a value is not known or out of range.
    """
    cls = SCORERS.get(method)
    values = SPACES.get(method) if vary is None else vary
    if not values or not all(values.values()):
        raise UserError(f"Nothing is varied; say what to vary of {method}, such as --vary window=32,64.")
    made = {
        name: [getattr(construct(cls, method, {name: one}), name) for one in given] for name, given in values.items()
    }
    return Space(method, {name: tuple(dict.fromkeys(given)) for name, given in made.items()})


#: Shares of the training documents on which settings are compared before the worse half of them is dropped.
RUNGS = (4, 2, 1)

#: A guided search goes on from the best so far after this part of its settings.
_ROUNDS = 6


@dataclass(frozen=True)
class Found:
    """The outcome of one search.

    Attributes
    ----------
    best : Scorer
    tried : int
        Settings that were measured, the default included.
    losses : dict of Scorer to float
        Of those that were measured on all training documents.
    """

    best: Scorer
    tried: int
    losses: dict[Scorer, float]


def guided(space: Space, loss: Callable, trials: int, train: int, seed: int) -> Found:
    """Half random settings, then, round by round, such that differ from the best so far in one parameter.

    Parameters
    ----------
    loss : callable
        Takes settings and a number of training documents, and gives each setting's loss on the first so many.
    trials : int
        Settings to try.
    train : int
        Training documents.
    """
    few = _share(train, RUNGS[0])
    losses = dict(loss(list(itertools.islice(space.random(seed), -(-trials // 2))), few))
    while len(losses) < trials:
        around = space.neighbours(min(losses, key=losses.get), seed + len(losses))
        others = itertools.chain(around, itertools.islice(space.random(seed), len(losses) + 1))  # all may be known
        step = min(trials - len(losses), max(1, trials // _ROUNDS))
        more = list(itertools.islice((one for one in dict.fromkeys(others) if one not in losses), step))
        if not more:
            break
        losses |= loss(more, few)
    return halved(list(losses), loss, train)


def at_random(space: Space, loss: Callable, trials: int, train: int, seed: int) -> Found:
    """As many random settings, to see what trying alone brings; see :func:`guided`."""
    return halved(list(itertools.islice(space.random(seed), trials)), loss, train)


def halved(settings: list[Scorer], loss: Callable, train: int) -> Found:
    """The best of some settings, the worse half dropped after a quarter and after half of the documents."""
    alive, losses = settings, {}
    for rung in RUNGS:
        losses = loss(alive, _share(train, rung))
        alive = sorted(alive, key=losses.get)
        if rung > 1:
            alive = alive[: max(2, math.ceil(len(alive) / 2))]
    return Found(alive[0], len(settings), losses)


def _share(train: int, rung: int) -> int:
    return max(1, train // rung)
