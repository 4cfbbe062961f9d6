"""compress(): a model may be called, and generate, in every way, mode and dtype."""

from __future__ import annotations

import pytest
import torch
from compress_runs import LENGTH, PROMPT, SCORERS, error, flags, run
from tiny_models import VOCABULARY, build, masked_logits, random_ids
from transformers import DynamicCache

from infokv import Budget, Schedule, compress
from infokv.calls import cache_argument
from infokv.errors import Refused


@pytest.mark.parametrize("how", ["own cache", "embeddings", "one by one", "generate in pieces", "generate on"])
def test_ways_to_run(how):
    model, ids = build("llama"), random_ids(LENGTH)
    scorer = SCORERS["mixed"]
    with compress(model, scorer, Budget(keep=0.4)) as handle:
        expected = run(model, ids, (PROMPT, PROMPT + 3))
        kept = handle.kept
        if how == "own cache":  # a caller's cache stays the key to the text, also if the output is not looked at
            cache, name = DynamicCache(config=model.config), cache_argument(model)
            got = [model(part, **{name: cache}).logits for part in ids.split([PROMPT, 3, LENGTH - PROMPT - 3], 1)]
            assert torch.equal(torch.cat(got, 1), expected)
        elif how == "embeddings":
            embedded = model.get_input_embeddings()(ids[:, :PROMPT])
            assert torch.equal(model(inputs_embeds=embedded).logits, expected[:, :PROMPT])
        elif how == "one by one":
            assert torch.allclose(run(model, ids, (PROMPT, *range(PROMPT + 1, LENGTH))), expected, atol=2e-5)
        elif how == "generate in pieces":
            whole = model.generate(ids[:, :PROMPT], max_new_tokens=6, do_sample=False)
            kept = handle.kept
            again = model.generate(ids[:, :PROMPT], max_new_tokens=6, do_sample=False, prefill_chunk_size=9)
            assert torch.equal(whole, again)
            assert all(torch.equal(one, other) for one, other in zip(kept, handle.kept))
        else:  # a second turn goes on with the cache of the first
            first = model.generate(ids[:, :PROMPT], max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
            longer = torch.cat([first.sequences, ids[:, :5]], dim=1)
            name = cache_argument(model)
            second = model.generate(
                longer, max_new_tokens=2, min_new_tokens=2, do_sample=False, return_dict_in_generate=True,
                output_logits=True, **{name: first[name]},
            )  # fmt: skip
            cut = [one[..., : one.shape[-1] - (handle.seen[0] - PROMPT)] for one in handle.kept]
    assert all(one.shape[-1] >= 16 for one in kept)
    if how == "generate on":
        reference = masked_logits(model, second.sequences, [(PROMPT, flags(cut, PROMPT))])
        assert error(torch.cat(second.logits), reference[-3:-1]) < 2e-5


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_pipeline(name):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2", pad_token="w0")
    model = build(name)
    text = " ".join(f"w{index}" for index in random_ids(PROMPT)[0].tolist())
    with compress(model, SCORERS["per head"], Budget(keep=0.4)) as handle:
        pipeline("text-generation", model=model, tokenizer=fast)(text, max_new_tokens=4, do_sample=False)
        assert handle.seen[0] >= PROMPT and min(handle.stored) < PROMPT


def test_a_callers_cache_is_true_to_its_text():
    model, ids = build("llama"), random_ids(PROMPT)
    cache, name = DynamicCache(config=model.config), cache_argument(model)
    with compress(model, SCORERS["per head"], Budget(keep=0.4)) as handle:
        out = model.generate(ids, max_new_tokens=2, do_sample=False, **{name: cache})
        assert cache.get_seq_length() == PROMPT + 1
        longer = torch.cat([out, ids[:, :3]], 1)
        again = model.generate(longer, max_new_tokens=2, min_new_tokens=2, do_sample=False, **{name: cache})
        assert cache.get_seq_length() == PROMPT + 6 and again.shape[1] == PROMPT + 7
        assert max(handle.stored) < PROMPT
    with pytest.raises(Refused, match="belongs to infokv"):
        model(ids[:, :1], **{name: cache})
    with compress(model, SCORERS["per head"], Budget(keep=0.4)), pytest.raises(Refused, match="already holds"):
        model(ids[:, :1], **{name: cache})


@pytest.mark.parametrize("mode", ["autocast", "inference, then not", "bfloat16", "float16", "float64"])
def test_modes_and_dtypes(mode):
    model, ids = build("llama"), random_ids(LENGTH)
    if mode in ("bfloat16", "float16", "float64"):
        model = model.to(getattr(torch, mode))
    key = cache_argument(model)
    with compress(
        model, SCORERS["mixed"], Budget(keep=0.4), prefill_chunk=16, decode=Schedule(every=4, recent=2)
    ) as handle:
        if mode == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                run(model, ids, (PROMPT,))
        else:
            with torch.inference_mode(mode.startswith("inference")):
                out = model(ids[:, :PROMPT])
            with torch.no_grad():
                model(ids[:, PROMPT:], **{key: out[key]})
        assert handle.stored == [16 + 3 + 2 + 2] * 3  # two cuts, and two tokens since


def test_a_mixture_of_experts_is_compressed():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    model, ids = MixtralForCausalLM(config).eval(), random_ids(PROMPT)
    with compress(model, SCORERS["per head"], Budget(keep=0.4)) as handle:
        model.generate(ids, max_new_tokens=3, do_sample=False)
        assert min(handle.stored) < PROMPT
