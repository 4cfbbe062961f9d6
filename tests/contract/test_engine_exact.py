"""The engine equals one float64 forward with the removed columns masked, on every architecture."""

from __future__ import annotations

import pytest
import torch
from tiny_models import (
    ARCHITECTURES,
    attention_entropy_share,
    build,
    layer_windows,
    random_ids,
    reference_logits,
)

from forward_influence.engine import MaskingEngine, compare_rows, influence, recomputed_states
from forward_influence.kl import kl_divergence
from forward_influence.removal import removal_flags
from infokv.prefill import prefill

PREFIX, HORIZON = 40, 23
LENGTH = PREFIX + HORIZON


#: The same tests run on a GPU where there is one.
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")],
    ),
]


@pytest.fixture(scope="module", params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def model(request, device):
    return build(request.param).to(device)


def flags_of(model, kind: str) -> torch.Tensor:
    """Removed sets ``[rows, layers or 1, kv_heads or 1, prefix]`` of three rows, the first of them empty."""
    layers = model.config.num_hidden_layers if kind in ("layers", "heads") else 1
    heads = model.config.num_key_value_heads if kind == "heads" else 1
    generator = torch.Generator().manual_seed(5)
    flags = torch.rand(3, layers, heads, PREFIX, generator=generator) < 0.3
    flags[..., PREFIX - 3] = True  # in reach of a short window
    flags[0] = False
    return flags


def engine_logits(model, ids, flags, *, prefix_chunk, chunk):
    ids, flags = ids.to(model.device), flags.to(model.device)
    store, _ = prefill(model, ids[:, :PREFIX], chunk_size=prefix_chunk, total_length=ids.shape[1])
    engine = MaskingEngine(model, store, ids[:, PREFIX:], flags, chunk_size=chunk)
    return torch.cat([part for _, part in engine.logits()], dim=1).cpu()


def assert_close(got, expected):
    scale = max(1.0, expected.abs().max().item())
    assert (got.double() - expected).abs().max().item() <= 2e-5 * scale


def test_attention_is_far_from_uniform(model):
    assert attention_entropy_share(model, random_ids(LENGTH).to(model.device)) < 0.7


@pytest.mark.parametrize("kind", ["shared", "layers", "heads"])
@pytest.mark.parametrize(("prefix_chunk", "chunk"), [(512, 512), (16, 1), (7, 5)])
def test_logits_equal_the_masked_forward(model, kind, prefix_chunk, chunk):
    ids, flags = random_ids(LENGTH), flags_of(model, kind)
    got = engine_logits(model, ids, flags, prefix_chunk=prefix_chunk, chunk=chunk)
    assert_close(got[0], reference_logits(model, ids)[PREFIX:])
    for row, removed in enumerate(flags):
        assert_close(got[row + 1], reference_logits(model, ids, removed, PREFIX)[PREFIX:])


def test_removal_matters_in_the_reference(model):
    """The comparison above could not fail if masking did nothing."""
    ids, flags = random_ids(LENGTH), flags_of(model, "shared")
    full, ablated = reference_logits(model, ids), reference_logits(model, ids, flags[1], PREFIX)
    assert torch.equal(full[:PREFIX], ablated[:PREFIX])
    assert (full[PREFIX:] - ablated[PREFIX:]).abs().max() > 1e-2


def test_rows_of_a_batch_equal_rows_run_alone(model):
    ids = random_ids(LENGTH)
    sets = [[5, 9, 30], [], [38, 39], list(range(10, 20)), [9, 5, 30, 5]]
    together = influence(model, ids, sets, prefix_length=PREFIX)
    alone = torch.cat([influence(model, ids, [one], prefix_length=PREFIX, chunk_size=6) for one in sets])
    split = influence(model, ids, sets, prefix_length=PREFIX, batch=2)
    for other in (alone, split):
        assert ((together - other).abs() <= 1e-6 + 1e-4 * together).all()
    assert (together[1] <= 1e-12).all()
    assert torch.equal(together[0], together[4])


def test_influence_equals_the_naive_kl(model):
    ids, flags = random_ids(LENGTH), flags_of(model, "heads")
    got = influence(model, ids, list(flags), prefix_length=PREFIX)
    full = reference_logits(model, ids)[PREFIX:]
    for row, removed in enumerate(flags):
        ablated = reference_logits(model, ids, removed, PREFIX)[PREFIX:]
        log_p, log_q = full.log_softmax(-1), ablated.log_softmax(-1)
        naive = (log_p.exp() * (log_p - log_q)).sum(-1)
        torch.testing.assert_close(got[row], naive, rtol=2e-3, atol=1e-7)
        torch.testing.assert_close(kl_divergence(full, ablated), naive, rtol=1e-6, atol=1e-13)


def test_caller_and_model_are_as_before(model):
    ids = random_ids(LENGTH).to(model.device)
    before, attention = model(ids).logits, model.config._attn_implementation
    state = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    attributes = [set(module.__dict__) for module in model.modules()]
    hooks = [(*module._forward_hooks, *module._forward_pre_hooks) for module in model.modules()]
    model.train()
    influence(model, ids, [[3]], prefix_length=PREFIX)
    assert model.training
    model.eval()
    assert model.config._attn_implementation == attention
    assert [set(module.__dict__) for module in model.modules()] == attributes
    assert [(*module._forward_hooks, *module._forward_pre_hooks) for module in model.modules()] == hooks
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(tensor, state[name]), name
    assert torch.equal(model(ids).logits, before)


def test_unreachable_token_has_exactly_no_influence():
    """With windows of 8 the first query sees P - 7 and not P - 8, in every layer: prefix states keep the token."""
    model = build("mistral")
    assert layer_windows(model.config) == [8, 8, 8]
    kl = influence(model, random_ids(LENGTH), [[PREFIX - 8], [PREFIX - 7]], prefix_length=PREFIX)
    assert (kl[0] == 0).all()
    assert (kl[1] > 0).any()


def test_old_token_acts_through_a_full_layer():
    kl = influence(build("gemma3"), random_ids(LENGTH), [[10]], prefix_length=PREFIX)
    assert (kl > 0).any()


def test_state_after_an_exception(model):
    ids = random_ids(LENGTH).to(model.device)
    before, attention = model(ids).logits, model.config._attn_implementation

    class Stop(Exception):
        pass

    def stop(module, args):
        raise Stop

    handle = model.base_model.layers[1].mlp.register_forward_pre_hook(stop)
    with pytest.raises(Stop):
        prefill(model, ids, total_length=LENGTH, chunk_size=20)
    handle.remove()
    assert model.config._attn_implementation == attention
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2"])
def test_bfloat16_is_as_good_as_its_floor(name, device):
    """Chunks of another size move a curve no more than the dtype's own noise, which `recompute` measures."""
    model = build(name).to(device, torch.bfloat16)
    ids = random_ids(LENGTH).to(device)
    sets = [[5, 9, 30], [PREFIX - 2, PREFIX - 1], []]
    flags = [removal_flags(one, PREFIX) for one in sets]
    curves = []
    for chunk in (256, 7):
        store, _ = prefill(model, ids[:, :PREFIX], chunk_size=chunk, total_length=LENGTH)
        companion = recomputed_states(model, ids, PREFIX, chunk)
        got = compare_rows(
            model, store, ids[:, PREFIX:], flags, chunk_size=chunk, companion=lambda states=companion: states
        )
        curves.append(got.kl)
    floor = torch.stack([curve[-1] for curve in curves]).mean()
    assert floor > 0 or name != "llama"
    for row in range(2):
        a, b = (curve[row].mean() for curve in curves)
        # KL is quadratic in the logits: noise e on top of a difference d gives 2de + e^2.
        assert (a - b).abs() <= 4 * (max(a, b) * floor).sqrt() + 4 * floor
    assert all(curve[2].max() <= 1e-12 for curve in curves)
