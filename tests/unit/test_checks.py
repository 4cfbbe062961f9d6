"""What the public checks of selectors and scorers notice, also under ``python -O``."""

import subprocess
import sys
from dataclasses import dataclass

import pytest

from forward_influence.checks import check_selector
from forward_influence.selectors import Selector


@dataclass(frozen=True)
class Picks(Selector):
    """Gives the positions that its fault says."""

    fault: str = ""

    def select(self, signals, count, document):
        first = signals.candidates.start
        return {
            "": range(first, first + count),
            "none": [],
            "more": range(first, first + count + 1),
            "twice": [first] * count,
            "sink": range(count),
            "recent": range(signals.tokens - count, signals.tokens),
            "outside": [signals.tokens],
        }[self.fault]

    def canonical(self):
        return "picks"


@dataclass(frozen=True)
class Explicit(Picks):
    """Somebody's own choice."""

    explicit = True


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("more", "1 positions were asked for, 2 came"),
        ("twice", "name a position twice"),
        ("sink", "are not all candidates"),
        ("recent", "are not all candidates"),
        ("outside", "leave the prefix"),
    ],
)
def test_positions_beyond_the_request_are_noticed(fault, sentence):
    check_selector(Picks())
    check_selector(Picks("none"))
    with pytest.raises(AssertionError, match=sentence):
        check_selector(Picks(fault))


def test_explicit_positions_may_be_any_of_the_prefix():
    for fault in ("more", "sink", "recent"):
        check_selector(Explicit(fault))
    for fault, sentence in (("twice", "twice"), ("outside", "leave the prefix")):
        with pytest.raises(AssertionError, match=sentence):
            check_selector(Explicit(fault))


OPTIMISED = """
from forward_influence.checks import check_selector
from infokv.checks import check_scorer
class Outside:
    '''Leaves the prefix.'''
    needs = ()
    def select(self, signals, count, document): return [10**6]
class Plain:
    '''No dataclass.'''
    needs = ()
    def score(self, signals): return None
for check, wrong in ((check_selector, Outside()), (check_scorer, Plain())):
    try:
        check(wrong)
    except AssertionError as error:
        print(error)
"""


def test_python_without_assert_statements_notices_the_same():
    done = subprocess.run([sys.executable, "-O", "-c", OPTIMISED], capture_output=True, text=True)
    assert done.stdout == (
        "[1000000] leave the prefix.\nPlain is no dataclass; decorate it with @dataclass(frozen=True).\n"
    ), done.stderr
