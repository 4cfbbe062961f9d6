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


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "opt", "qwen3_moe", "falcon", "olmo2"])
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
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
        ({"model_type": "new", "position_embedding_type": "alibi"}, "ALiBi"),
        ({"model_type": "new", "position_embedding_type": "relative_key"}, "position bias"),
        ({"model_type": "deepseek_v3"}, "latent"),
        ({"model_type": "new", "kv_lora_rank": 512}, "latent"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "new", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "bert"}, "causal"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "causal"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "causal"),
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


def test_alibi_off_is_accepted():
    refuse_unsupported({"model_type": "falcon", "alibi": False}, "falcon")


def test_table_gives_a_reason_for_every_type():
    assert all(kind and reason for kind, reason in REFUSED_TYPES.items())
    assert "llama" not in REFUSED_TYPES
