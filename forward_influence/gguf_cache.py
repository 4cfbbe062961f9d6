"""A GGUF file becomes an ordinary model folder, once.

Three parts are made when first needed and kept under ``models/<sha256>-c<converter>`` in the cache
folder: ``config`` (quick), ``tokenizer-<transformers version>`` (some seconds; versions rebuild
sentencepiece vocabularies differently) and ``weights`` (float32 safetensors, some ten seconds).
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forward_influence.architectures import refuse_unsupported
from forward_influence.cache import cache_root, publish
from forward_influence.errors import UserError
from forward_influence.gguf_header import GGUFHeader
from forward_influence.quiet import bars_on_terminals_only, quiet_libraries

#: Raised when the conversion changes; old conversions are then made anew.
CONVERTER = 1

#: GGUF facts that change numbers, and where transformers must have put them.
_FACTS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def entry(sha256: str) -> Path:
    """Folder of the parts made from the GGUF file with this hash."""
    return cache_root() / "models" / f"{sha256[:16]}-c{CONVERTER}"


def is_converted(sha256: str) -> bool:
    return (entry(sha256) / "weights").is_dir()


def config_folder(header: GGUFHeader, sha256: str) -> Path:
    """Folder with ``config.json``, made by transformers from the file's metadata.

    Raises
    ------
    UserError
        If transformers does not know the architecture, or drops a fact of the file that changes numbers.
    """
    refuse_unsupported({"model_type": header.architecture}, str(header.path))

    def build(folder: Path) -> None:
        config = _read_config(header)
        _refuse_dropped_facts(header, config)
        config.save_pretrained(folder)

    return publish(entry(sha256) / "config", build)


def _read_config(header: GGUFHeader) -> Any:
    """The configuration, from a copy of the file that has its facts and tensor names but not its bulk."""
    import numpy as np
    from gguf import GGUFWriter
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder, quiet_libraries():
        writer = GGUFWriter(Path(folder) / "header.gguf", header.architecture)
        for key, value in header.values.items():
            if key != "general.architecture":
                _add_value(writer, key, value)
        if header.fact("vocab_size") is None:
            writer.add_uint32(f"{header.architecture}.vocab_size", header.vocab_size)
        for name in header.tensors:
            writer.add_tensor(name, np.zeros(1, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        try:
            config = AutoConfig.from_pretrained(folder, gguf_file="header.gguf", local_files_only=True)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise UserError(
                f"{str(header.path)!r} is a GGUF file of architecture {header.architecture!r}, which "
                "transformers cannot read; give the original model folder instead."
            ) from error
    config.vocab_size = header.vocab_size
    return config


def _add_value(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif value < 0:
        writer.add_int64(key, value)
    else:
        writer.add_uint64(key, value)


def _refuse_dropped_facts(header: GGUFHeader, config: Any) -> None:
    """transformers reads the keys it knows and passes over the others without a word."""
    dropped = [
        f"{key} = {header.fact(key)}"
        for key, attribute in _FACTS.items()
        if header.fact(key) and header.fact(key) != getattr(config, attribute, None)
    ]
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if theta := header.fact("rope.freq_base"):
        taken = rope.get("rope_theta", getattr(config, "rope_theta", None))
        if taken is None or not math.isclose(theta, taken, rel_tol=1e-6):
            dropped.append(f"rope.freq_base = {theta:g}")
    if rope.get("rope_type", "default") == "default":
        if header.fact("rope.scaling.type", "none") != "none":
            dropped.append(f"rope.scaling.type = {header.fact('rope.scaling.type')}")
        dropped += [name for name in _ROPE_TENSORS if name in header.tensors]
    if dropped:
        raise UserError(
            f"{str(header.path)!r} states {', '.join(dropped)}, which transformers drops when it reads a "
            f"{header.architecture!r} GGUF file; give the original model folder instead."
        )


def weights_folder(header: GGUFHeader, sha256: str, notify: Callable[[str], None]) -> Path:
    """Folder with ``config.json`` and float32 safetensors, converted on the first call.

    Raises
    ------
    UserError
        If the disk is too small, or the file lacks weights that the model needs.
    """
    target = entry(sha256) / "weights"
    if target.is_dir():
        return target
    config = config_folder(header, sha256)
    size = 4 * sum(math.prod(shape) for shape, _, _ in header.tensors.values())
    existing = next(folder for folder in (target, *target.parents) if folder.is_dir())
    if (free := shutil.disk_usage(existing).free) < size:
        raise UserError(
            f"converting {header.path.name} takes {size / 1e9:.1f} GB in {str(cache_root())!r}, which has "
            f"{free / 1e9:.1f} GB free; free some space or name another folder in FORWARD_INFLUENCE_CACHE."
        )
    notify(
        f"Converting {header.path.name} once to float32: {size / 1e9:.2f} GB of disk in {target}, "
        f"and up to {2 * size / 1e9:.1f} GB of memory while it runs."
    )
    return publish(target, lambda folder: _convert(header, config, folder))


def _convert(header: GGUFHeader, config_path: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with quiet_libraries(), bars_on_terminals_only():
        config = AutoConfig.from_pretrained(config_path, local_files_only=True)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # The same function that from_pretrained(gguf_file=...) calls, which insists on accelerate.
        tensors = load_gguf_checkpoint(
            str(header.path), return_tensors=True, model_to_load=model, torch_dtype=torch.float32
        )["tensors"]
        missing = model.load_state_dict(tensors, strict=False).missing_keys
        tied = model.lm_head.weight is model.get_input_embeddings().weight if hasattr(model, "lm_head") else False
        missing = [name for name in missing if not (tied and name == "lm_head.weight")]
        if missing:
            raise UserError(
                f"{str(header.path)!r} lacks {len(missing)} weights that a {config.model_type!r} model needs "
                f"(first: {missing[0]}), which would stay random; give the original model folder instead."
            )
        model.save_pretrained(folder)
