"""What a study needs, counted a second time from the weights of the model itself."""

import pytest
import torch
from tiny_models import build
from transformers import LlamaConfig

from forward_influence.data import TokenizedDocument
from forward_influence.estimate import estimate, matrix_rate, multiply_adds, size
from forward_influence.memory import memory_need
from forward_influence.rows import RunSpec
from forward_influence.shapes import LayerShape, layer_shapes


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_multiply_adds_are_the_matrices_and_the_attended_keys(name):
    with torch.device("meta"):
        model = build(name)
    config = model.config
    tied = config.tie_word_embeddings
    matrices = sum(
        parameter.numel()
        for label, parameter in model.named_parameters()
        if parameter.dim() == 2 and (tied or "embed_tokens" not in label)
    )
    attended = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim  # q k and p v, per key
    assert multiply_adds(config, 0) == matrices
    assert multiply_adds(config, 10.5) == matrices + attended * 10.5


def test_mixtures_count_the_active_experts():
    config = LlamaConfig(
        hidden_size=8, intermediate_size=99, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=4, vocab_size=10,
    )  # fmt: skip
    config.num_experts_per_tok, config.moe_intermediate_size = 3, 5
    projections = 8 * 8 + 2 * 8 * 4 + 8 * 8
    assert multiply_adds(config, 0) == projections + 3 * (3 * 8 * 5) + 8 * 10


def test_sizes_of_each_layer_are_those_of_its_matrices():
    """Gemma 4 has other heads in full-attention layers; transformers refuses to tell a common size."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "gemma4_text", hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        global_head_dim=16, intermediate_size=24, vocab_size=89, vocab_size_per_layer_input=89,
        hidden_size_per_layer_input=8, layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(config).model.layers
    shapes = layer_shapes(config)
    assert len({shape.width for shape in shapes}) == 2
    for layer, shape in zip(layers, shapes, strict=True):
        assert layer.self_attn.q_proj.weight.shape[0] == shape.queries * shape.width
        assert layer.self_attn.k_proj.weight.shape[0] == shape.heads * shape.width
        assert layer.mlp.up_proj.weight.shape[0] == shape.inner
    key_values = sum(2 * layer.self_attn.k_proj.weight.shape[0] for layer in layers)
    needs = [memory_need(config, prefix=100, horizon=n, chunk_size=1, element_size=2).fixed for n in (1, 7)]
    assert needs == [100 * key_values * 2 + 2**28] * 2
    attended = sum(2 * layer.self_attn.q_proj.weight.shape[0] for layer in layers)
    assert multiply_adds(config, 7) - multiply_adds(config, 0) == 7 * attended


def test_values_may_be_lists_of_one_per_layer():
    class Config:
        num_hidden_layers, num_attention_heads, hidden_size, vocab_size = 2, 4, 8, 10
        num_key_value_heads, intermediate_size = [1, 2], [5, 6]

        def get_text_config(self):
            return self

    assert layer_shapes(Config()) == [LayerShape(4, 1, 2, 5), LayerShape(4, 2, 2, 6)]
    by_hand = (8 * 2 * 2 * (4 + 1) + 3 * 8 * 5) + (8 * 2 * 2 * (4 + 2) + 3 * 8 * 6) + 8 * 10
    assert multiply_adds(Config(), 0) == by_hand


class Source:
    config = build("llama").config

    @staticmethod
    def weights_bytes(dtype):
        return 123 * 2**20


class Plan:
    source, dtype, device = Source, "float32", "cpu"
    spec = RunSpec(model="m", dtype="float32", tokenizer="t", data="local", prefix=20, horizon=30, chunk=8)


def plan_of(*documents):
    return [(TokenizedDocument("d", tuple(range(tokens))), dict.fromkeys(range(rows))) for tokens, rows in documents]


def test_time_counts_every_row_and_the_reference(monkeypatch):
    monkeypatch.setattr("forward_influence.estimate.matrix_rate", lambda device, dtype: 1e6)
    config, todo = Source.config, plan_of((50, 4), (40, 1), (999, 2))
    work = 0.0
    for horizon, rows in ((30, 4), (20, 1), (30, 2)):
        work += 20 * multiply_adds(config, 10)
        work += (rows + 1) * horizon * multiply_adds(config, 20 + horizon / 2)
    found = estimate(Plan, todo, chunk_size=256)
    assert found.seconds == pytest.approx(work / 1e6 / 0.7)
    assert found.weights == 123 * 2**20
    assert found.one_row < found.all_rows == estimate(Plan, plan_of((50, 4)), chunk_size=256).all_rows
    assert found.sentence().startswith("Expected: about ")
    assert "memory 123 MiB for the weights and " in found.sentence()


def test_the_rate_is_one_that_a_matrix_product_reaches():
    assert 1e8 < matrix_rate("cpu", "float32", seconds=0.05) < 1e14


def test_sizes():
    assert [size(n) for n in (0, 2**20, 3 * 2**29, 10 * 2**30)] == ["1 MiB", "1 MiB", "1.5 GiB", "10.0 GiB"]
