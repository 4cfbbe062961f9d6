"""SnapKV, PyramidKV and FastKV against their authors' code: scores, counts, kept sets, propagated tokens."""

from __future__ import annotations

import pytest
import torch
from golden_cases import assert_same_set, layer_signals, load, names

from infokv import Budget
from infokv.allocation import layer_counts
from infokv.scorers.fastkv import FastKVOfficial, propagated_tokens
from infokv.scorers.pyramidkv import PyramidKVOfficial
from infokv.scorers.snapkv import SnapKVOfficial
from infokv.selection import kept_slots

pytestmark = pytest.mark.golden

POOLS = {"avgpool": "avg", "maxpool": "max"}
HEADS = {"query_head": "query", "kv_head": "kv"}


def preset(group: str, params: dict):
    """Scorer, layers, this layer, and budget of a case."""
    common = {"window": params["window_size"], "kernel": params["kernel_size"], "pool": POOLS[params["pooling"]]}
    budget = Budget(tokens=params["max_capacity_prompt"])
    if group == "snapkv_official":
        return SnapKVOfficial(**common), 1, 0, budget
    if group == "pyramidkv_official":
        heads = HEADS[params["kv_cache_granularity"]]
        scorer = PyramidKVOfficial(**common, beta=params["beta"], heads=heads, group=params["gqa_score_agg"])
        return scorer, params["num_hidden_layers"], params["layer_idx"], budget
    constant = params["eviction_mode"] == "constant"
    tsp = {"tsp_length": params["tsp_length"]} if constant else {"tsp_rate": params["tsp_rate"]}
    return FastKVOfficial(**common, **tsp), 1, 0, budget if constant else Budget(keep=params["retain_rate"])


CASES = [
    (group, name) for group in ("snapkv_official", "pyramidkv_official", "fastkv_official") for name in names(group)
]


@pytest.mark.parametrize(("group", "name"), CASES)
def test_scores_counts_and_kept_sets(group, name):
    case, expected, inputs = next(one for one in load(group) if one[0]["name"] == name)
    scorer, layers, layer, budget = preset(group, case["params"])
    queries, keys = inputs[f"{case['inputs']}/q"], inputs[f"{case['inputs']}/k"]
    n = queries.shape[2]
    count = layer_counts(n, layers, budget, scorer)[layer]
    assert count == case["kept_count"]
    for row in range(queries.shape[0]):
        signals = layer_signals(queries[row], keys[row], scorer.window, range(n - scorer.window))
        scores = scorer.score(signals)[0]
        assert scores.shape[0] == case["cache_heads"]
        if "scores" in case:
            torch.testing.assert_close(
                scores[:, : n - scorer.window], expected[case["scores"]][row], rtol=1e-5, atol=1e-6
            )
        kept = kept_slots(scores, count, recent=scorer.window)
        unclear = {one["row"][1]: one for one in case.get("ambiguous_rows", ()) if one["row"][0] == row}
        for head, want in enumerate(expected[case["kept"]][row].tolist()):
            assert_same_set(kept[head].tolist(), want, unclear.get(head), (name, row, head))


TSP = [name for group, name in CASES if group == "fastkv_official"]


@pytest.mark.parametrize("name", TSP)
def test_propagated_tokens(name):
    case, expected, inputs = next(one for one in load("fastkv_official") if one[0]["name"] == name)
    scorer = preset("fastkv_official", case["params"])[0]
    queries, keys = inputs[f"{case['inputs']}/q"], inputs[f"{case['inputs']}/k"]
    n = queries.shape[2]
    if case["tsp_length_used"] is not None:
        assert scorer.propagated(n) == min(n, case["tsp_length_used"])
    if "tsp_indices" not in case:
        return
    for row in range(queries.shape[0]):
        signals = layer_signals(queries[row], keys[row], scorer.window, range(n - scorer.window))
        scores = scorer.score(signals)[0]
        torch.testing.assert_close(
            scores.sum(0)[: n - scorer.window], expected[case["tsp_scores"]][row], rtol=1e-5, atol=1e-6
        )
        got = propagated_tokens(scores, scorer.propagated(n), scorer.window).tolist()
        assert got == sorted(got)
        unclear = {one["row"][0]: one for one in case["tsp_ambiguous_rows"]}
        assert_same_set(got, expected[case["tsp_indices"]][row].tolist(), unclear.get(row), name)


def test_nothing_is_left_out():
    assert len(CASES) >= 30
    assert sum("tsp_indices" in case for case, _, _ in load("fastkv_official")) >= 4
