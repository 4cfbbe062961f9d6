"""compress(): what cannot be right is refused in a sentence, and the block goes on working."""

from __future__ import annotations

import pytest
import torch
from compress_runs import PROMPT, SCORERS, error, run
from tiny_models import build, masked_logits, random_ids
from transformers import DynamicCache

from infokv import Budget, FastKV, InfoKV, KNorm, SnapKV, compress
from infokv.calls import cache_argument
from infokv.errors import Refused


def refusals():
    llama = build("llama")
    ids, name = random_ids(20), cache_argument(llama)
    two = ids.expand(2, -1)
    pads = torch.ones_like(two)
    pads[0, :3] = 0

    def foreign():
        cache = DynamicCache(config=llama.config)
        llama_out = cache.update(torch.zeros(1, 2, 4, 16), torch.zeros(1, 2, 4, 16), 0)
        assert llama_out
        return cache

    yield "padded", lambda: llama(two, attention_mask=pads), "padded"
    yield "padded generate", lambda: llama.generate(two, attention_mask=pads, max_new_tokens=2), "padded"
    yield "foreign", lambda: llama(ids, **{name: foreign()}), "holds 4 tokens"
    yield "nested", lambda: compress(llama, SnapKV(), Budget(keep=0.5)).__enter__(), "at work on this model"
    yield "beams", lambda: llama.generate(ids, num_beams=2, max_new_tokens=3), "beam search"
    yield "assisted", lambda: llama.generate(
        ids, assistant_model=build("llama", seed=1), max_new_tokens=5), "assisted|cache"  # fmt: skip
    yield "lookup", lambda: llama.generate(
        torch.cat([ids, ids], 1), prompt_lookup_num_tokens=2, max_new_tokens=5), "assisted|cache"  # fmt: skip
    yield (
        "static",
        lambda: llama.generate(ids, cache_implementation="static", max_new_tokens=3),
        "StaticCache|ready-made",
    )
    yield "positions", lambda: llama(ids, position_ids=torch.arange(1, 21)[None]), "position_ids"
    yield "attentions", lambda: llama(ids, output_attentions=True), "output_attentions"
    yield "mask", lambda: llama(ids, attention_mask=torch.ones(1, 1, 20, 20)), "ready-made"


@pytest.mark.parametrize(("what", "call", "sentence"), [pytest.param(*one, id=one[0]) for one in refusals()])
def test_what_cannot_be_right_is_refused(what, call, sentence):
    model = next(cell.cell_contents for cell in call.__closure__ if hasattr(cell.cell_contents, "generate"))
    ids = random_ids(PROMPT)
    with compress(model, SCORERS["per head"], Budget(keep=0.4)) as handle:
        with pytest.raises(Refused, match=sentence):
            call()
        logits = run(model, ids, ())  # the block goes on working
        kept = handle.kept
    assert error(logits[0], masked_logits(model, ids, [])) < 2e-5
    assert all(one.shape[-1] == 16 for one in kept)


@pytest.mark.parametrize(("given", "sentence"), [
    (dict(scorer=SnapKV), "pass an instance"),
    (dict(scorer="nothing"), "nothing"),
    (dict(scorer="snapkv-official"), "use snapkv"),
    (dict(prefill=False), "Nothing would be cut"),
    (dict(budget=0.4), "Budget"),
    (dict(prefill_chunk=0), "prefill_chunk"),
    (dict(decode=100), "Schedule"),
    (dict(scorer=FastKV(propagate=7)), "propagate"),
])  # fmt: skip
def test_bad_arguments_are_refused_at_the_door(given, sentence):
    arguments = {"scorer": SnapKV(), "budget": Budget(keep=0.5), **given}
    with pytest.raises(Refused, match=sentence), compress(build("llama"), **arguments):
        pass


def test_training_mode_is_refused():
    with pytest.raises(Refused, match="eval"), compress(build("llama").train(), SnapKV(), Budget(keep=0.5)):
        pass


@pytest.mark.parametrize(("scorer", "other"), [(SnapKV(heads="query"), "snapkv"), (InfoKV(heads="query"), "infokv"),
                                           ("pyramidkv-official", "pyramidkv")], ids=str)  # fmt: skip
def test_sets_per_query_head_are_refused_by_name(scorer, other):
    with pytest.raises(Refused, match=f"use {other},"), compress(build("llama"), scorer, Budget(keep=0.5)):
        pass


def test_a_scorer_without_the_contract_is_refused():
    class Plain:
        needs = ("entropy",)

        def score(self, signals):
            return signals.entropy[None, None]

    with (
        pytest.raises(Refused, match="derive it from infokv.Scorer"),
        compress(build("llama"), Plain(), Budget(keep=1)),
    ):
        pass


@pytest.mark.parametrize(("scores", "sentence"), [
    (lambda signals: torch.zeros(1, 1, 1), "scores of shape"),
    (lambda signals: torch.zeros(3, 2, signals.tokens), "scores of shape"),
    (lambda signals: torch.zeros(2, signals.tokens), "scores of shape"),
    (lambda signals: torch.zeros(1, 1, signals.tokens, dtype=torch.complex64), "real"),
    (lambda signals: [0.0] * signals.tokens, "gave list"),
    (lambda signals: signals.keys[0].zero_()[None, ..., 0], "wrote into the cache"),
    (lambda signals: torch.full((1, 1, signals.tokens), float("nan")), "NaN"),
])  # fmt: skip
def test_misfit_scores_are_refused(scores, sentence):
    class Misfit(KNorm):
        """Scores that are none."""

        def score(self, signals):
            return scores(signals)

    with compress(build("llama"), Misfit(), Budget(keep=0.5)) as handle, pytest.raises(Refused, match=sentence):
        handle._calls.model(random_ids(PROMPT))


def test_a_loss_with_gradients_is_refused():
    model, ids = build("llama"), random_ids(PROMPT)
    with compress(model, SCORERS["per head"], Budget(keep=0.4)):
        with pytest.raises(Refused, match="gradients"):
            model(ids, labels=ids)
        with torch.no_grad():
            assert model(ids, labels=ids).loss > 0


def test_a_refused_call_can_be_made_right():
    model, ids = build("llama"), random_ids(PROMPT)
    cache, key = DynamicCache(config=model.config), cache_argument(model)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with compress(model, SCORERS["per head"], Budget(keep=0.4)) as handle:
        with pytest.raises(Refused, match="padded"):
            model(ids, attention_mask=mask, **{key: cache})
        with pytest.raises(Refused, match="Nothing has run"):
            handle.kept  # noqa: B018
        model(ids, attention_mask=torch.ones_like(ids), **{key: cache})
        assert handle.stored == [16] * 3


def test_a_call_that_broke_off_cannot_be_continued():
    model, ids = build("llama"), random_ids(PROMPT + 8)
    key = cache_argument(model)

    def fail(*args):
        raise KeyboardInterrupt

    with compress(model, SCORERS["mixed"], Budget(keep=0.4)):
        out = model(ids[:, :PROMPT])
        trap = model.model.layers[1].register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, PROMPT:], **{key: out[key]})
        trap.remove()
        with pytest.raises(Refused, match="broke off"):
            model(ids[:, PROMPT:], **{key: out[key]})


def test_a_cache_goes_on_with_its_own_text_alone():
    model, ids = build("llama"), random_ids(70)
    cache, name = DynamicCache(), cache_argument(build("llama"))
    with compress(model, SCORERS["per head"], Budget(keep=0.4)):
        out = model.generate(ids[:, :PROMPT], max_new_tokens=3, do_sample=False, **{name: cache})
        with pytest.raises(Refused, match="another text"):
            model.generate(random_ids(65, seed=2), max_new_tokens=3, **{name: cache})
        model.generate(torch.cat([out, ids[:, :4]], 1), max_new_tokens=3, **{name: cache})
        for change in (lambda: cache.reorder_cache(torch.tensor([0])), cache.reset, lambda: cache.crop(3)):
            with pytest.raises((Refused, AttributeError)):
                change()


def test_a_cache_is_of_no_use_outside_its_block():
    model, ids = build("llama"), random_ids(PROMPT)
    name = cache_argument(model)
    with compress(model, SCORERS["per head"], Budget(keep=0.4)):
        out = model(ids)
    with pytest.raises(Refused, match="inside the block"):
        model(ids[:, :1], **{name: out[name]})
    with (
        compress(model, SCORERS["shared"], Budget(keep=0.4)),
        pytest.raises(Refused, match="already holds|CompressedStore"),
    ):
        model(ids[:, :1], **{name: out[name]})


@pytest.mark.parametrize("name", ["phi3_longrope", "llama_dynamic"])
def test_a_text_longer_than_announced_is_refused_where_rotation_changes(name):
    model, ids = build(name), random_ids(60)
    with compress(model, SCORERS["per head"], Budget(keep=0.4)):
        out = model.generate(ids[:, :20], max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        key = cache_argument(model)
        with pytest.raises(Refused, match="start anew"):
            model(ids[:, 24:55], **{key: out[key]})
