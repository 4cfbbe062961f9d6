"""What is refused by name, and that ordinary models are not."""

import pytest
from tiny_models import ARCHITECTURES

from forward_influence.architectures import REFUSED_TYPES, refuse_unsupported
from forward_influence.errors import UserError


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_supported_architectures_pass(name):
    _, config = ARCHITECTURES[name]()
    refuse_unsupported(config.to_dict(), name)
    refuse_unsupported({**config.to_dict(), "architectures": ["AnyForCausalLM"]}, name)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "qwen3_moe", "qwen2_moe", "phimoe", "gemma4_text", "olmo2"])
def test_other_causal_models_pass(kind):
    from transformers import AutoConfig

    refuse_unsupported(AutoConfig.for_model(kind).to_dict(), kind)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mamba"}, "running state"),
        ({"model_type": "rwkv"}, "running state"),
        ({"model_type": "qwen3_next"}, "running state"),
        ({"model_type": "qwen35"}, "running state"),
        ({"model_type": "jamba"}, "running state"),
        ({"model_type": "new", "mamba_d_state": 16}, "running state"),
        ({"model_type": "new", "layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"model_type": "new", "layer_types": ["conv", "full_attention"]}, "conv"),
        ({"model_type": "new", "layer_types": ["chunked_attention"]}, "chunked_attention"),
        ({"model_type": "new", "layers_block_type": ["mamba", "hybrid"]}, "hybrid, mamba"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"model_type": "mpt"}, "ALiBi"),
        ({"model_type": "new", "alibi": True}, "ALiBi"),
        ({"model_type": "new", "position_embedding_type": "alibi"}, "ALiBi"),
        ({"model_type": "new", "position_embedding_type": "relative_key"}, "position bias"),
        ({"model_type": "deepseek_v3"}, "latent"),
        ({"model_type": "new", "kv_lora_rank": 512}, "latent"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "new", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "bert"}, "causal"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "causal"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "causal"),
        ({"model_type": "gemma4_text", "num_kv_shared_layers": 20}, "shares keys and values between layers"),
        ({"model_type": "phimoe", "sliding_window": 131072}, "window in its mask alone"),
        ({"model_type": "qwen2_moe", "use_sliding_window": True}, "window in its mask alone"),
        *(({"model_type": kind}, "attention sinks") for kind in ("gpt_oss", "granite_swa", "granitemoe_swa", "flint")),
        ({"model_type": "mimo_v2_flash"}, "attention sinks"),
        *(({"model_type": kind}, "code of its own") for kind in ("falcon", "xglm", "gpt_neo", "gpt_neox_japanese")),
        ({"model_type": "openai-gpt"}, "code of its own"),
        ({"model_type": "opt"}, "learned positions"),
        ({"model_type": "diffllama"}, "differential attention"),
        ({"model_type": "hrm_text"}, "several times for each token"),
        ({"model_type": "gemma3n_text"}, "AltUp"),
        *(({"model_type": kind}, "convolution") for kind in ("lara_mini", "inkling_text", "inkling2_text")),
        ({"model_type": "gemma3", "text_config": {"a": 1}, "vision_config": {"b": 2}}, "more than text"),
    ],
)
def test_refused_in_one_sentence(config, reason):
    with pytest.raises(UserError) as caught:
        refuse_unsupported(config, "my-model")
    message = str(caught.value)
    assert reason in message
    assert "'my-model'" in message
    assert repr(config["model_type"]) in message
    assert "\n" not in message


@pytest.mark.parametrize("kind", ["falcon_h1", "granitemoehybrid", "zamba2", "recurrent_gemma", "lfm2", "qwen3_next"])
def test_generic_rules_or_table_catch_what_transformers_builds(kind):
    from transformers import AutoConfig

    with pytest.raises(UserError):
        refuse_unsupported(AutoConfig.for_model(kind).to_dict(), kind)


def test_what_is_off_is_accepted():
    refuse_unsupported({"model_type": "new", "alibi": False, "num_kv_shared_layers": 0}, "new")
    refuse_unsupported({"model_type": "phimoe", "sliding_window": None}, "phimoe")
    refuse_unsupported({"model_type": "qwen2_moe", "use_sliding_window": False, "sliding_window": 9}, "qwen2_moe")
    refuse_unsupported({"model_type": "mixtral", "use_sliding_window": True}, "mixtral")


def test_table_gives_a_reason_for_every_type():
    assert all(kind and reason for kind, reason in REFUSED_TYPES.items())
    assert "llama" not in REFUSED_TYPES
