"""A folder's fingerprint: of every weight and of what the configuration computes, not of where the folder lies."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from forward_influence import cache
from forward_influence.errors import UserError
from forward_influence.fingerprint import folder_fingerprint

CONFIG = {"model_type": "llama", "hidden_size": 8, "transformers_version": "5.12.0"}


def write(folder, tensors, *, config=CONFIG, files=1):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    for part in range(files):
        chosen = {name: tensors[name] for name in names[part::files]}
        save_file(chosen, folder / f"model-{part}.safetensors")
    return folder


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (40, 30), "b": (7,), "c": (3, 4, 5), "d": (64, 64)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def test_same_weights_same_fingerprint(tmp_path, tensors):
    first = folder_fingerprint(write(tmp_path / "one", tensors, files=3))
    assert first == folder_fingerprint(write(tmp_path / "moved", tensors, files=3))
    newer = {**CONFIG, "transformers_version": "5.24.0"}
    assert first == folder_fingerprint(write(tmp_path / "newer", tensors, config=newer, files=3))


def test_other_weights_or_configuration_differ(tmp_path, tensors):
    first = folder_fingerprint(write(tmp_path / "one", tensors))
    seen = {first}
    for name in tensors:
        changed = {**tensors, name: tensors[name] + 1}
        seen.add(folder_fingerprint(write(tmp_path / f"changed-{name}", changed)))
    seen.add(folder_fingerprint(write(tmp_path / "wide", {k: v.float() for k, v in tensors.items()})))
    renamed = {("e" if k == "d" else k): v for k, v in tensors.items()}
    seen.add(folder_fingerprint(write(tmp_path / "renamed", renamed)))
    seen.add(folder_fingerprint(write(tmp_path / "config", tensors, config={**CONFIG, "hidden_size": 9})))
    assert len(seen) == 1 + 4 + 3


@given(name=st.sampled_from("abcd"), place=st.integers(0, 10**6))
def test_every_single_weight_counts(tmp_path_factory, name, place):
    """One number among thousands is another model: a sample of the weights would pass over it."""
    folder = tmp_path_factory.mktemp("model")
    weights = {key: torch.zeros(64, 96) for key in "abcd"}
    before = folder_fingerprint(write(folder, weights))
    weights[name].view(-1)[place % weights[name].numel()] = 1
    assert folder_fingerprint(write(folder, weights)) != before


def test_one_head_edited_is_another_model(tmp_path, tensors):
    before = folder_fingerprint(write(tmp_path / "one", tensors))
    tensors["d"][:, 16:32] = 0  # the columns of an output projection that belong to one head
    assert folder_fingerprint(write(tmp_path / "two", tensors)) != before


def test_big_files_are_read_once(tmp_path, tensors, monkeypatch):
    monkeypatch.setenv("FORWARD_INFLUENCE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "REMEMBER_HASH_FROM", 1)
    folder = write(tmp_path / "one", tensors, files=2)
    first = folder_fingerprint(folder)
    monkeypatch.setattr(cache, "_sha256", lambda path: pytest.fail("read again"))
    assert folder_fingerprint(folder) == first


def test_bin_files_are_hashed_whole(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(UserError, match="no \\*.safetensors or \\*.bin weights"):
        folder_fingerprint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"abc")
    first = folder_fingerprint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"abd")
    assert folder_fingerprint(tmp_path) != first


def test_damaged_or_unreadable_file_is_one_sentence(tmp_path, tensors):
    folder = write(tmp_path / "one", tensors)
    file = folder / "model-0.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(UserError, match="damaged"):
        folder_fingerprint(folder)
    file.unlink()
    (folder / "pytorch_model.bin").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"pytorch_model.bin' cannot be read \(No such file"):
        folder_fingerprint(folder)
