"""Device, dtype and attention are decided, or refused with what is there."""

import contextlib

import pytest
import torch

from forward_influence.errors import UserError
from forward_influence.placement import resolve_attention, resolve_device, resolve_dtype, torch_dtype


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.usefixtures("no_gpu")
def test_without_gpu():
    assert resolve_device() == resolve_device("auto") == resolve_device("cpu") == "cpu"
    with pytest.raises(UserError, match=r"device 'cuda:1' .*not on this machine; choose auto, cpu\."):
        resolve_device("cuda:1")
    with pytest.raises(UserError, match="'cuda'"):
        resolve_device("cuda")


@pytest.mark.usefixtures("two_gpus")
def test_with_gpus():
    assert resolve_device() == resolve_device("cuda") == "cuda:0"
    assert resolve_device("cuda:1") == "cuda:1"
    assert resolve_device("cpu") == "cpu"
    with pytest.raises(UserError, match=r"choose auto, cpu or cuda:0 or cuda:1\."):
        resolve_device("cuda:2")


@pytest.mark.parametrize("device", ["balanced", "sequential", "mps"])
def test_several_devices_are_refused_with_the_way_out(device):
    with pytest.raises(UserError, match="--shard"):
        resolve_device(device)


@pytest.mark.parametrize(("name", "expected"), [("fp32", "float32"), ("bf16", "bfloat16"), ("half", "float16")])
def test_dtype_aliases(name, expected):
    assert resolve_dtype(name) == expected
    assert torch_dtype(expected) is getattr(torch, expected)


@pytest.mark.usefixtures("two_gpus")
def test_what_torch_and_numpy_give_is_taken():
    import numpy as np

    for device, expected in (
        (torch.device("cpu"), "cpu"), (torch.device("cuda"), "cuda:0"), (torch.device("cuda", 1), "cuda:1"),
        (1, "cuda:1"), (np.int64(1), "cuda:1"),
    ):  # fmt: skip
        assert resolve_device(device) == expected
    for kind in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert torch_dtype(resolve_dtype(kind)) is kind
    assert resolve_dtype("torch.bfloat16") == "bfloat16"
    with pytest.raises(UserError, match="dtype 'int8' is unknown"):
        resolve_dtype(torch.int8)
    for device in (2, True, torch.device("meta"), ["cpu"], None):
        with pytest.raises(UserError, match="cannot be used"):
            resolve_device(device)


def test_dtype_auto(monkeypatch, two_gpus):
    assert resolve_dtype("auto", "cpu") == "float32"
    for native, expected in ((True, "bfloat16"), (False, "float16")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, native=native: native)
        assert resolve_dtype("auto", "cuda:0") == expected


def test_unknown_dtype():
    with pytest.raises(UserError, match=r"dtype 'int8' is unknown; choose auto, float32"):
        resolve_dtype("int8")


def test_attention():
    assert resolve_attention(None) is None
    assert resolve_attention("eager") == "eager"
    with pytest.raises(UserError, match="'fast' is unknown; choose sdpa"):
        resolve_attention("fast")
    with pytest.raises(UserError, match="needs a CUDA device"):
        resolve_attention("flash_attention_2", "cpu")
