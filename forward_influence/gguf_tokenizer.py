"""The tokenizer inside a GGUF file, rebuilt by transformers and corrected where the file says otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forward_influence.cache import publish
from forward_influence.errors import UserError
from forward_influence.gguf_cache import entry
from forward_influence.gguf_header import GGUFHeader
from forward_influence.quiet import quiet_libraries

#: Text on which tokenizers with one vocabulary but other rules differ: digits, blanks, accents,
#: capitals, other scripts, characters outside every vocabulary, line ends.
PROBE = "Hello  World\n\n1. In 2024 it's naïve: 3.14 × x²\n\tdef f(a_b):\r\n 東京 😀 ﬁn…\u00a0END  "

#: Values of ``tokenizer.ggml.pre`` whose vocabularies were trained on single digits. transformers
#: splits them as GPT-2 does, which cuts "\n\n1" into other tokens than the model was trained on.
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "codeshell"}

_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def is_trusted(header: GGUFHeader) -> bool:
    """Whether the rebuilt tokenizer is known to split text as the original does."""
    return header.values.get("tokenizer.ggml.pre") in _SINGLE_DIGITS


def tokenizer_folder(header: GGUFHeader, sha256: str) -> Path:
    """Folder with the file's tokenizer, rebuilt on the first call (4 to 20 s, by the size of its vocabulary).

    Raises
    ------
    UserError
        If the file has no vocabulary that transformers can read and write.
    """
    import transformers

    target = entry(sha256) / f"tokenizer-{transformers.__version__}"
    return publish(target, lambda folder: _build(header, folder))


def _build(header: GGUFHeader, folder: Path) -> None:
    from transformers import AutoTokenizer

    try:
        with quiet_libraries():
            rebuilt = AutoTokenizer.from_pretrained(
                header.path.parent, gguf_file=header.path.name, local_files_only=True
            )
    except (ValueError, KeyError, NotImplementedError, TypeError) as error:
        raise UserError(
            f"transformers cannot rebuild the tokenizer of {str(header.path)!r}; name a folder that has it "
            "with --tokenizer DIR."
        ) from error
    tokenizer = _correct(rebuilt, header)
    tokenizer.save_pretrained(folder)
    with quiet_libraries():
        again = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if again.encode(PROBE) != tokenizer.encode(PROBE):
        raise UserError(
            f"the tokenizer of {str(header.path)!r} changes when transformers saves and loads it; name a "
            "folder that has it with --tokenizer DIR."
        )


def _correct(rebuilt: Any, header: GGUFHeader) -> Any:
    """The same tokenizer as a plain class, which is loaded as it was saved; others rebuild their rules."""
    from tokenizers import pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    backend = rebuilt.backend_tokenizer
    if is_trusted(header):
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    ids = {name: header.values.get(f"tokenizer.ggml.{key}") for name, key in _SPECIAL.items()}
    special = {name: backend.id_to_token(index) for name, index in ids.items() if index is not None}
    if header.wants_bos and "bos_token" in special:
        front, known = f"{special['bos_token']}:0 ", [(special["bos_token"], ids["bos_token"])]
    else:
        front, known = "", []
    backend.post_processor = processors.TemplateProcessing(
        single=f"{front}$A:0", pair=f"{front}$A:0 $B:1", special_tokens=known
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=header.values.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{**dict.fromkeys(_SPECIAL), **special},
    )
