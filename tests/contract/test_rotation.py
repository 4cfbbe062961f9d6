"""Queries without their rotation: against the projections themselves, on models of many kinds."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import ARCHITECTURES, build, random_ids

from infokv.errors import Refused
from infokv.forward import forward_chunks
from infokv.prefill import prefill
from infokv.recorder import Recorder
from infokv.rotation import Rotation
from infokv.store import TokenStore

LENGTH = 40


def partial():
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(
        Phi3Config(
            hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=89, partial_rotary_factor=0.5, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def some_layers_without():
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    return SmolLM3ForCausalLM(
        SmolLM3Config(
            hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=89, no_rope_layers=[1, 0, 1, 0], pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def interleaved():
    from transformers import CohereConfig, CohereForCausalLM

    return CohereForCausalLM(
        CohereConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=89, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def scaled():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=89, max_position_embeddings=128,
            rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                             "original_max_position_embeddings": 32, "attention_factor": 1.7},
        )
    )  # fmt: skip


OTHERS = {"partial": partial, "some_layers_without": some_layers_without, "interleaved": interleaved, "scaled": scaled}


def model_of(name: str):
    if name in ARCHITECTURES:
        return build(name)
    torch.manual_seed(0)
    return OTHERS[name]().eval()


def projected(model, ids: torch.Tensor) -> list[torch.Tensor]:
    """What each layer's query projection, or its norm, gave in one plain forward: ``[heads, tokens, head_dim]``."""
    seen, model = [], copy.deepcopy(model)
    model.set_attn_implementation("eager")  # the only one that respects soft-caps in all versions
    layers = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "o_proj")]
    for layer in layers:
        last = next(getattr(layer, name) for name in ("q_norm", "q_proj", "qkv_proj") if hasattr(layer, name))
        last.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    with torch.no_grad():
        model(ids, use_cache=False)
    heads = model.config.num_attention_heads
    out = []
    for one, layer in zip(seen, layers, strict=True):
        if one.dim() == 2:  # a projection; with queries first where keys and values are in it
            one = one[:, : heads * layer.head_dim].reshape(len(one), heads, layer.head_dim)
        out.append(one if one.shape[0] == heads else one.transpose(0, 1))
    return out


@pytest.mark.parametrize("name", [*ARCHITECTURES, *OTHERS])
def test_equal_to_the_projections(name):
    model, ids = model_of(name), random_ids(LENGTH)
    signals = prefill(model, ids, ("unrotated_queries", "unrotated_queries(last=5)", "queries"), chunk_size=16)[1]
    rotated = 0
    for index, want in enumerate(projected(model, ids)):
        found = signals.unrotated_queries[index]
        torch.testing.assert_close(found, want, rtol=0, atol=1e-5 * want.abs().max().item())
        assert torch.equal(signals["unrotated_queries(last=5)"][index], found[:, -5:])
        rotated += (found - signals.queries[index]).abs().max() > 0.1 * want.abs().max()
    assert rotated == (2 if name == "some_layers_without" else len(signals.queries))


@pytest.mark.parametrize("name", ["llama", "gemma3", *OTHERS])
def test_rotating_back(name):
    model, ids = model_of(name), random_ids(LENGTH)
    signals = prefill(model, ids, ("unrotated_queries", "queries"))[1]
    rotation = Rotation(model)
    tables = rotation.tables(torch.arange(LENGTH), signals.queries[0])
    for index, want in enumerate(signals.queries):
        found = rotation.rotate(index, signals.unrotated_queries[index], tables)
        torch.testing.assert_close(found, want, rtol=0, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("name", ["llama", "gemma3", "some_layers_without", "scaled", "phi3_longrope"])
@pytest.mark.parametrize("chunk", [3, 16, 64])
def test_moments_of_future_queries(name, chunk):
    """Mean and covariance of all queries but the first, each rotated in turn by every later position."""
    model, ids = model_of(name), random_ids(LENGTH)
    need = "future_queries(skip=5,future=12)"
    signals = prefill(model, ids, (need, "unrotated_queries"), chunk_size=chunk)[1]
    rotation = Rotation(model)
    ahead = rotation.tables(torch.arange(LENGTH, LENGTH + 12), signals.unrotated_queries[0])
    for index, moments in enumerate(signals[need]):
        queries = signals.unrotated_queries[index][:, 5:].double()
        width = queries.shape[-1]
        turn = torch.zeros(width, width, dtype=torch.float64)
        for at in range(12):
            here = {kind: (cos[at : at + 1], sin[at : at + 1]) for kind, (cos, sin) in ahead.items()}
            for channel in range(width):
                basis = torch.zeros(1, 1, width)
                basis[0, 0, channel] = 1
                turn[:, channel] += rotation.rotate(index, basis, here)[0, 0].double() / 12
        for head in range(queries.shape[0]):
            mean = turn @ queries[head].mean(dim=0)
            spread = turn @ torch.cov(queries[head].T, correction=0) @ turn.T
            for found, want in ((moments[head, 0], mean), (moments[head, 1:], spread)):
                torch.testing.assert_close(found.double(), want, rtol=0, atol=2e-5 * want.abs().max().item())


def test_a_text_shorter_than_what_is_left_out():
    moments = prefill(model_of("llama"), random_ids(3), ("future_queries(skip=5)",))[1]["future_queries(skip=5)"]
    assert all(bool((one == 0).all()) for one in moments)


def test_moments_do_not_grow_with_the_text():
    model, need = model_of("llama"), "future_queries(skip=4,future=12)"
    held = []
    for length in (40, 120):
        recorder, store = Recorder(model, (need,)), TokenStore(3, length)
        for _ in forward_chunks(
            model, store, random_ids(length), chunk_size=10, total_length=length, listeners=(recorder,)
        ):
            pass
        held.append(recorder.held_bytes)
    assert held[0] == held[1] > 0


def refused():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GPT2Config, GPT2LMHeadModel

    common = {"vocab_size": 89, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    learned = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, **common))
    latent = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=2,
            topk_group=1, first_k_dense_replace=2, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
            qk_nope_head_dim=8, v_head_dim=8, **common,
        )
    )  # fmt: skip
    return {"GPT2": learned, "Deepseek": latent}


@pytest.mark.parametrize("name", ["GPT2", "Deepseek"])
def test_what_cannot_be_undone_is_refused(name):
    with pytest.raises(Refused, match=f"{name}.*no rotation that can be undone.*use a scorer without"):
        Rotation(refused()[name].eval())


def test_a_norm_after_the_rotation_is_refused():
    from transformers import HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM

    torch.manual_seed(0)
    model = HunYuanDenseV1ForCausalLM(
        HunYuanDenseV1Config(
            hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, vocab_size=89, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.query_layernorm.weight.uniform_(0.5, 2)
    with pytest.raises(Refused, match="in another way"):
        Rotation(model)


def test_the_model_is_as_before():
    model, ids = model_of("llama"), random_ids(LENGTH)
    before = model(ids).logits
    usual = model.config._attn_implementation
    Rotation(model)
    assert model.config._attn_implementation == usual
    assert torch.equal(model(ids).logits, before)
