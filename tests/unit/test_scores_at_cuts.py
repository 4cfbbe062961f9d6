"""Scores of what earlier cuts have left, and of R-KV, against naive references on plain numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from infokv import RKV, RPC, InfoKV, ObservedAttention, Random, SnapKV, StreamingLLM
from infokv.checks import synthetic_signals
from infokv.errors import Refused
from infokv.kernels import LayerFacts
from infokv.scorer import SCORERS
from infokv.scorers.rpc import RPCOfficial
from infokv.signals import signal

#: What an earlier cut has left of 80 tokens: positions, per KV head, with gaps; ascending.
KEPT = torch.stack(
    [
        torch.cat([torch.arange(5), torch.arange(9, 40, 3), torch.arange(50, 80)]),
        torch.cat([torch.arange(5), torch.arange(12, 43, 3), torch.arange(50, 80)]),
    ]
)
SEEN = 80


def cut(scorer, *, window=None, heads: int = 2, query_heads: int = 4, capped=None):
    """Signals of one layer of which KEPT is left; keys of a size at which weights differ."""
    made = synthetic_signals(
        scorer.needs, tokens=KEPT.shape[1], layers=1, kv_heads=heads, query_heads=query_heads, head_dim=8
    )
    return replace(
        made,
        positions=KEPT[:heads],
        seen=SEEN,
        candidates=range(5, KEPT.shape[1] - scorer.recent),
        facts=(LayerFacts(0.9, capped, window),),
    )


def naive_weights(signals, query_head, region_only):
    """Softmax weights ``[queries][slots]`` of one query head, from plain numbers."""
    name = next(name for name in signals.values_by_name if name.startswith("queries"))
    queries = signals[name][0][query_head].double()
    head = query_head // (signals.query_heads // signals.kv_heads)
    keys, facts = signals.keys[0][head].double(), signals.facts[0]
    out = []
    for row, query in enumerate(queries):
        at = signals.seen - len(queries) + row
        terms = {}
        for slot, place in enumerate(signals.positions[head].tolist()):
            if place > at or (facts.window and at - place >= facts.window):
                continue
            if region_only and slot not in signals.candidates:
                continue
            logit = sum(float(a) * float(b) for a, b in zip(query, keys[slot])) * facts.scaling
            if facts.softcap:
                logit = facts.softcap * math.tanh(logit / facts.softcap)
            terms[slot] = math.exp(logit)
        total = sum(terms.values()) or 1  # a window that hides all of the region
        out.append([terms.get(slot, 0.0) / total for slot in range(signals.tokens)])
    return out


def naive_attention(signals, kernel, *, region_only, shared, rows=None):
    """Sum over queries, mean over heads, pool over neighbours of the region: ``[heads][candidates]``."""
    group = signals.query_heads // signals.kv_heads
    sets = [range(signals.query_heads)] if shared else [
        range(head * group, (head + 1) * group) for head in range(signals.kv_heads)
    ]  # fmt: skip
    out = []
    for members in sets:
        mass = {slot: 0.0 for slot in signals.candidates}
        for member in members:
            weights = naive_weights(signals, member, region_only)
            for row in range(len(weights)) if rows is None else rows:
                for slot in mass:
                    mass[slot] += weights[row][slot] / len(members)
        half = kernel // 2
        out.append([sum(mass.get(slot + step, 0.0) for step in range(-half, half + 1)) / kernel for slot in mass])
    return torch.tensor(out, dtype=torch.float64)


def inside(scores, signals):
    return scores[0][:, signals.candidates.start : signals.candidates.stop].double()


@pytest.mark.parametrize("window", [None, 60, 8])
@pytest.mark.parametrize("capped", [None, 2.0])
def test_rpc(window, capped):
    for scorer, rows in ((RPC(window=6), None), (RPCOfficial(window=6), [1, 2, 3, 4, 5, 5])):
        shared = cut(scorer, heads=1, window=window, capped=capped)
        found = inside(scorer.score(shared), shared)
        want = naive_attention(shared, 7, region_only=True, shared=True, rows=rows)
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-7)
        scorer = replace(scorer, heads="kv")
        apart = cut(scorer, window=window, capped=capped)
        found = inside(scorer.score(apart), apart)
        torch.testing.assert_close(
            found, naive_attention(apart, 7, region_only=True, shared=False, rows=rows), rtol=1e-4, atol=1e-7
        )


def test_snapkv_sees_by_position():
    scorer = SnapKV(window=6, kernel=5)
    signals = cut(scorer, window=60)
    want = naive_attention(signals, 5, region_only=False, shared=False)
    torch.testing.assert_close(
        inside(scorer.score(signals), signals), want / want.sum(-1, keepdim=True), rtol=1e-4, atol=1e-7
    )


def naive_infokv(scorer, signals, *, region_only, shared):
    attention = naive_attention(signals, scorer.kernel, region_only=region_only, shared=shared)
    attention /= attention.sum(-1, keepdim=True)
    entropy, evolution = (signals[name].double() for name in scorer.entropy_needs)
    term = {slot: math.exp((evolution[0, slot] + scorer.tau) * entropy[slot]) for slot in signals.candidates}
    flat = torch.tensor([term[slot] / sum(term.values()) for slot in signals.candidates], dtype=torch.float64)
    return scorer.alpha * attention + (1 - scorer.alpha) * flat


def test_infokv_while_decoding():
    scorer = InfoKV(decode_window=6, decode_kernel=5, alpha=0.6)
    decoding = scorer.for_decoding()
    assert decoding.recent == scorer.schedule.recent == 6
    signals = cut(decoding, heads=1)
    want = naive_infokv(decoding, signals, region_only=True, shared=True)
    torch.testing.assert_close(inside(decoding.score(signals), signals), want, rtol=1e-4, atol=1e-7)
    # What was chosen stays chosen.
    chosen = replace(scorer, heads="kv", attn_support="all").for_decoding()
    signals = cut(chosen)
    want = naive_infokv(chosen, signals, region_only=False, shared=False)
    torch.testing.assert_close(inside(chosen.score(signals), signals), want, rtol=1e-4, atol=1e-7)


def test_infokv_without_entropy_is_rpc_while_decoding():
    scorer = InfoKV(alpha=1.0).for_decoding()
    signals = cut(scorer, heads=1)
    attention = RPC().score(signals)
    assert scorer.recent == RPC().recent and InfoKV().schedule == RPC().schedule
    torch.testing.assert_close(scorer.score(signals), attention / attention.sum(-1, keepdim=True))


def test_only_infokv_has_another_variant_for_decoding():
    for name in SCORERS.names():
        scorer = SCORERS.get(name)()
        assert (scorer.for_decoding() == scorer) == (name != "infokv")


def test_scores_by_position():
    assert torch.equal(StreamingLLM().score(cut(StreamingLLM()))[0], KEPT.float())
    signals = cut(ObservedAttention())
    mass = signals["attention_mass"]
    for head in range(2):
        for slot, place in enumerate(KEPT[head].tolist()):
            mean = (mass[0, 2 * head, slot] + mass[0, 2 * head + 1, slot]) / 2 / (SEEN - place)
            assert ObservedAttention().score(signals)[0, head, slot].item() == pytest.approx(mean.item(), rel=1e-5)
    narrow = cut(ObservedAttention(), window=10)
    wide = ObservedAttention().score(signals) * (SEEN - KEPT) / (SEEN - KEPT).clamp(max=10)
    torch.testing.assert_close(ObservedAttention().score(narrow), wide)  # ten queries saw each old token
    drawn = Random().score(cut(Random()))[0]
    same = {int(KEPT[0][i]): drawn[0, i].item() for i in range(KEPT.shape[1])}
    assert all(same[int(KEPT[1][i])] == drawn[1, i].item() for i in range(KEPT.shape[1]) if int(KEPT[1][i]) in same)
    assert len(set(drawn[0].tolist())) == KEPT.shape[1]


def naive_rkv(scorer, signals):
    """Importance by the largest logit of a group; redundancy by cosines, the last similar one left out."""
    name = signal("queries", last=scorer.window)
    n, kv_heads = signals.tokens, signals.kv_heads
    group = signals.query_heads // kv_heads
    out = torch.zeros(signals.layers, kv_heads, n, dtype=torch.float64)
    for layer in range(signals.layers):
        for head in range(kv_heads):
            keys = signals.keys[layer][head].double()
            queries = signals[name][layer][head * group : (head + 1) * group].double()
            logits = torch.stack([query @ keys.T * signals.facts[layer].scaling for query in queries]).amax(dim=0)
            rows = [row[signals.candidates.start : signals.candidates.stop].softmax(-1) for row in logits]
            mean = sum(rows) / len(rows)
            half = scorer.kernel // 2
            pooled = [max(mean[max(0, i - half) : i + half + 1]) for i in range(len(mean))]
            cosine = torch.zeros(n, n, dtype=torch.float64)
            for i in range(n):
                for j in range(n):
                    if i != j:
                        cosine[i, j] = keys[i] @ keys[j] / keys[i].norm() / keys[j].norm()
            for i in range(n):
                similar = [j for j in range(n) if cosine[i, j] > 0.5]
                cosine[i, similar[-1] if similar else 0] = 0
            redundant = cosine.mean(dim=0).softmax(-1)
            for index, slot in enumerate(signals.candidates):
                out[layer, head, slot] = scorer.weight * pooled[index] - (1 - scorer.weight) * redundant[slot]
    return out


@pytest.mark.parametrize("weight", [0.07, 0.8])
def test_rkv(weight):
    scorer = RKV(weight=weight, window=8, kernel=7)
    signals = synthetic_signals(scorer.needs, tokens=40, layers=2)
    signals = replace(signals, candidates=range(2, 32))
    torch.testing.assert_close(scorer.score(signals).double(), naive_rkv(scorer, signals), rtol=1e-4, atol=1e-7)


def test_rkv_in_blocks(monkeypatch):
    scorer = RKV()
    signals = synthetic_signals(scorer.needs, tokens=90)
    whole = scorer.score(signals)
    monkeypatch.setattr("infokv.scorers.rkv._BLOCK", 7)
    torch.testing.assert_close(scorer.score(signals), whole)


@pytest.mark.parametrize(
    "bad",
    [
        "infokv:alpha=1.1", "infokv:tau=-1", "infokv:k=0", "infokv:align=last", "infokv:temperature=0",
        "infokv:window=0", "infokv:kernel=4", "infokv:log_base=10", "infokv:attn_norm=l2",
        "infokv:attn_support=some", "infokv:entropy_support=none", "infokv:pool_target=all", "infokv:heads=each",
        "infokv:layer_budget=pyramid", "infokv:every=0", "infokv:decode_window=0", "infokv:decode_kernel=2",
        "snapkv:window=0", "snapkv:kernel=2", "snapkv:pool=min", "snapkv:heads=all", "snapkv:norm=l2",
        "pyramidkv:beta=0", "pyramidkv:kernel=2", "fastkv:window=0", "fastkv:pool=min", "fastkv:propagate=-1",
        "fastkv:tsp_rate=0", "fastkv:tsp_length=0", "rpc:pool=min", "rpc:heads=query", "rpc:window=0",
        "rpc:every=0", "rkv:every=0", "rkv:weight=2", "rkv:window=0", "rkv:kernel=2",
        "expected-attention:n_future=0", "expected-attention:n_sink=-1", "expected-attention:epsilon=-1",
    ],
)  # fmt: skip
def test_unfit_parameters_are_refused_by_name(bad):
    name, _, value = bad.partition(":")[2].partition("=")
    with pytest.raises(Refused, match=rf"{name}\b.*{value}"):
        SCORERS.create(bad)
