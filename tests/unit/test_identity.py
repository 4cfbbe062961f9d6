"""The identity of a model: the same in other dtypes, another one for other weights or sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from infokv.errors import Refused
from infokv.identity import ModelIdentity, weights_fingerprint

SIZES = {"architecture": "llama", "layers": 3, "heads": 6, "kv_heads": 2, "vocabulary": 89}


def identity(model: nn.Module) -> ModelIdentity:
    return ModelIdentity(**SIZES, weights=weights_fingerprint(model))


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 70), nn.LayerNorm(70), nn.Linear(70, 5, bias=False)).requires_grad_(False)


def sampled(model: nn.Module) -> set[tuple[str, int]]:
    """Name and flat place of each weight that the fingerprint sees, found by changing one at a time."""
    before = weights_fingerprint(model)
    found = set()
    for name, weight in model.named_parameters():
        flat = weight.view(-1)
        for place in range(0, len(flat), 7):
            kept = flat[place].item()
            flat[place] = kept + 1.0
            if weights_fingerprint(model) != before:
                found.add((name, place))
            flat[place] = kept
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_same_weights_in_another_dtype_are_the_same_model(dtype):
    one, other = identity(network()), identity(network().to(dtype))
    assert one.difference(other) is None and other.difference(one) is None


def test_float16_and_bfloat16_of_the_same_weights_are_told_apart_only_where_they_must_be():
    exact = network()
    for weight in exact.parameters():
        weight.copy_((weight * 8).round() / 8)  # exact in both
    one, other = (identity(network_in(exact, dtype)) for dtype in (torch.float16, torch.bfloat16))
    assert one.difference(other) is None


def network_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    twin = network()
    twin.load_state_dict(model.state_dict())
    return twin.to(dtype)


def test_other_weights_and_other_sizes_are_another_model():
    one = identity(network())
    assert one.difference(identity(network(1))) == "other weights in the same sizes"
    assert one.difference(ModelIdentity(**SIZES | {"layers": 4})) == "layers 3 there, 4 here"
    assert one.difference(ModelIdentity(**SIZES)) is None  # its weights are not known yet


def test_every_part_of_a_model_is_looked_at():
    seen = sampled(network())
    sizes = {name: weight.numel() for name, weight in network().named_parameters()}
    by_name = {name: sum(one == name for one, _ in seen) for name in sizes}
    assert all(by_name[name] > 0 for name in sizes if sizes[name] > 20), by_name
    columns = {place % 40 for name, place in seen if name == "0.weight"}
    assert len(columns) > 20  # not one column of a matrix alone


def test_it_reads_few_weights_of_a_large_one():
    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1000, 1000).T)  # as some layers keep theirs

    assert weights_fingerprint(Counted()) == weights_fingerprint(Counted().double())


@pytest.mark.parametrize("values", [None, [], {}, SIZES, SIZES | {"weights": 3}, SIZES | {"weights": "a", "more": 1}])
def test_what_is_no_identity_is_refused(values):
    with pytest.raises(Refused, match="tune again"):
        ModelIdentity.from_dict(values)


def test_dictionary_and_back():
    one = identity(network())
    assert ModelIdentity.from_dict(one.to_dict()) == one
