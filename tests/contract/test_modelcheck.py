"""The check after loading passes right models and catches wrong ones."""

from __future__ import annotations

import pytest
import torch
from tiny_models import ARCHITECTURES, build

from infokv.errors import Refused
from infokv.modelcheck import check_model


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_passes_and_stores_what_it_saw(name):
    result = check_model(build(name))
    assert result["error_chunked"] < 1e-5
    assert result["error_masked"] < 1e-5
    assert result["effect_masked"] > 1e-3
    assert result["seconds"] < 5


def test_bfloat16_passes_within_its_tolerance():
    result = check_model(build("llama").to(torch.bfloat16))
    assert 0 < result["error_chunked"] < result["tolerance"]


def test_gpt_oss_is_refused_for_its_attention_sinks():
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_local_experts=2, num_experts_per_tok=1, vocab_size=89, sliding_window=8,
        layer_types=["full_attention", "sliding_attention"],
    )  # fmt: skip
    with pytest.raises(Refused, match="s_aux"):
        check_model(GptOssForCausalLM(config).eval())


def test_a_model_with_other_positions_is_caught():
    """GPT-2 like absolute positions from the cache length would pass; positions that ignore the cache do not."""
    model = build("llama")
    rotary = model.model.rotary_emb
    plain = rotary.forward

    def local_positions(x, position_ids):
        return plain(x, position_ids - position_ids[:, :1])

    rotary.forward = local_positions
    with pytest.raises(Refused, match="in chunks differs"):
        check_model(model)


def test_an_extra_bias_on_old_tokens_is_caught(monkeypatch):
    """What an ALiBi-like model does: its own attention adds a bias that the engine does not know."""
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.eager_attention_forward

    def biased(module, query, key, value, attention_mask, **kwargs):
        distance = torch.arange(key.shape[2])[None] - torch.arange(query.shape[2])[:, None]
        return plain(module, query, key, value, attention_mask + 0.3 * distance, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", biased)
    with pytest.raises(Refused, match="differs from its own forward"):
        check_model(build("llama"))


def _phimoe():
    from transformers import PhimoeConfig, PhimoeForCausalLM

    return PhimoeForCausalLM(
        PhimoeConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=89, num_local_experts=2, num_experts_per_tok=1, sliding_window=100,
        )
    )  # fmt: skip


def _qwen2_moe():
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=89, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
            shared_expert_intermediate_size=16, use_sliding_window=True, sliding_window=100, max_window_layers=0,
        )
    )  # fmt: skip


@pytest.mark.parametrize("make", [_phimoe, _qwen2_moe])
def test_a_window_in_the_mask_alone_is_refused_however_long(make):
    """The window is longer than the check's text, so that no number could show that it is ignored."""
    with pytest.raises(Refused, match="sliding window in its mask alone"):
        check_model(make().eval())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda states: states[None], r"block 1 gives states of shape \[1, 1, 12, 48\] instead of \[1, 12, 48\]"),
        (lambda states: torch.cat([states, states]), r"block 1 gives states of shape \[2, 12, 48\]"),
        (lambda states: (None, states), r"block 1 gives states of shape \[\]"),
    ],
)
def test_a_block_that_gives_no_residual_stream_is_refused(change, sentence):
    """The model's numbers are right, because the next block undoes it; signals would read something else."""
    model = build("llama")

    def undo(module, args):
        states = args[0][1] if isinstance(args[0], tuple) else args[0]
        return states.reshape(-1, *states.shape[-2:])[:1], *args[1:]

    model.model.layers[1].register_forward_hook(lambda module, args, output: change(output))
    model.model.layers[2].register_forward_pre_hook(undo)
    with pytest.raises(Refused, match=sentence):
        check_model(model)


def test_a_mixture_of_experts_without_a_window_passes():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=89, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    assert check_model(MixtralForCausalLM(config).eval())["error_masked"] < 1e-4


def _foreign_models():
    """Tiny models whose attention or positions are their own."""
    from transformers import (
        BloomConfig,
        BloomForCausalLM,
        DiffLlamaConfig,
        DiffLlamaForCausalLM,
        GPTNeoConfig,
        GPTNeoForCausalLM,
        OPTConfig,
        OPTForCausalLM,
        RobertaConfig,
        RobertaForCausalLM,
        XGLMConfig,
        XGLMForCausalLM,
    )

    size = dict(vocab_size=89, hidden_size=32, num_attention_heads=4)
    layers = dict(num_hidden_layers=2, intermediate_size=32, max_position_embeddings=64)
    yield "opt", OPTForCausalLM, OPTConfig(**size, num_hidden_layers=2, ffn_dim=32, word_embed_proj_dim=32)
    yield "bloom", BloomForCausalLM, BloomConfig(vocab_size=89, hidden_size=32, n_head=4, n_layer=2)
    yield "gpt_neo", GPTNeoForCausalLM, GPTNeoConfig(
        vocab_size=89, hidden_size=32, num_heads=4, num_layers=2, attention_types=[[["global", "local"], 1]],
        max_position_embeddings=64,
    )  # fmt: skip
    yield "diffllama", DiffLlamaForCausalLM, DiffLlamaConfig(**size, **layers, num_key_value_heads=2)
    yield "roberta", RobertaForCausalLM, RobertaConfig(**size, **layers, is_decoder=True)
    yield (
        "xglm",
        XGLMForCausalLM,
        XGLMConfig(vocab_size=89, d_model=32, attention_heads=4, num_layers=2, ffn_dim=32, max_position_embeddings=64),
    )


@pytest.mark.parametrize(("name", "kind", "config"), [pytest.param(*one, id=one[0]) for one in _foreign_models()])
def test_no_way_in_measures_a_model_that_goes_its_own_way(name, kind, config):
    from forward_influence import influence, token_signals
    from infokv import Budget, SnapKV, compress

    model, ids = kind(config).eval(), torch.arange(3, 43)[None]
    for call in (
        lambda: influence(model, ids, [[5]], prefix_length=20),
        lambda: token_signals(model, ids),
        lambda: compress(model, SnapKV(), Budget(keep=0.5)).__enter__(),
    ):
        with pytest.raises(Refused):
            call()


def test_a_model_is_checked_once(monkeypatch):
    from infokv import modelcheck

    model, seen = build("llama"), []
    monkeypatch.setattr(modelcheck, "check_model", lambda one: seen.append(one) or {})
    assert modelcheck.ensure_checked(model) is modelcheck.ensure_checked(model)
    assert seen == [model]
