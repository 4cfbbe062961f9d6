"""Contract checks that anybody can run on an own selector: ``check_selector(MySelector)``."""

from __future__ import annotations

import torch

from forward_influence.selectors import SELECTORS, Selector, TopScore, make_selector, selector_name
from infokv.checks import check_scoring, require, synthetic_signals


def check_selector(given) -> None:
    """Run all checks on a selector or scorer.

    Parameters
    ----------
    given : class, selector, scorer or str
        A class is made with its defaults, or by the text in its attribute ``example`` if it needs parameters.

    Raises
    ------
    AssertionError
        With a sentence about what does not hold.
    """
    selector = make_selector(getattr(given, "example", given) if isinstance(given, type) else given)
    if ranks(selector):
        check_scoring(getattr(selector, "scorer", selector))
    check_repeatable(selector)
    check_positions(selector)
    check_signals_unchanged(selector)
    check_name(selector)


def ranks(selector) -> bool:
    """Whether a selector removes the top of scores, rather than choose positions itself."""
    own = type(selector).select is not Selector.select if isinstance(selector, Selector) else True
    return isinstance(selector, TopScore) or (hasattr(selector, "score") and not own)


def check_positions(selector) -> None:
    """Whole numbers inside the prefix, each once; at most as many candidates as asked for, of a scorer exactly.

    A selector with ``explicit = True`` states somebody's own choice: any number, candidates or not.
    """
    for count in (1, 7):
        signals = synthetic_signals(selector.needs)
        positions = [place.__index__() for place in selector.select(signals, count, "document")]
        require(all(0 <= place < signals.tokens for place in positions), f"{positions} leave the prefix.")
        require(len(set(positions)) == len(positions), f"{positions} name a position twice.")
        if getattr(selector, "explicit", False):
            continue
        require(
            len(positions) == count if ranks(selector) else len(positions) <= count,
            f"{count} positions were asked for, {len(positions)} came.",
        )
        require(all(place in signals.candidates for place in positions), f"{positions} are not all candidates.")


def check_repeatable(selector) -> None:
    """The same document and seed give the same positions, whatever was drawn in between."""
    signals = synthetic_signals(selector.needs)
    first = sorted(selector.select(signals, 7, "document"))
    torch.randn(7)
    again = sorted(selector.select(signals, 7, "document"))
    require(first == again, f"{first} the first time, {again} the second; draw from signals.seed alone.")


def check_signals_unchanged(selector) -> None:
    """Selecting changes none of the signals."""
    signals, twin = synthetic_signals(selector.needs), synthetic_signals(selector.needs)
    selector.select(signals, 7, "document")
    for name, value in twin.values_by_name.items():
        now = signals.values_by_name[name]
        pairs = zip(now, value) if isinstance(value, list) else [(now, value)]
        require(all(torch.equal(a, b) for a, b in pairs), f"select changed the signal {name!r}.")


def check_name(selector) -> None:
    """Its canonical text is one word of the grammar, and names it again."""
    text = selector_name(selector)
    require(text and not any(mark in text for mark in " \t\n"), f"{text!r} is no single word.")
    name = text.partition(":")[0]
    if name in SELECTORS and "<locals>" not in text and ".json" not in text:
        require(selector_name(make_selector(text)) == text, f"{text!r} does not name itself again.")
