"""compress(): what is cut while a text grows, and when."""

from __future__ import annotations

import pytest
import torch
from compress_runs import PROMPT, error, flags, run
from tiny_models import build, masked_logits, random_ids

from infokv import RPC, TOVA, Budget, InfoKV, KNorm, Schedule, SnapKV, StreamingLLM, compress
from infokv.calls import cache_argument


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "qwen3"])
@pytest.mark.parametrize("scorer", [RPC(window=3, kernel=3), InfoKV(window=6, decode_window=3, decode_kernel=3),
                                    SnapKV(window=3, kernel=3), TOVA(), StreamingLLM()],
                         ids=lambda one: type(one).__name__)  # fmt: skip
@pytest.mark.parametrize("protect", [True, False])
def test_cuts_while_generating(name, scorer, protect):
    model, ids = build(name), random_ids(70)
    schedule = Schedule(every=8, recent=3, keep=0.5, protect_prompt=protect)
    cuts = []
    with compress(model, scorer, Budget(keep=0.5), decode=schedule) as handle, torch.no_grad():
        cache, key, logits = None, cache_argument(model), []
        for start, stop in [(0, 30), *((one, one + 1) for one in range(30, 66))]:
            out = model(ids[:, start:stop], **{key: cache})
            cache = out[key]
            logits.append(out.logits)
            if handle.store.cuts == len(cuts):
                cuts.append((handle.seen[0], flags(handle.kept, handle.seen[0])))
                facts = handle.store.recorder.facts
                full = [count for count, one in zip(handle.stored, facts) if one.window is None]
                generated = 4 * handle.store.cuts + 3 if handle.store.cuts else 0
                assert full == [15 + generated] * len(full)
    assert [start for start, _ in cuts] == [30, 41, 49, 57, 65]
    expected = masked_logits(model, ids[:, :66], cuts)
    assert error(torch.cat(logits, dim=1)[0], expected) < 2e-5


def test_a_call_that_crosses_cuts_equals_single_steps():
    model, ids = build("llama"), random_ids(70)
    schedule = Schedule(every=8, recent=3)
    with compress(model, InfoKV(window=6, decode_window=3), Budget(keep=0.5), decode=schedule) as handle:
        steps = run(model, ids, (30, *range(31, 70)))
        kept = handle.kept
        at_once = run(model, ids, (30, 34))
        assert torch.allclose(steps, at_once, atol=1e-4)
        assert all(torch.equal(one, other) for one, other in zip(kept, handle.kept))


def test_a_number_of_tokens_on_a_schedule_cuts_the_layer_to_it():
    model, ids = build("llama"), random_ids(70)
    schedule = Schedule(every=4, recent=2, protect_prompt=False)
    with compress(model, TOVA(), Budget(tokens=12), decode=schedule) as handle:
        run(model, ids[:, :46], (30,))
        assert handle.store.cuts == 3 and handle.stored == [14] * 3  # cut at 44 tokens, two since
        run(model, ids[:, :5], ())
        assert handle.stored == [5] * 3


@pytest.mark.parametrize(("arch", "scorer", "schedule", "budget"), [
    ("llama", SnapKV(window=16, kernel=3), Schedule(every=4, recent=2, protect_prompt=False), Budget(tokens=4)),
    ("mistral", SnapKV(window=6, kernel=3), Schedule(every=2, recent=1, keep=0.25), Budget(keep=0.4)),
])  # fmt: skip
def test_queries_that_see_nothing_any_more_have_no_say(arch, scorer, schedule, budget):
    model, ids = build(arch), random_ids(70)
    with compress(model, scorer, budget, decode=schedule) as handle:
        run(model, ids, (30, *range(31, 70)))
        assert handle.store.cuts > 5


class Evens(KNorm):
    """Even positions first."""

    needs = ()

    def score(self, signals):
        return (signals.positions % 2 == 0).float()[None]


def test_at_least_one_token_stays_in_a_window_that_has_moved_on():
    model, ids = build("mistral"), random_ids(60)
    scorer = Evens()
    with compress(model, scorer, Budget(tokens=5), decode=Schedule(every=9, recent=0, keep=0.1)) as handle:
        run(model, ids, (20, *range(21, 60)))
        assert handle.store.cuts == 4 and min(handle.stored) >= 1


def test_logits_in_another_order_are_not_taken_for_those_of_the_tokens():
    model, ids = build("llama"), random_ids(60)
    key, seen = cache_argument(model), []
    scorer = InfoKV(window=6, decode_window=3)
    with compress(model, scorer, Budget(keep=1), decode=Schedule(every=100, recent=1)) as handle:
        for extra in ({}, {"logits_to_keep": torch.tensor([3, 2, 1, 0])}, {"logits_to_keep": 1}):
            cache = model(ids[:, :PROMPT])[key]
            model(ids[:, PROMPT : PROMPT + 4], **{key: cache}, **extra)
            model.model(ids[:, PROMPT + 4 : PROMPT + 5], **{key: cache})
            model(random_ids(9, seed=5), use_cache=False)
            handle.store.read_logits(None)
            recorder = handle.store.recorder
            told = recorder.of_layer(0, 0, handle.store.layers[0], candidates=range(4))
            seen.append(told["entropy"])
    for other in seen[1:]:
        torch.testing.assert_close(seen[0], other, rtol=1e-4, atol=1e-5)
