"""Window scores and kept sets against the peers' own code (numbers in FI_SHARED/golden)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from infokv.attention import LayerFacts
from infokv.selection import kept_slots
from infokv.windows import WindowOptions, window_scores

pytestmark = pytest.mark.golden

GROUPS = ("snapkv_official", "pyramidkv_official", "fastkv_official")


def load(folder: Path):
    cases = json.loads((folder / "expected.json").read_text())["cases"]
    return cases, load_file(folder / "expected.safetensors"), load_file(folder / "inputs.safetensors")


def options_of(group: str, params: dict) -> WindowOptions:
    pool = {"avgpool": "avg", "maxpool": "max"}[params["pooling"]]
    common = {"rows": "sum", "pool": pool, "kernel": params["kernel_size"]}
    if group == "fastkv_official":
        return WindowOptions(heads="kv", group="sum", order="after", **common)
    if params.get("kv_cache_granularity") == "kv_head":
        return WindowOptions(heads="kv", group=params["gqa_score_agg"], order="before", **common)
    return WindowOptions(heads="query", **common)


def kept_of(group: str, case: dict, scores: torch.Tensor, n: int, window: int) -> torch.Tensor:
    region = torch.cat([scores, scores.new_zeros(scores.shape[0], window)], dim=-1)
    return kept_slots(region, case["kept_count"], recent=window)


@pytest.mark.parametrize("group", GROUPS)
def test_every_case(group, shared_folder):
    cases, expected, inputs = load(shared_folder / "golden" / group)
    compared = 0
    for case in cases:
        if not case["compressed"]:
            continue
        window, key = case["params"]["window_size"], case["inputs"]
        q, k = inputs[f"{key}/q"], inputs[f"{key}/k"]
        n, options = q.shape[2], options_of(group, case["params"])
        facts = LayerFacts(q.shape[-1] ** -0.5, None, None)
        for b in range(q.shape[0]):
            scores = window_scores(
                q[b, :, -window:], k[b], torch.arange(n - window, n), torch.arange(n), range(n - window), facts, options
            )
            torch.testing.assert_close(scores, expected[case["scores"]][b], rtol=1e-5, atol=1e-6)
            kept = kept_of(group, case, scores, n, window)
            ambiguous = {row["row"][1]: row for row in case["ambiguous_rows"] if row["row"][0] == b}
            for head, want in enumerate(expected[case["kept"]][b].tolist()):
                got, want = set(kept[head].tolist()), set(want)
                if head in ambiguous:
                    tied = set(ambiguous[head]["tied"])
                    assert got - tied == want - tied
                    assert len(got & tied) == ambiguous[head]["n_from_tied"]
                else:
                    assert got == want, (case["name"], head)
                compared += 1
    assert compared >= 16
