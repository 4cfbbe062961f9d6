"""RPC against its authors' code, cut by cut: scores, counts, kept positions."""

from __future__ import annotations

import pytest
import torch
from golden_cases import assert_same_set, layer_signals, load, names

from infokv import Budget, Schedule
from infokv.allocation import generated_count
from infokv.scorers.rpc import RPC, RPCOfficial
from infokv.selection import kept_slots

pytestmark = pytest.mark.golden


def preset(params: dict) -> RPC:
    common = {
        "kernel": params["kernel_size"],
        "pool": {"avgpool": "avg", "maxpool": "max"}[params["pooling"]],
        "every": params["P"],
        "heads": {"all": "layer", "group": "kv"}[params["aggregation"]],
    }
    if params["selectors"] == "new":  # the newest query alone
        return RPC(window=1, **common)
    return RPCOfficial(window=params["R"], **common)


@pytest.mark.parametrize("name", names("rpc_official"))
def test_every_cut(name):
    case, expected, inputs = next(one for one in load("rpc_official") if one[0]["name"] == name)
    params, prompt = case["params"], case["prompt_len"]
    scorer, recent = preset(params), params["R"]
    queries, keys = inputs[f"{case['inputs']}/q"], inputs[f"{case['inputs']}/k"]
    rows, heads = keys.shape[:2]
    schedule = Schedule(every=params["P"], recent=recent, keep=1 / params["c"])
    held = torch.arange(0).expand(rows, heads, 0)
    assert case["compressions"]
    for event in case["compressions"]:
        now = event["abs_position_of_current_token"]
        fresh = torch.arange(int(held.max()) + 1 if held.numel() else 0, now + 1)
        held = torch.cat([held, fresh.expand(rows, heads, -1)], dim=-1)
        count = generated_count(event["num_comp_after"], schedule, Budget(keep=1), RPCOfficial())
        assert count == event["topk"]
        region = range(prompt, held.shape[-1] - recent)
        assert len(region) == event["region_len"]
        want_all = expected[event["kept_positions"]].long()
        for row in range(rows):
            places = held[row]
            stored = keys[row].gather(1, places[..., None].expand(-1, -1, keys.shape[-1]))
            asked = queries[row, :, now + 1 - scorer.window : now + 1]
            signals = layer_signals(asked, stored, scorer.window, region, places, now + 1)
            scores = scorer.score(signals)[0]
            torch.testing.assert_close(
                scores[:, region.start : region.stop], expected[event["scores"]][row], rtol=1e-5, atol=1e-6
            )
            kept = kept_slots(scores, prompt + count + recent, sinks=prompt, recent=recent).expand(heads, -1)
            unclear = {one["row"][1]: one for one in event["ambiguous_rows"] if one["row"][0] == row}
            for head in range(heads):
                want = [places[head].tolist().index(place) for place in want_all[row, head].tolist()]
                got, want = ([slot - prompt for slot in slots] for slots in (kept[head].tolist(), want))
                ambiguous = unclear.get(head if scores.shape[0] > 1 else 0)
                assert_same_set(got, want, ambiguous, (name, event["gen_index"]), "tied_region_slots")
            assert want_all.shape[-1] == event["cache_len_after"] == prompt + count + recent
        held = want_all
