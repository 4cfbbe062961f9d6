"""The tokenizer inside a GGUF file, rebuilt by transformers and corrected where the file says otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forward_influence.cache import publish
from forward_influence.errors import UserError
from forward_influence.gguf_cache import entry
from forward_influence.gguf_header import GGUFHeader
from forward_influence.quiet import quiet_libraries

#: Values of ``tokenizer.ggml.pre`` whose vocabularies were trained on single digits. transformers
#: splits them as GPT-2 does, which cuts "\n\n1" into other tokens than the model was trained on.
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "codeshell"}

_SPECIAL = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id"}


def is_trusted(header: GGUFHeader) -> bool:
    """Whether the rebuilt tokenizer is known to split text as the original does."""
    return header.values.get("tokenizer.ggml.pre") in _SINGLE_DIGITS


def tokenizer_folder(header: GGUFHeader, sha256: str) -> Path:
    """Folder with the file's tokenizer, rebuilt on the first call.

    Raises
    ------
    UserError
        If the file has no vocabulary that transformers can read.
    """
    import transformers

    target = entry(sha256) / f"tokenizer-{transformers.__version__}"
    return publish(target, lambda folder: _rebuild(header).save_pretrained(folder) and None)


def _rebuild(header: GGUFHeader) -> Any:
    from transformers import AutoTokenizer

    try:
        with quiet_libraries():
            tokenizer = AutoTokenizer.from_pretrained(
                header.path.parent, gguf_file=header.path.name, local_files_only=True
            )
    except (ValueError, KeyError, NotImplementedError, TypeError) as error:
        raise UserError(
            f"transformers cannot rebuild the tokenizer of {str(header.path)!r}; name a folder that has it "
            "with --tokenizer DIR."
        ) from error
    for name, key in _SPECIAL.items():
        index = header.values.get(f"tokenizer.ggml.{key}")
        if index is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(index))
    if is_trusted(header):
        from tokenizers import pre_tokenizers

        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.add_bos_token = header.wants_bos  # also rewrites what is put around a text
    return tokenizer
