"""Restricted entropy against naive formulas, and at its edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infokv import restricted_entropy
from infokv.errors import Refused

INF = float("inf")


def naive(logits, k, renormalise):
    highest = max(logits)
    weights = [math.exp(z - highest) for z in logits]
    top = sorted(weights, reverse=True)[: k or len(weights)]
    total = sum(top) if renormalise else sum(weights)
    return -sum(w / total * math.log(w / total) for w in top if w > 0)


@given(
    st.lists(st.floats(-30, 30), min_size=1, max_size=40),
    st.none() | st.integers(1, 50),
    st.booleans(),
)
def test_equals_the_naive_formula(logits, k, renormalise):
    got = restricted_entropy(torch.tensor(logits), k, renormalise=renormalise).item()
    assert got == pytest.approx(naive(logits, k, renormalise), rel=1e-4, abs=1e-5)
    if renormalise:
        assert -1e-6 <= got <= math.log(min(k or len(logits), len(logits))) + 1e-5


def test_impossible_tokens_contribute_nothing():
    assert restricted_entropy(torch.tensor([0.0, -INF]), None).item() == 0
    assert restricted_entropy(torch.tensor([0.0, 0.0, -INF]), None).item() == pytest.approx(math.log(2))
    assert restricted_entropy(torch.tensor([0.0, 0.0, -INF, -INF]), 3).item() == pytest.approx(math.log(2))


def test_half_precision_is_computed_in_float32():
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)) * 4
    half = logits.to(torch.bfloat16)
    got = restricted_entropy(half, 256)
    assert got.dtype == torch.float32
    assert torch.equal(got, restricted_entropy(half.float(), 256))


def test_bits():
    logits = torch.zeros(8)
    assert restricted_entropy(logits, None, base="2").item() == pytest.approx(3)


@pytest.mark.parametrize(("k", "base"), [(0, "e"), (-3, "e"), (5, "10")])
def test_refusals(k, base):
    with pytest.raises(Refused):
        restricted_entropy(torch.zeros(8), k, base=base)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 700), k=st.integers(1, 40), rows=st.integers(1, 3), ties=st.booleans(), seed=st.integers(0, 99)
)
def test_top_values_are_those_of_a_sort(size, k, rows, ties, seed):
    from infokv.entropy import top_values

    values = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))
    values = values.round() if ties else values
    values[:, 0] = float("-inf")
    k = min(k, size)
    expected = values.sort(dim=-1, descending=True).values[:, :k]
    assert torch.equal(top_values(values, k).sort(dim=-1, descending=True).values, expected)
