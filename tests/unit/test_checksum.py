"""A checksum of weights: equal for equal weights, another one after any single change."""

import pytest
import torch
from tiny_models import build

from forward_influence.checksum import weights_checksum


def small(dtype=torch.float32):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    model.register_buffer("scale", torch.tensor(1.0))
    model.register_parameter("nothing", torch.nn.Parameter(torch.empty(0, 4)))
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_single_change_shows(dtype):
    first = weights_checksum(small(dtype))
    assert weights_checksum(small(dtype)) == first
    seen, changes = {first}, 1
    for name, weight in small(dtype).state_dict().items():
        for place in range(weight.numel()):
            model = small(dtype)
            model.state_dict()[name].view(-1)[place] += 1
            seen.add(weights_checksum(model))
            changes += 1
    assert len(seen) == changes > 60


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.double(),
        lambda model: model[0].weight.data.copy_(model[0].weight.data[[1, 0, 2, 3, 4]]),
        lambda model: model[0].weight.data.copy_(model[0].weight.data[:, [1, 0, 2, 3, 4, 5, 6]]),
        lambda model: model[0].weight.data.neg_(),
        lambda model: setattr(model[0], "weight", torch.nn.Parameter(model[0].weight.data.reshape(7, 5))),
        lambda model: model.add_module("more", torch.nn.Linear(1, 1)),
    ],
)
def test_changes_as_a_whole_show(change):
    model = small()
    first = weights_checksum(model)
    change(model)
    assert weights_checksum(model) != first


def test_neither_threads_nor_a_forward_pass_change_it():
    model = build("llama").eval()
    first = weights_checksum(model)
    model(torch.tensor([[1, 5, 9]]))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert weights_checksum(model) == first
    finally:
        torch.set_num_threads(threads)


def test_nan_is_a_value_like_others():
    model = small()
    model[0].weight.data[0, 0] = float("nan")
    assert weights_checksum(model) == weights_checksum(model)
