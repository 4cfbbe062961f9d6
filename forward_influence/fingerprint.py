"""What identifies the weights of a model folder, without loading them and whatever its path."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from forward_influence.cache import file_sha256
from forward_influence.errors import UserError

#: Weights read for a fingerprint.
SAMPLES = 1024

#: Notes in config.json that say who wrote it, not what the model computes.
_NOTES = ("transformers_version", "_name_or_path", "_commit_hash", "dtype", "torch_dtype", "use_cache")


def folder_fingerprint(folder: Path) -> str:
    """Hex digest over the configuration and 1,024 fixed weights, spread evenly over all tensors.

    Names, shapes and dtypes of all tensors are in it; how they are spread over files is not. PyTorch
    ``.bin`` files cannot be read in part, so they are hashed whole.

    Raises
    ------
    UserError
        If the folder has no weights, or one of its files is damaged.
    """
    digest = hashlib.sha256()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for note in _NOTES:
        config.pop(note, None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    if files := sorted(folder.glob("*.safetensors")):
        _add_samples(digest, files)
    elif files := sorted(folder.glob("*.bin")):
        for file in files:
            digest.update(file_sha256(file).encode())
    else:
        raise UserError(
            f"{str(folder)!r} has no *.safetensors or *.bin weights; give a folder written by "
            "save_pretrained, a GGUF file, an alias or a hub id."
        )
    return digest.hexdigest()[:32]


def _add_samples(digest, files: list[Path]) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        handles = [safe_open(file, framework="pt") for file in files]
        where = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118, no mapping
        names = sorted(where)
        for order, name in enumerate(names):
            piece = where[name].get_slice(name)
            digest.update(json.dumps([name, piece.get_dtype(), piece.get_shape()]).encode())
            # sample i of all goes to tensor i * len(names) // SAMPLES
            count = -(-(order + 1) * SAMPLES // len(names)) - -(-order * SAMPLES // len(names))
            for index in _positions(piece.get_shape(), count):
                digest.update(_bytes(piece, index))
    except SafetensorError as error:
        raise UserError(f"the weights in {str(files[0].parent)!r} are damaged ({error}); fetch them again.") from error


def _positions(shape: list[int], count: int) -> list[tuple[int, ...]]:
    """`count` positions spread over a tensor of `shape`."""
    size = 1
    for length in shape:
        size *= length
    positions = []
    for flat in ((2 * k + 1) * size // (2 * count) for k in range(count if size else 0)):
        index = []
        for length in reversed(shape):
            index.append(flat % length)
            flat //= length
        positions.append(tuple(reversed(index)))
    return positions


def _bytes(piece, index: tuple[int, ...]) -> bytes:
    import torch

    value = piece[tuple(slice(i, i + 1) for i in index)] if index else piece[...]
    return bytes(value.contiguous().view(torch.uint8).flatten().tolist())
