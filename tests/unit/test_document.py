"""The numbers of a row against plain loops, and what a selector may answer."""

import math

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forward_influence.document import blank_row, choose, chunk_numbers
from forward_influence.errors import UserError
from forward_influence.kl import Comparison
from forward_influence.row_check import check_row
from forward_influence.rows import ROW_FIELDS, RunSpec, dumps_row, loads_row
from forward_influence.selectors import Selector
from infokv.checks import synthetic_signals
from infokv.errors import Refused

SPEC = RunSpec(model="m", dtype="float32", tokenizer="t", data="local", prefix=20, horizon=30, chunk=8)
INF = math.inf
SIGNALS = synthetic_signals(tokens=30)  # candidates are 4 to 13


def comparison(kl, nll, changed):
    """Row 1 of a comparison whose row 0 is something else."""
    return Comparison(
        torch.tensor([[7.0] * len(kl), kl], dtype=torch.float64),
        torch.tensor([[7.0] * len(nll), nll], dtype=torch.float64),
        torch.tensor([[True] * len(changed), changed]),
    )


def naive_chunks(kl, nll, changed, chunk):
    out = {name: [] for name in ("chunk_start", "chunk_count", "kl_mean", "delta_nll", "nll_count", "top1_changed")}
    start = 0
    while start < len(kl):
        offsets = [offset for offset in range(start, start + chunk) if offset < len(kl)]
        known = [nll[offset] for offset in offsets if not math.isnan(nll[offset])]
        out["chunk_start"].append(start)
        out["chunk_count"].append(len(offsets))
        out["kl_mean"].append(sum(kl[offset] for offset in offsets) / len(offsets))
        out["nll_count"].append(len(known))
        out["delta_nll"].append(sum(known) / len(known) if known else None)
        out["top1_changed"].append(sum(changed[offset] for offset in offsets) / len(offsets))
        start += chunk
    return out


positive = st.floats(0, 100) | st.just(INF)
change = st.floats(-50, 50) | st.just(math.nan) | st.just(INF)


@given(st.lists(st.tuples(positive, change, st.booleans()), min_size=1, max_size=40), st.integers(1, 45))
def test_chunk_numbers_equal_plain_loops(offsets, chunk):
    kl, nll, changed = (list(values) for values in zip(*offsets))
    found = chunk_numbers(comparison(kl, nll, changed), 1, chunk)
    assert found.pop("kl") == [float(f"{value:.6g}") for value in kl]
    expected = naive_chunks(kl, nll, changed, chunk)
    assert list(found) == list(expected)
    for name, values in expected.items():
        pairs = list(zip(found[name], values, strict=True))
        assert all((a is None) == (b is None) for a, b in pairs), name
        assert [a for a, _ in pairs if a is not None] == pytest.approx([b for _, b in pairs if b is not None], 1e-12)


def test_last_chunk_is_partial_and_the_last_token_unknown():
    found = chunk_numbers(
        comparison([1.0, 2, 3, 4, 6], [1.0, 1, 2, 4, math.nan], [True, False, True, True, True]), 1, 2
    )
    assert found["chunk_start"] == [0, 2, 4]
    assert found["chunk_count"] == [2, 2, 1]
    assert found["nll_count"] == [2, 2, 0]
    assert found["kl_mean"] == [1.5, 3.5, 6.0]
    assert found["delta_nll"] == [1.0, 3.0, None]
    assert found["top1_changed"] == [0.5, 1.0, 1.0]


def test_infinities_stay_and_survive_the_file():
    found = chunk_numbers(comparison([1.0, INF, 2.0], [INF, 1.0, -INF], [True] * 3), 1, 2)
    assert found["kl_mean"] == [INF, 2.0]
    assert found["delta_nll"] == [INF, -INF]
    row = blank_row(SPEC, "d", "sha", 50, "random", "ok", None) | found
    row |= {"removed": [3], "n_removed": 1, "removed_fraction": 0.05, "kept_fraction": 0.95}
    check_row(row, SPEC.hash())
    assert loads_row(dumps_row(row)) == row


def test_infinities_of_both_signs_have_no_mean():
    with pytest.raises(UserError, match=r"\+inf and -inf at offsets of the chunk from 2; it has no mean"):
        chunk_numbers(comparison([1.0] * 4, [0.0, 0.0, INF, -INF], [True] * 4), 1, 2)


def test_blank_rows_fit_the_schema():
    for status, reason in (("skipped", "short"), ("failed", "why")):
        row = blank_row(SPEC, "d", "sha", 50, "random", status, reason)
        assert tuple(row) == ROW_FIELDS
        check_row(row, SPEC.hash())
        assert (row["status"], row["reason"], row["n_tokens"], row["mode"]) == (status, reason, 50, "remove")


# What a selector may answer


NAME = f"{__name__}:Answers"


class Answers(Selector):
    def __init__(self, answer):
        self.answer = answer

    def select(self, signals, count, document):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    "answer",
    [
        [9, 5],
        (5, 9),
        {9, 5},
        torch.tensor([9, 5]),
        numpy.array([5, 9]),
        [torch.tensor(5), numpy.int64(9)],
        (place for place in (9, 5)),
    ],
)
def test_positions_in_many_dresses(answer):
    choice = choose(Answers(answer), SIGNALS, 2, "d")
    assert choice.status == "ok"
    assert choice.chosen == [5, 9]
    assert all(type(place) is int for place in choice.chosen)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([30], f"{NAME} gave position 30, which is outside the prefix (0 to 29)"),
        ([-1], f"{NAME} gave position -1, which is outside the prefix (0 to 29)"),
        ([2.0], f"{NAME} gave 2.0 among its positions; they must be whole numbers"),
        ([True], f"{NAME} gave True among its positions"),
        (["5"], f"{NAME} gave '5' among its positions"),
        (torch.ones(30, dtype=torch.bool), f"{NAME} gave tensor(True) among its positions"),
        (numpy.zeros(30, dtype=bool), f"{NAME} gave np.False_ among its positions"),
        (torch.ones(1, 30, dtype=torch.long), f"{NAME} gave tensor([[1, 1"),
        (torch.tensor(5), f"{NAME} gave tensor(5); select returns a flat collection of positions"),
        (5, f"{NAME} gave 5; select returns a flat collection of positions, such as [3, 4]."),
        (None, f"{NAME} gave None; select returns a flat collection"),
        ([5, 9, 5], f"{NAME} gave position 5 twice"),
        ([5, 9, 7], f"{NAME} gave 3 positions where at most 2 were asked for"),
        ([5, 3], f"{NAME} gave position 3, which is no candidate; choose among signals.candidates (4 to 13)"),
        ([14], f"{NAME} gave position 14, which is no candidate"),
        (KeyError("x"), "KeyError: 'x'"),
        (ZeroDivisionError(), "ZeroDivisionError"),
        (SystemExit("bye"), "SystemExit: bye"),
        (ValueError("two\n  lines"), "ValueError: two lines"),
        (UserError("A score is NaN."), "A score is NaN."),
        (Refused("Not asked for."), "Not asked for."),
    ],
)
def test_answers_that_fail_alone(answer, reason):
    choice = choose(Answers(answer), SIGNALS, 2, "d")
    assert choice.status == "failed"
    assert "\n" not in choice.reason
    assert choice.chosen is None
    assert choice.reason.startswith(reason)


def test_debug_lets_the_error_through():
    with pytest.raises(KeyError):
        choose(Answers(KeyError("x")), SIGNALS, 2, "d", debug=True)


def test_interrupts_are_not_failures():
    with pytest.raises(KeyboardInterrupt):
        choose(InterruptedSelector(), SIGNALS, 2, "d")


def test_explicit_positions_may_be_any_but_all():
    answer = Answers([0, 29, 5, 6])
    answer.explicit = True
    assert choose(answer, SIGNALS, 2, "d").chosen == [0, 5, 6, 29]
    answer.answer = range(30)
    assert choose(answer, SIGNALS, 2, "d").reason == f"{NAME} removes all 30 positions of the prefix; one must stay."


class InterruptedSelector(Selector):
    def select(self, signals, count, document):
        raise KeyboardInterrupt
