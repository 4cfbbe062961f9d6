"""Going past the context limit: by request only, and with the frequencies of the paper."""

import math

import pytest
import torch
from tiny_models import ARCHITECTURES

from forward_influence.context import context_limit, plan_context
from forward_influence.errors import UserError


def naive_yarn(theta: float, dim: int, limit: int, factor: float, fast: float = 32, slow: float = 1):
    """Inverse frequencies and temperature, one number at a time, from the definition in arXiv 2309.00071.

    Dimension d turns r(d) = limit / wavelength times within the trained context. Above `fast` turns it
    keeps its frequency, below `slow` it is divided by the factor, and between the weights are linear in
    the dimension's index, the ends rounded outwards (as the authors' code does).
    """

    def index_with(turns):
        return dim * math.log(limit / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(index_with(fast)), 0), min(math.ceil(index_with(slow)), dim - 1)
    frequencies = []
    for i in range(dim // 2):
        plain = theta ** (-2 * i / dim)
        scaled = min(max((i - low) / max(high - low, 1e-3), 0), 1)
        frequencies.append(plain * (1 - scaled) + plain / factor * scaled)
    return frequencies, 0.1 * math.log(factor) + 1


def tiny(name="llama"):
    return ARCHITECTURES[name]()[1]


def test_unasked_nothing_changes():
    config = tiny()
    plan = plan_context(config, None, 10_000)
    assert plan.config is config
    assert (plan.limit, plan.method, plan.notice) == (256, None, None)


def test_yarn_gives_the_frequencies_of_the_paper():
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = tiny()
    config.max_position_embeddings = 4096
    plan = plan_context(config, "yarn", 10_000)
    assert (plan.limit, plan.method) == (10_000, "yarn:4096->10000")
    assert "4096 to 10000" in plan.notice
    rotary = LlamaRotaryEmbedding(plan.config)
    frequencies, temperature = naive_yarn(10_000.0, 16, 4096, 10_000 / 4096)
    torch.testing.assert_close(rotary.inv_freq, torch.tensor(frequencies), rtol=1e-5, atol=0)
    assert rotary.attention_scaling == pytest.approx(temperature)
    plain = LlamaRotaryEmbedding(config)
    assert plain.rope_type == "default", "the caller's configuration is untouched"
    assert not torch.allclose(plain.inv_freq, rotary.inv_freq)
    assert config.max_position_embeddings == 4096


def test_sliding_layers_keep_their_frequencies():
    plan = plan_context(tiny("gemma3"), "yarn", 1000)
    kinds = {layer: rope["rope_type"] for layer, rope in plan.config.rope_parameters.items()}
    assert kinds == {"full_attention": "yarn", "sliding_attention": "default"}


def test_a_text_that_fits_is_not_stretched():
    plan = plan_context(tiny(), "yarn", 256)
    assert (plan.limit, plan.method) == (256, None)
    assert "not extended" in plan.notice


@pytest.mark.parametrize("name", ["phi3_longrope", "llama_dynamic"])
def test_scaled_models_are_refused(name):
    with pytest.raises(UserError, match="already scales"):
        plan_context(tiny(name), "yarn", 1000)


def test_models_without_rope_are_refused():
    from transformers import GPT2Config

    with pytest.raises(UserError, match="no rotary embedding to rescale"):
        plan_context(GPT2Config(), "yarn", 2000)


def test_bad_requests():
    with pytest.raises(UserError, match="'ntk' is unknown"):
        plan_context(tiny(), "ntk", 1000)
    with pytest.raises(UserError, match="needs target_length"):
        plan_context(tiny(), "yarn")


@pytest.mark.parametrize("length", [1000.0, "1000", True])
def test_a_length_is_a_whole_number(length):
    with pytest.raises(UserError, match="target_length is .*whole number"):
        plan_context(tiny(), "yarn", length)


def test_a_length_of_numpy_is_a_number():
    import numpy as np

    plan = plan_context(tiny(), "yarn", np.int64(1000))
    assert type(plan.limit) is type(plan.config.max_position_embeddings) is int
    assert plan.method == "yarn:256->1000"


def test_context_limit_of_other_spellings():
    from transformers import GPT2Config

    assert context_limit(GPT2Config(n_positions=77)) == 77
    assert context_limit(object()) is None
