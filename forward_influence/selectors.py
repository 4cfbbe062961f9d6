"""Which prefix positions a study removes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from forward_influence.errors import UserError
from forward_influence.inputs import shown
from infokv.errors import Refused
from infokv.registry import Registry
from infokv.scorer import SCORERS, Scorer
from infokv.signals import TokenSignals, parse_signal


class Selector:
    """Which positions of a prefix to remove: one set, shared by all layers and heads.

    The contract; subclassing it only brings the defaults. A subclass has ``select``, or ``score`` as an
    :class:`infokv.Scorer` has, and then its top scores are removed. Any scorer is a selector, too.

    Attributes
    ----------
    needs : tuple of str
        Names of the signals that it reads (see :data:`infokv.signals.SIGNALS`); it gets no others.
    explicit : bool
        Whether its positions are somebody's own choice, and so may be any of the prefix in any number.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    explicit: ClassVar[bool] = False

    def select(self, signals: TokenSignals, count: int, document: str) -> Sequence[int]:
        """Positions to remove.

        Parameters
        ----------
        signals : TokenSignals
            Not to be changed; work on clones.
        count : int
            How many positions the study removes; at most as many, each once, among ``signals.candidates``.
        document : str
            Id of the document.
        """
        if not hasattr(self, "score"):
            raise TypeError(f"{type(self).__name__} does not say what it selects; give it select or score.")
        return TopScore(self).select(signals, count, document)


class NotListed(Refused):
    """A selector has nothing to say about a document: its row is skipped with this reason."""


#: Built-in and added selectors. Every registered scorer is a selector as well.
SELECTORS = Registry(
    "selector",
    "forward_influence.selectors",
    {
        "attention": "forward_influence.builtin_selectors:Attention",
        "entropy": "forward_influence.builtin_selectors:Entropy",
        "entropy-next": "forward_influence.builtin_selectors:EntropyNext",
        "low-entropy": "forward_influence.builtin_selectors:LowEntropy",
        "positions": "forward_influence.builtin_selectors:Positions",
        "none": "forward_influence.builtin_selectors:NoRemoval",
        "recompute": "forward_influence.builtin_selectors:Recompute",
        "influence": "forward_influence.influence_selector:Influence",
    },
)

DEFAULT_SELECTORS = ("attention", "entropy", "random", "none")


def register_selector(name: str):
    """Class decorator: ``@register_selector("mine")`` makes a selector available by name."""
    return SELECTORS.register(name)


@dataclass(frozen=True)
class TopScore(Selector):
    """The top of a scorer's scores, averaged over layers and heads into one shared set."""

    scorer: Scorer

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(self.scorer.needs)

    def select(self, signals: TokenSignals, count: int, document: str) -> list[int]:
        return top_positions(self.shared_scores(signals), signals.candidates, count)

    def shared_scores(self, signals: TokenSignals) -> torch.Tensor:
        """Float64 ``[tokens]``: the scores averaged over layers and heads.

        Raises
        ------
        UserError
            If the scorer gave something of another shape.
        """
        scores = self.scorer.score(signals)
        heads = signals.query_heads if getattr(self.scorer, "heads", "kv") == "query" else signals.kv_heads
        fitting = ((1, signals.layers), (1, heads), (signals.tokens,))
        shape = tuple(getattr(scores, "shape", ()))
        if (
            not isinstance(scores, torch.Tensor)
            or len(shape) != 3
            or any(size not in sizes for size, sizes in zip(shape, fitting))
        ):
            what = f"scores of shape {list(shape)}" if isinstance(scores, torch.Tensor) else shown(scores)
            raise UserError(
                f"{self.canonical()} returned {what}; they must be a tensor [{signals.layers} layers or 1, "
                f"{signals.kv_heads} KV heads or 1, {signals.tokens} tokens]."
            )
        return scores.double().mean(dim=(0, 1))

    def canonical(self) -> str:
        registry = SELECTORS if any(cls is type(self.scorer) for _, cls in SELECTORS) else SCORERS
        return registry.canonical(self.scorer)


def top_positions(scores: torch.Tensor, candidates: range, count: int) -> list[int]:
    """The highest-scored candidates, ascending. Ties: the lower position first.

    Parameters
    ----------
    scores : Tensor ``[tokens]``
    candidates : range
    count : int

    Raises
    ------
    UserError
        If there are fewer candidates than that, or a score is NaN.
    """
    if count > len(candidates):
        raise UserError(
            f"{count} positions are to be removed, but there are only {len(candidates)} candidates; lower the "
            "fraction, or the sinks and recent positions that are kept out."
        )
    of_candidates = scores[candidates.start : candidates.stop].cpu()
    if bool(of_candidates.isnan().any()):
        raise UserError("A score is NaN; a scorer must give a number, or plus or minus infinity, for each token.")
    order = torch.sort(of_candidates, descending=True, stable=True).indices[:count]
    return sorted(candidates.start + i for i in order.tolist())


def make_selector(given) -> Selector:
    """A selector from a text, a class, a selector or a scorer.

    Raises
    ------
    UserError, Refused
        If a name, a parameter or a value is not known, or the object is no selector, in one sentence.
    """
    shown = given if isinstance(given, str) else getattr(given, "__name__", None) or type(given).__name__
    try:
        made = _from_text(given) if isinstance(given, str) else given() if isinstance(given, type) else given
    except (UserError, Refused):
        raise
    except (Exception, SystemExit) as error:  # a third party's constructor may raise anything
        raise UserError(f"Selector {shown!r} cannot be made ({describe_error(error)}); correct it.") from error
    if hasattr(made, "kept"):  # a compression method, which has been checked
        return made
    if not hasattr(made, "select") and not hasattr(made, "score"):
        raise UserError(
            f"{shown!r} is no selector: it has neither select(signals, count, document) nor score(signals)."
        )
    needs = getattr(made, "needs", None)
    if isinstance(needs, str) or not isinstance(needs, Iterable):
        raise UserError(f"The needs of {shown!r} are {needs!r}; write a tuple of signals, such as ('entropy',) or ().")
    for name in needs:
        parse_signal(name)
    return made if hasattr(made, "select") else TopScore(made)


def _from_text(text: str):
    name, _, rest = text.partition(":")
    if name in SELECTORS:
        return SELECTORS.create(text)
    if name in SCORERS:
        return SCORERS.create(text)
    first = rest.partition(":")[0]
    if "." in name or (first and "=" not in first and not first.endswith(".json")):  # module.path:Class
        return SELECTORS.create(text)
    raise UserError(SELECTORS.unknown(name, SCORERS.names()))


def describe_error(error: BaseException) -> str:
    """Kind and message of an error on one line; what is made for people keeps its message alone."""
    message = " ".join(str(error).split())
    if isinstance(error, UserError | Refused):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def selector_name(selector: Selector) -> str:
    """Canonical text of a selector: the name that its rows carry."""
    return SELECTORS.canonical(selector)


def make_selectors(given) -> dict[str, Selector]:
    """Selectors by canonical text; the same one given twice counts once.

    Parameters
    ----------
    given : str, class, selector, scorer, or an iterable of these

    Raises
    ------
    UserError, Refused
        If one cannot be made, there is none, or two that differ have one name.
    """
    several = isinstance(given, Iterable) and not isinstance(given, str | type)
    out: dict[str, Selector] = {}
    for one in given if several else [given]:
        selector = make_selector(one)
        name = selector_name(selector)
        if name in out and not _alike(out[name], selector):
            raise UserError(
                f"Two different selectors are both called {name!r}; make their parameters fields of a dataclass, "
                "which then show in the name."
            )
        out.setdefault(name, selector)
    if not out:
        raise UserError(f"No selector was given; name one, such as {DEFAULT_SELECTORS[0]!r}.")
    return out


def _alike(one: Selector, other: Selector) -> bool:
    """Whether two selectors of one name do the same; plain classes compare by identity, so look inside."""
    one, other = getattr(one, "scorer", one), getattr(other, "scorer", other)
    return one == other or (type(one) is type(other) and vars(one) == vars(other))
