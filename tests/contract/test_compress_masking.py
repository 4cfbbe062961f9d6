"""compress(): a cut cache equals a full one that is masked, and nothing cut is nothing changed."""

from __future__ import annotations

import pytest
import torch
from compress_runs import LENGTH, PROMPT, SCORERS, error, flags, run
from tiny_models import ARCHITECTURES, build, masked_logits, random_ids
from transformers import StoppingCriteriaList

from infokv import Budget, FastKV, FullCache, InfoKV, Schedule, StreamingLLM, compress
from infokv.calls import cache_argument
from infokv.errors import Refused

#: A RoPE that depends on the length must know it; direct calls do not.
FIXED_ROPE = [name for name in ARCHITECTURES if name != "llama_dynamic"]


@pytest.mark.parametrize("kind", SCORERS)
@pytest.mark.parametrize("name", FIXED_ROPE)
def test_evicting_equals_masking(name, kind):
    model, ids = build(name), random_ids(LENGTH)
    with compress(model, SCORERS[kind], Budget(keep=0.4), prefill_chunk=16) as handle:
        run(model, ids[:, :PROMPT], ())
        kept = handle.kept
        logits = run(model, ids, (PROMPT, PROMPT + 1, PROMPT + 2, PROMPT + 7))  # one token, and many
    if all(one.shape[-1] == PROMPT for one in kept):
        pytest.fail("nothing was cut, so nothing is tested")
    assert error(logits[0], masked_logits(model, ids, [(PROMPT, flags(kept, PROMPT))])) < 2e-5
    if kind == "per head" and name not in ("mistral", "gemma3"):  # a short window, a single head
        assert any(not torch.equal(one[:, :1].expand_as(one), one) for one in kept)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_generate_equals_masking(name):
    model, ids = build(name), random_ids(PROMPT)
    with compress(model, SCORERS["per head"], Budget(keep=0.4)) as handle:
        seen = []

        def look(input_ids, scores, **others):
            seen.append(handle.kept)
            return torch.zeros(1, dtype=torch.bool)

        out = model.generate(
            ids, max_new_tokens=9, min_new_tokens=9, do_sample=False, output_logits=True, return_dict_in_generate=True,
            stopping_criteria=StoppingCriteriaList([look]),
        )  # fmt: skip
        kept = seen[0]
        assert handle.seen == [PROMPT + 8] * model.config.num_hidden_layers
    text = out.sequences
    expected = masked_logits(model, text, [(PROMPT, flags(kept, PROMPT))])
    assert error(torch.cat(out.logits), expected[PROMPT - 1 : -1]) < 2e-5


def test_tokens_that_go_on():
    model, ids = build("llama"), random_ids(LENGTH)
    scorer = FastKV(window=6, kernel=3, propagate=0, tsp_length=20)
    with compress(model, scorer, Budget(tokens=12)) as handle, torch.no_grad():
        out = model(ids[:, :PROMPT])
        assert out.logits.shape[1] == 1
        assert handle.stored == [12, 12, 12]
        kept = handle.kept
        name = cache_argument(model)
        out = [out, model(ids[:, PROMPT:], **{name: out[name]})]
    with compress(model, scorer, Budget(keep=1)) as handle, torch.no_grad():
        model(ids[:, :PROMPT])
        assert handle.stored == [PROMPT, 20, 20]
        gone_on = flags(handle.kept, PROMPT)
    assert torch.equal(gone_on[1], gone_on[2])
    expected = masked_logits(model, ids, [(0, gone_on), (PROMPT, flags(kept, PROMPT))])
    assert error(torch.cat([one.logits for one in out], dim=1)[0], expected[PROMPT - 1 :]) < 2e-5
    with compress(model, scorer, Budget(tokens=12)), pytest.raises(Refused, match="one whole prompt"):
        model(ids.expand(2, -1))


def test_longrope_stays_right_where_the_model_itself_starts_anew():
    """Phi-3 drops its cache where its frequencies change; here they are those of the whole text from the start."""
    model, ids = build("phi3_longrope"), random_ids(28)
    with compress(model, StreamingLLM(), Budget(tokens=10)) as handle:
        out = model.generate(
            ids, max_new_tokens=12, min_new_tokens=12, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        kept = [one[..., : -handle.seen[0] + 28] for one in handle.kept]
        assert handle.seen == [39] * 3 and handle.stored == [21] * 3
    expected = masked_logits(model, out.sequences, [(28, flags(kept, 28))])
    assert error(torch.cat(out.logits), expected[27:-1]) < 2e-5


@pytest.mark.parametrize("name", ["expected-attention", "lagkv:lag=4", "streaming-llm"])
def test_sinks_that_a_window_left_behind_are_no_sinks(name):
    """In a sliding layer the first slots are tokens like any other."""
    model, ids = build("gemma3"), random_ids(60)
    model.config.sliding_window = 40
    for layer in model.model.layers:
        if layer.self_attn.sliding_window is not None:
            layer.self_attn.sliding_window = 40
    with compress(model, name, Budget(tokens=12)) as handle:
        run(model, ids, ())
        window, full = handle.kept[0], handle.kept[2]
    assert full.min() == 0 or name == "lagkv:lag=4"
    if name == "streaming-llm":
        assert window[0, 0].tolist() == list(range(48, 60))
    else:
        assert window.min() >= 21


@pytest.mark.parametrize("name", FIXED_ROPE)
def test_a_budget_above_the_length_is_the_full_cache(name):
    model, ids = build(name), random_ids(LENGTH)
    plain = masked_logits(model, ids, [])[None]
    with compress(model, FullCache(), Budget(keep=0.1)):
        full = run(model, ids, (PROMPT,))
    for budget in (Budget(keep=1), Budget(tokens=PROMPT)):
        with compress(model, InfoKV(window=6), budget) as handle:
            assert torch.equal(run(model, ids, (PROMPT,)), full)
            assert handle.peak_bytes >= handle.stored_bytes
    assert error(full, plain) < 2e-5


def test_the_full_cache_is_cut_by_nothing():
    model, ids = build("llama"), random_ids(LENGTH)
    for budget in (Budget(keep=0.1), Budget(keep=0.1, layers="pyramid")):
        with compress(model, FullCache(), budget, decode=Schedule(every=2, recent=1)) as handle:
            run(model, ids, (PROMPT,))
            assert handle.stored == [LENGTH] * 3
