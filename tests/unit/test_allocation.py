"""How many tokens each layer keeps, against what must hold and against numbers of the peers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infokv import Budget, InfoKV, Schedule, SnapKV
from infokv.allocation import generated_count, layer_counts, layer_weights, weight_needs
from infokv.checks import synthetic_signals
from infokv.errors import Refused
from infokv.scorer import SCORERS, Scorer
from infokv.scorers.fastkv import FastKVOfficial
from infokv.scorers.full_cache import FullCache
from infokv.scorers.pyramidkv import PyramidKV, PyramidKVKvpress, PyramidKVOfficial
from infokv.scorers.rpc import RPC, RPCOfficial
from infokv.scorers.snapkv import SnapKVKvpress


@dataclass(frozen=True)
class Rules(Scorer):
    """Keeps some first and last tokens by rule."""

    first: int = 0
    last: int = 0

    @property
    def sinks(self):
        return self.first

    @property
    def recent(self):
        return self.last


budgets = st.one_of(
    st.integers(1, 2000).map(lambda n: {"tokens": n}),
    st.integers(1, 1000).map(lambda n: {"keep": f"{n / 1000:.3f}"}),
)


@given(
    st.integers(1, 3000), st.integers(1, 40), budgets, st.integers(0, 8), st.integers(0, 80),
    st.sampled_from(["uniform", "pyramid", "entropy"]), st.data(),
)  # fmt: skip
def test_our_totals_are_exact(n, layers, budget, sinks, recent, kind, data):
    weights = data.draw(st.lists(st.floats(0, 20), min_size=layers, max_size=layers))
    budget = Budget(**budget, layers=kind)
    counts = layer_counts(n, layers, budget, Rules(sinks, recent), weights)
    assert sum(counts) == layers * budget.resolve(n)
    assert all(1 <= count <= n for count in counts)
    assert min(counts) >= min(sinks + recent, budget.resolve(n))  # what is kept by rule fits everywhere


@given(st.integers(1, 3000), st.integers(1, 40), budgets, st.sampled_from(SCORERS.names()))
def test_no_layer_is_empty_or_too_full(n, layers, budget, name):
    counts = layer_counts(n, layers, Budget(**budget), SCORERS.get(name)())
    assert len(counts) == layers
    assert all(1 <= count <= n for count in counts)


@given(st.integers(1, 500), st.sampled_from(SCORERS.names()), st.integers(0, 50))
def test_a_budget_that_holds_everything_keeps_everything(n, name, more):
    scorer = SCORERS.get(name)()
    assert layer_counts(n, 5, Budget(tokens=n + more), scorer) == [n] * 5
    if scorer.allocation != "pyramid-official" or n > scorer.window:
        assert layer_counts(n, 5, Budget(keep=1), scorer) == [n] * 5


@given(st.integers(100, 3000), st.integers(2, 40), st.integers(1, 99), st.integers(1, 50))
def test_a_pyramid_falls_evenly(n, layers, percent, beta):
    scorer = PyramidKV(window=10, beta=beta)
    budget = Budget(keep=percent / 100)
    counts = layer_counts(n, layers, budget, scorer)
    mean = budget.resolve(n) - 10
    if mean <= 0:
        assert len(set(counts)) == 1
        return
    steps = [a - b for a, b in pairwise(counts)]
    assert max(steps) - min(steps) <= 2  # rounding of both ends
    first = min(n - 10, 2 * mean - mean / beta)
    assert counts[0] - 10 == pytest.approx(first, abs=1)
    assert counts[-1] - 10 == pytest.approx(2 * mean - first, abs=1)


def test_entropy_gives_layers_their_share():
    counts = layer_counts(1000, 4, Budget(tokens=110, layers="entropy"), Rules(0, 10), [1, 2, 3, 4])
    assert counts == [50, 90, 130, 170]  # 400 x weight / 10, plus 10 by rule
    # One layer is full, and one has the least that there is: the rest is shared as the weights say.
    counts = layer_counts(210, 4, Budget(tokens=110, layers="entropy"), Rules(0, 10), [0, 1, 1, 100])
    assert counts == [15, 108, 107, 210]
    assert layer_counts(1000, 3, Budget(tokens=50, layers="entropy"), Rules(), [0, 0, 0]) == [50] * 3
    assert layer_counts(100, 2, Budget(tokens=60, layers="entropy"), Rules(), [1, 0]) == [100, 20]


@pytest.mark.parametrize("weights", [None, [1.0], [1.0, float("nan")], [1.0, -1.0], [1.0, float("inf")]])
def test_unfit_weights_are_refused(weights):
    with pytest.raises(Refused, match=r"weight"):
        layer_counts(100, 2, Budget(tokens=60, layers="entropy"), Rules(), weights)


def test_the_budget_wins_over_the_scorer():
    assert len(set(layer_counts(1000, 3, Budget(tokens=200, layers="uniform"), PyramidKV()))) == 1
    assert len(set(layer_counts(1000, 3, Budget(tokens=200, layers="pyramid"), SnapKV()))) == 3
    assert layer_counts(1000, 2, Budget(tokens=200), InfoKV(layer_budget="entropy"), [1, 1]) == [200, 200]
    with pytest.raises(Refused, match="'cone'"):
        layer_counts(10, 2, Budget(tokens=3), type("Cone", (Rules,), {"allocation": "cone"})())


def test_presets_count_as_their_source():
    assert layer_counts(300, 3, Budget(keep=0.2), SnapKVKvpress()) == [59] * 3  # truncated float, not 60
    assert layer_counts(100, 2, Budget(keep="0.1"), SnapKVKvpress()) == [9] * 2
    assert layer_counts(2, 2, Budget(keep=0.1), SnapKVKvpress()) == [1] * 2
    assert layer_counts(300, 3, Budget(keep=0.2), PyramidKVKvpress()) == [60] * 3  # no pyramid: the window is larger
    assert layer_counts(300, 3, Budget(keep=0.75), PyramidKVKvpress()) == [236, 225, 214]
    assert layer_counts(4096, 32, Budget(keep=0.5), PyramidKVKvpress())[::31] == [3994, 102]
    official = PyramidKVOfficial(window=8)
    assert layer_counts(160, 4, Budget(tokens=48), official) == [86, 61, 36, 11]  # more than 4 x 48
    assert layer_counts(79, 4, Budget(tokens=48), official) == [48] * 4  # shorter than twice the rest
    assert layer_counts(47, 4, Budget(tokens=48), official) == [47] * 4
    assert layer_counts(157, 2, Budget(keep=0.3), FastKVOfficial()) == [47] * 2
    assert layer_counts(100, 2, Budget(keep="0.29"), FastKVOfficial()) == [28] * 2  # 28.999999999999996
    assert layer_counts(100, 2, Budget(tokens=5), FullCache()) == [100] * 2


@given(st.integers(1, 20), st.integers(1, 2000), st.integers(1, 1000))
def test_generated_tokens(cuts, every, thousandths):
    schedule = Schedule(every=every, keep=f"{thousandths / 1000:.3f}")
    assert generated_count(cuts, schedule, Budget(keep=1), RPC()) == cuts * every * thousandths // 1000
    assert generated_count(cuts, Schedule(every=every), Budget(keep=f"{thousandths / 1000:.3f}"), RPC()) == (
        cuts * every * thousandths // 1000
    )


@given(st.integers(1, 20), st.integers(1, 4096), st.integers(1, 64))
def test_the_code_of_rpc_counts_whole_periods(cuts, every, times):
    schedule = Schedule(every=every, keep=1 / times)
    assert generated_count(cuts, schedule, Budget(keep=1), RPCOfficial()) == cuts * (every // times)


def test_layer_weights_are_mean_entropy_terms():
    for scorer, tau in ((SnapKV(), 1.0), (InfoKV(tau=3.0, k=8), 3.0)):
        signals = synthetic_signals(weight_needs(scorer))
        entropy, evolution = (signals[name] for name in weight_needs(scorer))
        places = list(signals.candidates)
        wanted = [
            sum((float(evolution[layer, i]) + tau) * float(entropy[i]) for i in places) / len(places)
            for layer in range(signals.layers)
        ]
        assert torch.tensor(layer_weights(scorer, signals)) == pytest.approx(torch.tensor(wanted), rel=1e-5)
    assert weight_needs(InfoKV(k=8)) != weight_needs(SnapKV())
