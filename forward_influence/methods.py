"""Compression methods of a study: a scorer at a budget, and what it would keep of a prefix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from forward_influence.errors import UserError
from forward_influence.selectors import SELECTORS, TopScore, describe_error
from infokv.allocation import budget_needs
from infokv.budget import Budget
from infokv.cuts import prompt_slots
from infokv.errors import Refused
from infokv.recorder import Recorder
from infokv.scorer import SCORERS, Scorer, usable_scorer
from infokv.store import TokenStore


@dataclass(frozen=True)
class Method:
    """What compression by a scorer keeps of a prefix, per layer and KV head.

    Parameters
    ----------
    scorer : Scorer
    budget : Budget
    """

    scorer: Scorer
    budget: Budget

    @property
    def needs(self) -> tuple[str, ...]:
        """Signals that must be recorded."""
        return budget_needs(self.scorer, self.budget)

    def canonical(self) -> str:
        """The name that its rows carry, such as ``snapkv@0.4`` or ``infokv:alpha=0.8@512 tokens,pyramid``."""
        amount = (
            f"{self.budget.tokens} tokens" if self.budget.keep is None else format(self.budget.share.normalize(), "f")
        )
        spread = f",{self.budget.layers}" if self.budget.layers else ""
        return f"{TopScore(self.scorer).canonical()}@{amount}{spread}"

    def kept(self, prefix: TokenStore, recorder: Recorder) -> list[torch.Tensor]:
        """Positions that stay: for each layer int ``[kv_heads or 1, n_kept]``, ascending.

        Parameters
        ----------
        prefix : TokenStore
            One row that holds the whole prefix; it is read only.
        recorder : Recorder
            Has seen the prefix, and has the signals of :attr:`needs`.
        """
        views = [layer.part(0) for layer in prefix.layers]
        for view, facts in zip(views, recorder.facts):
            if facts.window is not None:
                view.expire(facts.window)
        slots = prompt_slots(views, recorder, self.scorer, self.budget, prefix.seen)
        out = []
        for view, chosen in zip(views, slots):
            places = view.slot_positions()[0]
            out.append(
                places if chosen is None else places.expand(chosen.shape[1], -1).gather(1, chosen[0].to(places.device))
            )
        return out


def make_methods(given, keep: Iterable = (), tokens: Iterable = (), layers: str | None = None) -> list[Method]:
    """Every method at every budget.

    Parameters
    ----------
    given : str, scorer, or iterable of these
    keep, tokens : iterables
        Budgets as shares of the prefix and as numbers of tokens; at least one in all.
    layers : str, optional
        How budgets are spread over layers, if not in the scorer's own way.

    Raises
    ------
    UserError, Refused
        If something is unknown or unfit, in one sentence.
    """
    several = isinstance(given, Iterable) and not isinstance(given, str | type)
    listed = [one if isinstance(one, Iterable) and not isinstance(one, str) else [one] for one in (keep, tokens)]
    budgets = [Budget(keep=one, layers=layers) for one in listed[0]]
    budgets += [Budget(tokens=one, layers=layers) for one in listed[1]]
    if not budgets:
        raise UserError("No budget was given; name a share, such as keep 0.4, or a number of tokens.")
    methods = []
    for one in given if several else [given]:
        try:
            scorer = usable_scorer(scorer_named(one) if isinstance(one, str) else one)
        except (UserError, Refused):
            raise
        except (Exception, SystemExit) as error:  # a third party's constructor may raise anything
            raise UserError(f"Method {one!r} cannot be made ({describe_error(error)}); correct it.") from error
        if getattr(scorer, "propagate", None) is not None:
            raise UserError(
                f"{SCORERS.canonical(scorer)} computes deeper layers of the prefix in another way, so that its cache "
                "is no part of the full one; measure it without propagate."
            )
        methods += [Method(scorer, budget) for budget in budgets]
    if not methods:
        raise UserError("No method was given; name one, such as 'snapkv'.")
    return methods


def scorer_named(text: str) -> Scorer:
    """The scorer of a text: a registered one, an own class, or a selector that is a scorer, such as ``entropy``.

    Raises
    ------
    UserError, Refused
        If there is none, in one sentence.
    """
    name = text.partition(":")[0]
    if name not in SELECTORS or name in SCORERS:
        return SCORERS.create(text)
    made = SELECTORS.create(text)
    if not isinstance(made, Scorer):
        raise UserError(f"{text!r} chooses positions to remove and has no scores to keep a cache by; name a method.")
    return made
