"""Which slots stay, and how many, against naive references."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infokv import Budget, Schedule
from infokv.errors import Refused
from infokv.selection import kept_slots


def naive(scores, count, sinks, recent):
    n = len(scores)
    if count >= n:
        return list(range(n))
    sinks = min(sinks, count)
    recent = min(recent, count - sinks)
    forced = {*range(sinks), *range(n - recent, n)}
    free = sorted((i for i in range(n) if i not in forced), key=lambda i: (-scores[i], i))
    return sorted([*forced, *free[: count - len(forced)]])


@given(
    st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=30),
    st.integers(1, 40),
    st.integers(0, 8),
    st.integers(0, 8),
)
def test_equals_the_naive_selection(scores, count, sinks, recent):
    got = kept_slots(torch.tensor([scores, scores[::-1]]), count, sinks=sinks, recent=recent)
    assert got[0].tolist() == naive(scores, count, sinks, recent)
    assert got[1].tolist() == naive(scores[::-1], count, sinks, recent)
    assert got.shape[1] == min(count, len(scores))


def test_never_empty_and_never_nan():
    with pytest.raises(Refused, match="keeps at least 1"):
        kept_slots(torch.zeros(1, 5), 0)
    with pytest.raises(Refused, match="NaN"):
        kept_slots(torch.tensor([[0.0, float("nan")]]), 1)


@given(st.integers(1, 5000), st.integers(1, 1000))
def test_a_share_is_exact_on_the_typed_decimal(n, thousandths):
    typed = f"0.{thousandths:03d}" if thousandths < 1000 else "1"
    expected = max(1, (n * Fraction(thousandths, 1000)).__floor__())
    assert Budget(keep=typed).resolve(n) == expected
    assert Budget(keep=float(typed)).resolve(n) == expected


def test_budgets_and_schedules_that_cannot_be():
    assert Budget(tokens=512).resolve(100) == 100
    assert Budget(tokens=5).resolve(100) == 5
    for bad in ({}, {"keep": 0.4, "tokens": 3}, {"keep": 0}, {"keep": 1.5}, {"keep": "x"}, {"tokens": 0},
                {"tokens": 2.5}, {"keep": 0.4, "layers": "cone"}):  # fmt: skip
        with pytest.raises(Refused):
            Budget(**bad)
    for bad in ({"every": 0}, {"recent": -1}, {"keep": 2}):
        with pytest.raises(Refused):
            Schedule(**bad)
