"""Which settings of a scorer are tried, and which of them go on: the search behind tuning. Sees losses, no model."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from forward_influence.errors import UserError
from infokv.errors import Refused
from infokv.registry import construct
from infokv.scorer import SCORERS, Scorer

#: What terms of a mixture are joined with attention, unless the caller says otherwise.
_PARTNERS = ("expected-attention", "observed-attention", "entropy", "entropy-next", "evolving-entropy",
             "self-information", "evolution", "key-norm/rank", "value-norm/rank")  # fmt: skip

_ALPHAS = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


def mixtures() -> tuple[str, ...]:
    """Terms of mixtures: attention with one or two other signals, in several shares and scales."""
    alone = [f"attention*{1 - share:g}+{one}*{share:g}" for one in _PARTNERS for share in (0.05, 0.2, 0.5, 0.8)]
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
    cls : type
        Of the scorer.
    method : str
        Its name.
    values : mapping of str to sequence
    """

    cls: type
    method: str
    values: Mapping[str, Sequence]

    def setting(self, values: Mapping) -> Scorer:
        """The scorer with these parameters.

        Raises
        ------
        Refused
            If one is unknown or out of range.
        """
        return construct(self.cls, self.method, dict(values))

    def random(self, seed: int) -> Iterator[Scorer]:
        """Settings in a random order that the seed fixes, each once; the default comes first."""
        seen = {self.setting({})}
        yield self.setting({})
        size = math.prod(map(len, self.values.values()))
        draw = random.Random(seed)
        for place in draw.sample(range(size), size) if size <= 1 << 16 else _endless(draw, size):
            one = self._possible(self._at(place))
            if one is not None and one not in seen:
                seen.add(one)
                yield one

    def _possible(self, values: Mapping) -> Scorer | None:
        """The scorer with these parameters; None where values that are fine alone exclude each other."""
        try:
            return self.setting(values)
        except Exception:  # a third party's constructor may raise anything
            return None

    def _at(self, place: int) -> dict:
        """The combination with this number."""
        found = {}
        for name, values in self.values.items():
            place, index = divmod(place, len(values))
            found[name] = values[index]
        return found

    def single_values(self) -> Iterator[Scorer]:
        """The default with each value of each parameter."""
        return (self.setting({name: value}) for name, values in self.values.items() for value in values)

    def neighbours(self, scorer: Scorer, seed: int) -> list[Scorer]:
        """Settings that differ from a scorer in one parameter, in a random order that the seed fixes."""
        here = {name: getattr(scorer, name) for name in self.values}
        tried = (self._possible({**here, name: value}) for name, values in self.values.items() for value in values)
        around = [one for one in tried if one is not None and one != scorer]
        random.Random(seed).shuffle(around)
        return list(dict.fromkeys(around))


def _endless(draw: random.Random, size: int) -> Iterator[int]:
    while True:
        yield draw.randrange(size)


def make_space(method: str, vary: Mapping[str, Sequence] | None) -> Space:
    """The space of a method, given by its name or as ``module.path:Class``, checked value by value.

    Raises
    ------
    UserError, Refused
        If nothing is varied, or the method, a parameter or a value is not known or out of range.
    """
    cls = type(SCORERS.create(method))
    method = SCORERS.name_of(cls)
    values = SPACES.get(method) if vary is None else vary
    if not values or not all(values.values()):
        raise UserError(f"Nothing is varied; say what to vary of {method}, such as --vary window=32,64.")
    made: dict[str, tuple] = {}
    for name, given in values.items():
        settings = [_alone(cls, method, name, value) for value in given]
        made[name] = tuple(dict.fromkeys(getattr(one, name) for one in settings))
    return Space(cls, method, made)


def _alone(cls: type, method: str, name: str, value) -> Scorer:
    """The default with one value of one parameter, which must be such that a file can hold it and a table find it."""
    try:
        made = construct(cls, method, {name: value})
        hash(made)
    except Refused:
        raise
    except (Exception, SystemExit) as error:  # a third party's constructor may raise anything
        raise UserError(
            f"{method} cannot be tuned over {name}={value} ({type(error).__name__}: {error}); a scorer is a frozen "
            "dataclass whose parameters are numbers and texts."
        ) from error
    if not isinstance(getattr(made, name), str | int | float | bool | None):
        raise UserError(
            f"{name} of {method} is a {type(getattr(made, name)).__name__}, which a tuned file cannot hold; vary "
            "numbers and texts."
        )
    return made


#: Shares of the training documents on which settings are compared before the worse half of them is dropped.
RUNGS = (4, 2, 1)

#: A guided search goes on from the best so far so many times.
ROUNDS = 2


@dataclass(frozen=True)
class Found:
    """The outcome of one search.

    Attributes
    ----------
    best : Scorer
    tried : int
        Settings that were measured, the default included.
    losses : dict of Scorer to float
        Of those that were measured on all training documents; the default is always among them.
    """

    best: Scorer
    tried: int
    losses: dict[Scorer, float]


def search(space: Space, loss: Callable, trials: int, train: int, seed: int) -> tuple[Found, Found]:
    """The best setting that is sought, and the best of as many that are only drawn.

    Both begin with the default and the same random settings. The sought ones go on, in :data:`ROUNDS` rounds, with
    such as differ from the best so far in one parameter; the others with more random ones. All are compared on a
    quarter of the training documents; of each kind, the worse half but the default is dropped there, and again on
    half of them. Both kinds are measured together, so that they share each document's prefill.

    Parameters
    ----------
    loss : callable
        Takes settings and a number of training documents, and gives each setting's loss on the first so many.
    trials : int
        Settings of each kind.
    train : int
        Training documents.
    seed : int

    Returns
    -------
    sought, drawn : Found
    """
    few = share(train, RUNGS[0])
    drawn = list(itertools.islice(space.random(seed), trials))
    known = dict(loss(drawn, few))
    sought = {one: known[one] for one in drawn[: -(-trials // 2)]}
    step = -(-(trials - len(sought)) // ROUNDS)
    while len(sought) < trials:
        around = space.neighbours(min(sought, key=sought.get), seed + len(sought))
        others = itertools.chain(around, drawn)  # where everything around is known
        fresh = (one for one in dict.fromkeys(others) if one not in sought)
        more = list(itertools.islice(fresh, min(step, trials - len(sought))))
        if not more:
            break
        known |= loss(more, few)
        sought |= {one: known[one] for one in more}
    kinds = [list(sought), drawn]
    for rung in RUNGS[1:]:
        kinds = [better_half(kind, known) for kind in kinds]
        known = loss(list(dict.fromkeys(itertools.chain(*kinds))), share(train, rung))
    found = [{one: known[one] for one in kind} for kind in kinds]
    return tuple(
        Found(min(losses, key=losses.get), tried, losses) for losses, tried in zip(found, (len(sought), len(drawn)))
    )


def better_half(settings: list[Scorer], losses: Mapping[Scorer, float]) -> list[Scorer]:
    """Half of some settings, those with the smallest losses, and the first one, which is the default."""
    ranked = sorted(settings, key=losses.get)[: max(2, math.ceil(len(settings) / 2))]
    return list(dict.fromkeys([settings[0], *ranked]))


def share(train: int, rung: int) -> int:
    """Documents of a rung: a part of the training documents, at least one."""
    return max(1, train // rung)
