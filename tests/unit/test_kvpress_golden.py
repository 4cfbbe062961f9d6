"""Whole models against kvpress: scores, counts, kept sets, and logits of the text that follows."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest
import torch
from golden_cases import FOLDERS, assert_same_set
from safetensors.torch import load_file

from infokv import Budget
from infokv.allocation import layer_counts
from infokv.forward import Head, forward_chunks
from infokv.prefill import prefill
from infokv.scorers.expected_attention import ExpectedAttention
from infokv.scorers.keydiff import KeyDiff
from infokv.scorers.knorm import KNorm
from infokv.scorers.lagkv import LagKV
from infokv.scorers.observed_attention import ObservedAttention
from infokv.scorers.pyramidkv import PyramidKVKvpress
from infokv.scorers.snapkv import SnapKVKvpress
from infokv.scorers.streaming_llm import StreamingLLM
from infokv.scorers.tova import TOVA
from infokv.selection import kept_slots
from infokv.store import TokenStore

pytestmark = pytest.mark.golden

#: Scorer of a press, and tolerances of its scores (None: its score is another number for the same order).
PRESSES = {
    "SnapKVPress": (lambda kw: SnapKVKvpress(kw["window_size"], kw["kernel_size"]), {"rtol": 5e-5, "atol": 5e-7}),
    "PyramidKVPress": (
        lambda kw: PyramidKVKvpress(kw["window_size"], kw["kernel_size"], beta=kw["beta"]),
        {"rtol": 5e-5, "atol": 5e-7},
    ),
    "ExpectedAttentionPress": (
        lambda kw: ExpectedAttention(**{{"n_future_positions": "n_future"}.get(k, k): v for k, v in kw.items()}),
        {"rtol": 1e-4, "atol": 1e-7},
    ),
    "KnormPress": (lambda kw: KNorm(), {"rtol": 1e-5, "atol": 1e-6}),
    "KeyDiffPress": (lambda kw: KeyDiff(), {"rtol": 0, "atol": 1e-5}),
    "LagKVPress": (lambda kw: LagKV(kw["n_sink"], kw["lag_size"], kw["cross_scoring"]), {"rtol": 1e-5, "atol": 1e-6}),
    "TOVAPress": (lambda kw: TOVA(), {"rtol": 1e-4, "atol": 1e-6}),
    "ObservedAttentionPress": (lambda kw: ObservedAttention(), {"rtol": 1e-4, "atol": 1e-6}),
    "StreamingLLMPress": (lambda kw: StreamingLLM(kw["n_sink"]), None),
}
COUNT_THEMSELVES = (SnapKVKvpress, PyramidKVKvpress)

FILES = {file.stem: file for folder in FOLDERS for file in sorted((folder / "kvpress" / "expected").glob("*.json"))}


class Peer:
    """One model, one prompt, and all that kvpress made of it."""

    def __init__(self, file: Path):
        from transformers import AutoModelForCausalLM

        folder = file.parents[1]
        self.meta = json.loads(file.read_text())
        self.expected = load_file(file.with_suffix(".safetensors"))
        self.model = AutoModelForCausalLM.from_pretrained(folder / self.meta["model"], dtype=torch.float32).eval()
        self.ids, self.continuation = (self._ids(folder, name) for name in ("ids", "continuation"))
        self.cases = [(case, *self._scorer(case)) for case in self.meta["cases"]]
        needs = sorted({need for _, scorer, _ in self.cases for need in scorer.needs})
        self.store, self.signals = prefill(self.model, self.ids, needs)

    def _ids(self, folder: Path, name: str) -> torch.Tensor:
        file, _, key = self.meta[name].partition(":")
        return load_file(folder / file)[key].reshape(1, -1)

    @staticmethod
    def _scorer(case: dict):
        make, tolerance = PRESSES[case["kvpress_class"]]
        return make(case["kwargs"]), tolerance

    def scores(self, scorer) -> torch.Tensor:
        candidates = range(scorer.sinks, self.signals.tokens - scorer.recent)
        scores = scorer.score(self.signals.with_candidates(candidates))
        return scores.expand(self.signals.layers, self.signals.kv_heads, -1)

    def logits_after(self, kept: list[torch.Tensor]) -> torch.Tensor:
        """Three forced tokens, one at a time, on what is kept of each layer."""
        total = self.signals.tokens + self.continuation.shape[1]
        store = TokenStore([layer.fork(1, total) for layer in self.store.layers], total)
        for layer, slots in zip(store.layers, kept, strict=True):
            layer.keep(slots[None])
        head = Head(self.model)
        return torch.cat(
            [
                head(states)[0]
                for _, states in forward_chunks(self.model, store, self.continuation, chunk_size=1, total_length=total)
            ]
        )


@pytest.fixture(scope="module", params=FILES)
def peer(request) -> Peer:
    return Peer(FILES[request.param])


def test_the_model_is_the_peers(peer):
    with torch.no_grad():
        logits = peer.model(peer.ids).logits[0]
    torch.testing.assert_close(logits, peer.expected["full/logits"], rtol=0, atol=1e-4)
    everything = [torch.arange(peer.signals.tokens)[None]] * peer.signals.layers
    torch.testing.assert_close(
        peer.logits_after(everything), peer.expected["full/continuation_logits"], rtol=0, atol=5e-4
    )


def test_scores(peer):
    for case, scorer, tolerance in peer.cases:
        if tolerance is None:
            continue
        compared = slice(scorer.sinks, peer.signals.tokens - scorer.recent)
        found, wanted = peer.scores(scorer)[..., compared], peer.expected[case["scores"]][..., compared]
        if isinstance(scorer, LagKV) and not scorer.cross:  # ranks, of which float64 swaps neighbours in a few places
            apart = (found - wanted).abs() * scorer.lag
            assert apart.max() <= 1 + 1e-4 and (apart > 0.5).float().mean() < 0.01, case["press"]
        else:
            torch.testing.assert_close(
                found, wanted, **tolerance, msg=lambda text, case=case: f"{case['press']}: {text}"
            )


def test_counts(peer):
    for case, scorer, _ in peer.cases:
        if isinstance(scorer, COUNT_THEMSELVES):
            budget = Budget(keep=1 - Decimal(str(case["compression_ratio"])))
            assert layer_counts(case["n"], peer.signals.layers, budget, scorer) == case["n_kept_per_layer"], case


def test_kept_sets_and_continuation(peer):
    matched = 0
    for case, scorer, _ in peer.cases:
        scores = peer.scores(scorer)
        unclear = {(row["layer"], row["kv_head"]): row for row in case["ambiguous_rows"]}
        kept = []
        for layer, name in enumerate(case["kept"]):
            slots = kept_slots(scores[layer], case["n_kept_per_layer"][layer], sinks=scorer.sinks, recent=scorer.recent)
            kept.append(slots)
            for head, want in enumerate(peer.expected[name].tolist()):
                what = (case["press"], case["compression_ratio"], layer, head)
                assert_same_set(slots[head].tolist(), want, unclear.get((layer, head)), what)
                matched += (layer, head) not in unclear
        if not case["continuation_valid_for_exact_compare"]:
            kept = [peer.expected[name].long() for name in case["kept"]]
        torch.testing.assert_close(
            peer.logits_after(kept), peer.expected[case["continuation_logits"]], rtol=0, atol=5e-4
        )
    assert matched > 100


def test_every_press_is_compared():
    assert {case["kvpress_class"] for file in FILES.values() for case in json.loads(file.read_text())["cases"]} == set(
        PRESSES
    )
