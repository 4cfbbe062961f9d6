"""What identifies the weights of a model folder, without loading them and whatever its path."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from forward_influence.cache import file_sha256
from forward_influence.errors import UserError

#: Notes in config.json that say who wrote it, not what the model computes.
_NOTES = ("transformers_version", "_name_or_path", "_commit_hash", "dtype", "torch_dtype", "use_cache")


def folder_fingerprint(folder: Path) -> str:
    """Hex digest over the configuration and every byte of the weight files.

    Samples would not do: two models may differ in a single head, and their rows must not join as one run.
    So weights spread over other files count as others. Hashes of big files are remembered.

    Raises
    ------
    UserError
        If the folder has no weights, or one of its files is damaged or cannot be read.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for note in _NOTES:
        config.pop(note, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        raise UserError(
            f"{str(folder)!r} has no *.safetensors or *.bin weights; give a folder written by "
            "save_pretrained, a GGUF file, an alias or a hub id."
        )
    _refuse_damaged(files)
    for file in files:
        digest.update(_hash(file).encode())
    return digest.hexdigest()[:32]


def _refuse_damaged(files: list[Path]) -> None:
    """Open what can be opened in no time: a file cut short is known by its header."""
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, framework="numpy"):
                    pass
        except (SafetensorError, OSError) as error:
            raise UserError(f"the weights in {str(file)!r} are damaged ({error}); fetch them again.") from error


def _hash(file: Path) -> str:
    try:
        return file_sha256(file)
    except OSError as error:
        raise UserError(
            f"the weights in {str(file)!r} cannot be read ({error.strerror or error}); check the file and its "
            "permissions."
        ) from error
