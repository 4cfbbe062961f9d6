"""What tells two versions of somebody's selector apart."""

import importlib
import sys

import pytest

from forward_influence.code_hash import code_hashes
from forward_influence.selectors import Selector, make_selectors
from infokv import Scorer

PLAIN = """
from forward_influence import Selector

class Mine(Selector):
    def select(self, signals, count, document):
        return range(4, 4 + count)
"""

DERIVED = "from a_base import Mine\n\nclass Derived(Mine):\n    pass\n"

SCORING = """
class Mine:
    needs = ()

    def score(self, signals):
        return helper(signals)

def helper(signals):
    return signals
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """``module(name, text)`` imports a module with this text anew, as the next process would."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made = set()

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        for known in made:
            sys.modules.pop(known, None)
        made.add(name)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield write
    for known in made:
        sys.modules.pop(known, None)


def only(selectors):
    (value,) = code_hashes(make_selectors(selectors)).values()
    return value


def test_what_comes_along_has_none():
    assert code_hashes(make_selectors(["entropy", "random", "snapkv", "none", "recompute", "positions:at=5"])) == {}


@pytest.mark.parametrize(
    ("text", "old", "new"), [(PLAIN, "range(4, 4", "range(5, 5"), (SCORING, "return signals", "return -signals")]
)
def test_an_edit_anywhere_in_the_module_shows(module, text, old, new):
    first = only(module("a_selector", text).Mine)
    assert only(module("a_selector", text).Mine) == first
    assert only(module("a_selector", text.replace(old, new)).Mine) != first


def test_an_edit_of_a_base_class_in_another_module_shows(module):
    module("a_base", PLAIN)
    first = only(module("a_derived", DERIVED).Derived)
    module("a_base", PLAIN.replace("range(4, 4", "range(5, 5"))
    assert only(module("a_derived", DERIVED).Derived) != first


def typed(text):
    """A class as a prompt or a notebook makes it: its source is nowhere."""
    space = {"__name__": "__main__", "Selector": Selector, "Scorer": Scorer}
    exec(text, space)
    return next(value for name, value in space.items() if name == "Typed")


TYPED = """
class Typed(Selector):
    start = 4
    @property
    def needs(self):
        return ("entropy",)
    def select(self, signals, count, document):
        return [place + self.start for place in (lambda n: range(n))(count)]
"""


def test_classes_typed_at_a_prompt_are_told_apart():
    first = only(typed(TYPED))
    assert only(typed(TYPED)) == first
    for old, new in (("start = 4", "start = 5"), ('"entropy"', '"keys"'), ("range(n)", "range(n + 1)")):
        changed = TYPED.replace(old, new)
        assert changed != TYPED
        assert only(typed(changed)) != first
