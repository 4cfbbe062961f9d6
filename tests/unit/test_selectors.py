"""Which positions are chosen, how selectors are named, and what is said about those that are none."""

import json
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forward_influence.builtin_selectors import Entropy, Positions
from forward_influence.document import choose
from forward_influence.errors import UserError
from forward_influence.rows import removal_count
from forward_influence.selectors import (
    DEFAULT_SELECTORS,
    SELECTORS,
    Selector,
    TopScore,
    make_selector,
    make_selectors,
    register_selector,
    selector_name,
    top_positions,
)
from infokv.checks import synthetic_signals
from infokv.errors import Refused
from infokv.scorer import SCORERS, register
from infokv.scorers.random import Random


def naive_top(scores, candidates, count):
    """Takes the best one out again and again; of equal ones the first."""
    left, chosen = list(candidates), []
    for _ in range(count):
        best = left[0]
        for place in left:
            if scores[place] > scores[best]:
                best = place
        chosen.append(best)
        left.remove(best)
    return sorted(chosen)


@st.composite
def ranked(draw):
    values = st.sampled_from([0.0, 1.0, -1.0, 2.5, math.inf, -math.inf, 1e-30])  # few values: many ties
    scores = draw(st.lists(values, min_size=1, max_size=40))
    start = draw(st.integers(0, len(scores) - 1))
    stop = draw(st.integers(start + 1, len(scores)))
    return scores, range(start, stop), draw(st.integers(0, stop - start))


@given(ranked())
def test_top_positions_equal_a_naive_search(case):
    scores, candidates, count = case
    assert top_positions(torch.tensor(scores), candidates, count) == naive_top(scores, candidates, count)


def test_all_scores_equal_gives_the_first_candidates():
    assert top_positions(torch.zeros(5000), range(4, 4000), 300) == list(range(4, 304))


def test_top_positions_that_cannot_be():
    with pytest.raises(UserError, match="4 positions are to be removed, but there are only 3 candidates"):
        top_positions(torch.zeros(9), range(2, 5), 4)
    scores = torch.zeros(9)
    scores[8] = math.nan
    assert top_positions(scores, range(2, 5), 1) == [2]  # outside the candidates anything goes
    scores[3] = math.nan
    with pytest.raises(UserError, match="A score is NaN"):
        top_positions(scores, range(2, 5), 1)


@given(st.integers(1, 200_000), st.decimals("1e-6", 1, places=6))
def test_counts_are_exact_on_the_typed_decimal(n, fraction):
    assert removal_count(n, str(fraction)) == max(1, math.floor(n * Fraction(str(fraction))))


@dataclass(frozen=True)
class Half:
    """Scores that layers and heads disagree about."""

    needs = ()

    def score(self, signals):
        scores = torch.zeros(3, 2, signals.tokens)
        scores[:, :, 10] = torch.tensor([[9.0, 0], [0, 0], [0, 0]])  # mean 1.5
        scores[:, :, 20] = 2.0
        scores[:, 0, 30] = 3.0  # mean 1.5, later than 10
        scores[:, :, 0] = 99.0  # no candidate
        return scores


def test_a_scorer_removes_the_top_of_its_mean_over_layers_and_heads():
    signals = synthetic_signals()
    assert TopScore(Half()).select(signals, 1, "d") == [20]
    assert TopScore(Half()).select(signals, 2, "d") == [10, 20]
    assert TopScore(Half()).select(signals, 4, "d") == [4, 10, 20, 30]


@given(st.integers(1, 76), st.integers(0, 2**40))
def test_every_count_is_met_with_candidates(count, seed):
    signals = synthetic_signals(seed=seed)
    chosen = TopScore(Random()).select(signals, count, "d")
    assert len(chosen) == len(set(chosen)) == count
    assert set(chosen) <= set(signals.candidates)
    assert chosen == sorted(chosen)


def test_random_depends_on_the_text_and_its_own_seed_alone():
    first, other = synthetic_signals(seed=1), synthetic_signals(seed=2)
    chosen = make_selector("random").select(first, 9, "d")
    torch.manual_seed(99)
    assert make_selector("random").select(first, 9, "d") == chosen
    assert make_selector("random").select(other, 9, "d") != chosen
    assert make_selector("random:seed=1").select(first, 9, "d") != chosen


def test_entropy_and_its_opposite():
    signals = synthetic_signals(["entropy", "entropy(align=next)"])
    inside = signals.entropy[signals.candidates.start : signals.candidates.stop]
    ascending = [signals.candidates.start + place for place in inside.argsort().tolist()]
    assert make_selector("entropy").select(signals, 5, "d") == sorted(ascending[-5:])
    assert make_selector("low-entropy").select(signals, 5, "d") == sorted(ascending[:5])
    assert make_selector("entropy-next").needs == ("entropy(align=next)",)
    assert make_selector("entropy:k=none").needs == ("entropy(k=full)",)
    with pytest.raises(Refused, match="k is 0; it must be a whole number of at least 1, or none"):
        make_selector("entropy:k=0")
    for k in (True, 2.5, "4", -1):
        with pytest.raises(Refused, match=f"k is {k}; it must be a whole number"):
            Entropy(k)
    assert Entropy(numpy.int64(64)) == Entropy(64)
    assert selector_name(Entropy(torch.tensor(64))) == "entropy:k=64"


@pytest.mark.parametrize("shape", [(96,), (1, 96), (1, 1, 95), (1, 1, 1, 96), (2, 1, 96), (1, 4, 96), (0, 1, 96), ()])
def test_scores_of_another_shape(shape):
    @dataclass(frozen=True)
    class Odd:
        needs = ()

        def score(self, signals):
            return torch.zeros(shape)

    with pytest.raises(
        UserError,
        match=r"Odd returned scores of shape .*; they must be a tensor \[3 layers or 1, 2 KV heads or 1, 96 tokens\]",
    ):
        make_selector(Odd()).select(synthetic_signals(), 1, "d")


@pytest.mark.parametrize("answer", [None, 3, [1.0] * 96, numpy.zeros((1, 1, 96))])
def test_scores_that_are_no_tensor(answer):
    class Odd:
        needs = ()

        def score(self, signals):
            return answer

    with pytest.raises(UserError, match="Odd returned .*; they must be a tensor") as caught:
        make_selector(Odd()).select(synthetic_signals(), 1, "d")
    assert "\n" not in str(caught.value)


# What a selector is given


EDITS = {
    "torch": lambda one: one.zero_(),
    "numpy": lambda one: one.numpy().fill(0),
    "slice": lambda one: one[..., -1:].neg_(),
    "resize": lambda one: one.unsqueeze_(0),
    "data": lambda one: one.data.mul_(2),
}


class Edits(Selector):
    """Changes what it is given in one of many ways."""

    needs = ("entropy", "keys", "window_attention")

    def __init__(self, where, edit):
        self.where, self.edit = where, edit

    def select(self, signals, count, document):
        value = signals.input_ids if self.where == "input_ids" else signals[self.where]
        self.edit(value[-1] if isinstance(value, list) else value)
        return [5]


@pytest.mark.parametrize("where", ["entropy", "keys", "window_attention", "input_ids"])
@pytest.mark.parametrize("edit", EDITS)
def test_signals_that_are_edited_in_place_fail_that_selector_and_reach_nobody_else(where, edit):
    signals, twin = synthetic_signals(Edits.needs), synthetic_signals(Edits.needs)
    choice = choose(Edits(where, EDITS[edit]), signals, 3, "d")
    assert choice.status == "failed"
    assert f"Edits changed the signal '{where}' in place; let it work on signals['{where}'].clone()" in choice.reason
    assert torch.equal(signals.input_ids, twin.input_ids)
    for name, value in twin.values_by_name.items():
        pairs = zip(signals[name], value) if isinstance(value, list) else [(signals[name], value)]
        assert all(torch.equal(one, other) for one, other in pairs)


def test_clones_may_be_edited_and_nan_is_no_edit():
    signals = synthetic_signals(Edits.needs)
    signals.entropy[3] = math.nan
    choice = choose(Edits("entropy", lambda one: one.clone().zero_()), signals, 3, "d")
    assert (choice.status, choice.chosen) == ("ok", [5])


def test_a_selector_sees_only_what_it_needs():
    """Else its answer would depend on which other selectors are in the study."""

    class Curious(Selector):
        needs = ("entropy",)

        def select(self, signals, count, document):
            return signals.self_information.argsort()[:count]

    choice = choose(Curious(), synthetic_signals(("entropy", "self_information")), 3, "d")
    assert choice.status == "failed"
    assert "'self_information' was not asked for; add it to the" in choice.reason


# Names


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("entropy", "entropy"),
        ("entropy:k=256", "entropy"),
        ("entropy:k=NONE", "entropy:k=none"),
        ("attention:kernel=5,window=8", "attention:window=8,kernel=5"),
        ("infokv:alpha=0.90", "infokv"),
        ("infokv:k=64,alpha=0.5", "infokv:alpha=0.5,k=64"),
        ("snapkv", "snapkv"),
        ("infokv.scorers.random:Random:seed=3", "random:seed=3"),
        ("forward_influence.builtin_selectors:Entropy:k=7", "entropy:k=7"),
        ("positions:at=12+5+9+5", "positions:at=5+9+12"),
        ("none", "none"),
    ],
)
def test_canonical_names(text, canonical):
    assert selector_name(make_selector(text)) == canonical
    assert selector_name(make_selector(canonical)) == canonical


def test_defaults_exist():
    assert list(make_selectors(DEFAULT_SELECTORS)) == ["attention", "entropy", "random", "none"]


def test_the_same_twice_counts_once():
    assert list(make_selectors(["entropy", Entropy, Entropy(), "entropy:k=256", "random"])) == ["entropy", "random"]


def test_one_selector_needs_no_list():
    for one in ("entropy", Entropy, Entropy(), TopScore(Entropy())):
        assert list(make_selectors(one)) == ["entropy"]


class Plain(Selector):
    def __init__(self, first=3):
        self.first = first

    def select(self, signals, count, document):
        return range(self.first, self.first + count)


class PlainScorer:
    needs = ("self_information",)

    def score(self, signals):
        return signals.self_information[None, None]


def test_plain_classes_are_fine_as_long_as_names_tell_them_apart():
    name = f"{Plain.__module__}:Plain"
    assert list(make_selectors([Plain, Plain()])) == [name]
    assert list(make_selectors([PlainScorer, PlainScorer()])) == [f"{PlainScorer.__module__}:PlainScorer"]
    with pytest.raises(UserError, match="Two different selectors are both called"):
        make_selectors([Plain(), Plain(4)])


def test_class_in_a_module_of_one_file(tmp_path, monkeypatch):
    (tmp_path / "ownidea.py").write_text(
        "from dataclasses import dataclass\n"
        "from forward_influence import Selector\n\n"
        "@dataclass(frozen=True)\n"
        "class First(Selector):\n"
        "    start: int = 4\n\n"
        "    def select(self, signals, count, document):\n"
        "        return range(self.start, self.start + count)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    made = make_selector("ownidea:First:start=7")
    assert list(made.select(None, 2, "d")) == [7, 8]
    assert selector_name(made) == "ownidea:First:start=7"
    with pytest.raises(Refused, match="has no parameter 'begin'; .*it has: start"):
        make_selector("ownidea:First:begin=7")
    with pytest.raises(Refused, match="'ownidea:Second' cannot be imported .*no attribute 'Second'"):
        make_selector("ownidea:Second")


def test_module_that_does_not_compile(tmp_path, monkeypatch):
    (tmp_path / "brokenidea.py").write_text("class First:\n    def select(")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises((UserError, Refused), match=r"'brokenidea:First' cannot be .* \(SyntaxError: .*brokenidea.py"):
        make_selector("brokenidea:First")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("entropyy", "There is no selector 'entropyy'; did you mean 'entropy'?.*attention, .*infokv, "),
        ("entropyy:k=4", "There is no selector 'entropyy'; did you mean 'entropy'?"),
        ("snapk", "There is no selector 'snapk'; did you mean 'snapkv'?"),
        ("", "There is no selector ''"),
        ("entropy:q=4", r"entropy has no parameter 'q'; .*has: k"),
        ("entropy:k=four", "entropy:k=four: the value must be int or none"),
        ("entropy:four", "after the name come key=value pairs or a .json file, not 'four'"),
        ("no.such:Thing", "'no.such:Thing' cannot be imported"),
        ("infokv:alpha=2", "alpha is 2.0; it must be from 0"),
        ("positions", "write positions:at=5"),
        (3, "'int' is no selector: it has neither select"),
        (dict, "'dict' is no selector"),
        (lambda signals: signals, "'<lambda>' is no selector"),
    ],
)
def test_what_is_no_selector(given, sentence):
    with pytest.raises((UserError, Refused), match=sentence) as caught:
        make_selector(given)
    assert "\n" not in str(caught.value)


def test_constructors_that_fail():
    class Demanding(Selector):
        def __init__(self, size):
            pass

    with pytest.raises(UserError, match=r"'Demanding' cannot be made \(TypeError: .*'size'"):
        make_selector(Demanding)

    class Leaving(Selector):
        def __init__(self):
            raise SystemExit(3)

    with pytest.raises(UserError, match=r"'Leaving' cannot be made \(SystemExit: 3\)"):
        make_selector(Leaving)


@pytest.mark.parametrize(
    ("needs", "sentence"),
    [
        ("entropy", "are 'entropy'; write a tuple of signals"),
        (None, "are None; write a tuple"),
        (("entropi",), "There is no signal 'entropi'"),
        (("entropy(q=1)",), "has no parameter 'q'"),
    ],
)
def test_needs_are_checked_before_any_model_runs(needs, sentence):
    class Wanting(Selector):
        pass

    Wanting.needs = needs
    with pytest.raises((UserError, Refused), match=sentence):
        make_selector(Wanting())


def test_none_given():
    with pytest.raises(UserError, match="No selector was given; name one"):
        make_selectors([])


def test_registration_serves_both_registries():
    @register_selector("own-selector-of-this-test")
    class Own(Selector):
        """Mine."""

        def select(self, signals, count, document):
            return range(count)

    @register("own-scorer-of-this-test")
    @dataclass(frozen=True)
    class OwnScorer(Half):
        """Mine."""

    try:
        assert list(make_selectors([Own, "own-scorer-of-this-test"])) == [
            "own-selector-of-this-test",
            "own-scorer-of-this-test",
        ]
        with pytest.raises(Refused, match="'entropy' is taken by forward_influence.builtin_selectors:Entropy"):
            register_selector("entropy")(Own)
    finally:
        del SELECTORS._classes["own-selector-of-this-test"], SCORERS._classes["own-scorer-of-this-test"]


# Explicit positions


def test_positions_from_a_file(tmp_path):
    file = tmp_path / "chosen.json"
    file.write_text(json.dumps({"a": [9, 5, 5], "b": []}))
    made = make_selector(f"positions:{file}")
    assert made.select(None, 3, "a") == [5, 9]
    assert made.select(None, 3, "b") == []
    assert sorted(made.listed()) == [5, 5, 9]
    missing = choose(made, synthetic_signals(), 3, "c")
    assert missing.status == "skipped"
    name = selector_name(made)
    assert name.startswith("positions:chosen.json@") and len(name.partition("@")[2]) == 8
    assert missing.reason == f"{name.removeprefix('positions:')} lists no positions for it"
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (moved / "chosen.json").write_text(json.dumps({"b": [], "a": [9, 5, 5]}))
    assert selector_name(make_selector(f"positions:{moved / 'chosen.json'}")) == name
    file.write_text(json.dumps({"a": [9, 5, 6], "b": []}))
    assert selector_name(make_selector(f"positions:{file}")) != name


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "cannot be read .No such file or directory.; check the path"),
        ("[1, 2]", "must be a JSON object of document id to a list of positions"),
        ('{"a": [1.5]}', "must be a JSON object"),
        ('{"a": [true]}', "must be a JSON object"),
        ('{"a": 3}', "must be a JSON object"),
        ('{"a": [1', "is not JSON"),
    ],
)
def test_position_files_that_are_none(tmp_path, text, sentence):
    file = tmp_path / "chosen.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=sentence):
        make_selector(f"positions:{file}")


@pytest.mark.parametrize(
    "bad", ["5-9", "5+", "-5", "a", "5.5", "²", "5+²", "٣", "５", "1_0", "9" * 5000, 5.5, True, [5, 9]]
)
def test_position_lists_that_are_none(bad):
    with pytest.raises(UserError, match="is not a list of positions; write it like at=5"):
        Positions(at=bad)


@pytest.mark.parametrize("at", ["12+5+9", " 12 + 5+9 ", "012+5+9+5"])
def test_position_lists(at):
    assert Positions(at=at).select(None, 0, "d") == [5, 9, 12]
    assert Positions(at=numpy.int64(5)).select(None, 0, "d") == [5]
