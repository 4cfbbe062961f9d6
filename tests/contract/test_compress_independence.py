"""compress(): a text keeps what it keeps alone, whatever runs before it, beside it or in what pieces."""

from __future__ import annotations

import pytest
import torch
from compress_runs import LENGTH, PROMPT, SCORERS, error, run
from tiny_models import build, masked_logits, random_ids
from transformers import DynamicCache

from infokv import Budget, FullCache, Schedule, SnapKV, StreamingLLM, compress
from infokv.calls import cache_argument


@pytest.mark.parametrize("kind", SCORERS)
def test_samples_do_not_touch_each_other(kind):
    model, one, other = build("gemma2"), random_ids(LENGTH), random_ids(LENGTH, seed=1)

    def kept_and_logits():
        logits = run(model, one, (PROMPT,))
        return handle.kept, logits

    with compress(model, SCORERS[kind], Budget(keep=0.4), decode=Schedule(every=4, recent=2)) as handle:
        first = kept_and_logits()
        run(model, other, (PROMPT - 3,))
        second = kept_and_logits()
    with compress(build("gemma2"), SCORERS[kind], Budget(keep=0.4), decode=Schedule(every=4, recent=2)) as handle:
        model = handle._calls.model
        third = kept_and_logits()
    for again in (second, third):
        assert torch.equal(first[1], again[1])
        assert all(torch.equal(a, b) for a, b in zip(first[0], again[0]))


@pytest.mark.parametrize("kind", [kind for kind in SCORERS if kind != "entropy layers"])
def test_a_batch_keeps_what_its_texts_keep_alone(kind):
    model = build("qwen2")
    ids = torch.cat([random_ids(LENGTH), random_ids(LENGTH, seed=1)])
    schedule = Schedule(every=4, recent=2)
    with compress(model, SCORERS[kind], Budget(keep=0.4), decode=schedule) as handle:
        logits = run(model, ids, (PROMPT,))
        kept = handle.kept
        for row in (0, 1):
            alone = run(model, ids[row : row + 1], (PROMPT,))
            assert torch.allclose(logits[row], alone[0], atol=1e-4)
            assert all(torch.equal(a[row], b[0]) for a, b in zip(kept, handle.kept))


@pytest.mark.parametrize("kind", SCORERS)
def test_chunks_and_threads_change_nothing(kind):
    model, ids = build("llama"), random_ids(LENGTH)
    found = []
    before = torch.get_num_threads()
    for chunk, threads in ((7, 1), (64, 1), (512, 2)):
        torch.set_num_threads(threads)
        with compress(model, SCORERS[kind], Budget(keep=0.4), prefill_chunk=chunk) as handle:
            run(model, ids, (PROMPT,))
            found.append(handle.kept)
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


def test_threads_do_not_mix_their_texts():
    from threading import Thread

    model, schedule = build("llama"), Schedule(every=4, recent=2)
    texts = [random_ids(length, seed) for seed, length in enumerate((40, 70, 55))]

    def alone(ids):
        with compress(model, SCORERS["mixed"], Budget(keep=0.4), decode=schedule):
            return kept_of(ids)

    def kept_of(ids):
        out = model.generate(ids, max_new_tokens=14, min_new_tokens=14, do_sample=False, return_dict_in_generate=True)
        return out.sequences, [layer.slot_positions() for layer in out[cache_argument(model)].layers]

    expected = [alone(ids) for ids in texts]
    for _ in range(3):
        found = [None] * len(texts)
        with compress(model, SCORERS["mixed"], Budget(keep=0.4), decode=schedule):
            workers = [
                Thread(target=lambda place=place, ids=ids, out=found: out.__setitem__(place, kept_of(ids)))
                for place, ids in enumerate(texts)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        for (text, kept), (own_text, own_kept) in zip(expected, found):
            assert torch.equal(text, own_text)
            assert all(torch.equal(one, other) for one, other in zip(kept, own_kept))


def test_texts_on_the_side_of_generate_are_texts_of_their_own():
    from transformers import LogitsProcessor, LogitsProcessorList

    model, ids = build("llama"), random_ids(28)
    sides = []

    class Side(LogitsProcessor):
        def __call__(self, input_ids, scores):
            out = model(ids[:, :12])
            sides.append(out[cache_argument(model)].layers[0].length)
            return scores

    with compress(model, StreamingLLM(), Budget(keep=0.5)) as handle:
        model.generate(ids, max_new_tokens=2, min_new_tokens=2, logits_processor=LogitsProcessorList([Side()]))
        assert sides == [6, 6]
        assert handle.seen == [29] * 3 and handle.stored == [15] * 3
        model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False, guidance_scale=1.5)
        assert handle.seen == [30] * 3 and handle.stored == [16] * 3


def test_texts_on_the_side_of_a_continued_generate_are_texts_of_their_own():
    model, cache, name = build("llama"), DynamicCache(), cache_argument(build("llama"))
    options = dict(do_sample=False, max_new_tokens=5, min_new_tokens=5)
    with compress(model, SnapKV(window=4), Budget(tokens=12)) as handle:
        first = model.generate(random_ids(40), **{name: cache}, **options)
        longer = torch.cat([first, random_ids(6, seed=9)], 1)
        model.generate(
            longer, guidance_scale=1.5, negative_prompt_ids=random_ids(30, seed=4), **{name: cache}, **options
        )
        assert handle.seen == [55] * 3 and handle.stored == [27] * 3


@pytest.mark.parametrize("name", ["llama_dynamic", "phi3_longrope"])
def test_a_look_ahead_in_a_logits_processor_is_a_text_of_its_own(name):
    from transformers import LogitsProcessorList

    model, ids, seen = build(name), random_ids(28), []

    def look(input_ids, scores):
        text = torch.cat([input_ids, ids[:, :1]], 1)
        seen.append((text, model(text).logits[0, -1]))
        model.generate(random_ids(9, seed=4), do_sample=False, max_new_tokens=2)
        return scores

    options = dict(do_sample=False, max_new_tokens=8, min_new_tokens=8)
    with compress(model, FullCache(), Budget(keep=1)) as handle:
        alone = model.generate(ids, **options)
        beside = model.generate(ids, logits_processor=LogitsProcessorList([look]), **options)
        assert handle.seen[0] == 35
    assert torch.equal(alone, beside)
    for text, logits in seen:
        assert error(logits, masked_logits(model, text, [])[-1]) < 2e-5
