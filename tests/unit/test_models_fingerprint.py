"""A folder's fingerprint: of what the weights are, not of where or in how many files they lie."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from forward_influence.errors import UserError
from forward_influence.fingerprint import SAMPLES, _positions, folder_fingerprint

CONFIG = {"model_type": "llama", "hidden_size": 8, "transformers_version": "5.12.0"}


def write(folder, tensors, *, config=CONFIG, files=1):
    folder.mkdir()
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
    first = folder_fingerprint(write(tmp_path / "one", tensors))
    assert first == folder_fingerprint(write(tmp_path / "moved", tensors))
    assert first == folder_fingerprint(write(tmp_path / "split", tensors, files=3))
    newer = {**CONFIG, "transformers_version": "5.24.0"}
    assert first == folder_fingerprint(write(tmp_path / "newer", tensors, config=newer))


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


def test_bin_files_are_hashed_whole(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(UserError, match="no \\*.safetensors or \\*.bin weights"):
        folder_fingerprint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"abc")
    first = folder_fingerprint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"abd")
    assert folder_fingerprint(tmp_path) != first


def test_damaged_file_is_one_sentence(tmp_path, tensors):
    folder = write(tmp_path / "one", tensors)
    file = folder / "model-0.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(UserError, match="damaged"):
        folder_fingerprint(folder)


@given(st.lists(st.integers(1, 9), min_size=0, max_size=4), st.integers(1, 40))
def test_positions_are_spread_over_the_tensor(shape, count):
    positions = _positions(shape, count)
    size = int(np.prod(shape, dtype=int))
    flat = [int(np.ravel_multi_index(index, shape)) if shape else 0 for index in positions]
    assert len(flat) == count
    assert flat == sorted(flat)
    assert all((k * size) // count <= place <= ((k + 1) * size) // count for k, place in enumerate(flat))


@pytest.mark.parametrize("n_tensors", [1, 3, 272, 1024, 1500])
def test_samples_add_up(n_tensors, tmp_path, monkeypatch):
    import forward_influence.fingerprint as module

    counts = []
    monkeypatch.setattr(module, "_positions", lambda shape, count: counts.append(count) or [])
    write(tmp_path / "one", {f"t{i}": torch.zeros(1) for i in range(n_tensors)})
    folder_fingerprint(tmp_path / "one")
    assert sum(counts) == SAMPLES
    assert max(counts) - min(counts) <= 1
