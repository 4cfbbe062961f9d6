"""Text to tokens: always the same way, with the special tokens that the model expects, and no more."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forward_influence.errors import UserError
from forward_influence.gguf_header import GGUFHeader, read_header
from forward_influence.gguf_tokenizer import PROBE, is_trusted, tokenizer_folder
from forward_influence.quiet import print_notice, quiet_libraries

if TYPE_CHECKING:
    from forward_influence.sources import ModelSource

#: Share of a GGUF file's vocabulary that a tokenizer given beside it must spell alike.
_SAME_VOCABULARY = 0.9


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer with its special tokens known.

    Attributes
    ----------
    tokenizer : PreTrainedTokenizerBase
    special_prefix : list of int
        What stands in front of a text, BOS as a rule; empty where the model has none.
    bos : bool
        Whether that prefix starts with the BOS token.
    identity : str
        Hash over vocabulary, merges, special tokens and the tokens of a fixed text.
    vocab_size : int or None
        Tokens that the model knows; a higher id is an error. None: not checked.
    """

    tokenizer: Any
    special_prefix: list[int]
    bos: bool
    identity: str
    vocab_size: int | None = None

    def encode(self, text: str, special: bool) -> list[int]:
        """Token ids of `text`; with `special`, as the model expects a whole text, never with two BOS.

        Raises
        ------
        UserError
            If a token is outside the model's vocabulary.
        """
        ids = _encode(self.tokenizer, text, special)
        if special and self.bos and ids[1:2] == self.special_prefix[:1]:
            ids = ids[1:]  # the text brought its own
        if self.vocab_size is not None and ids and (highest := max(ids)) >= self.vocab_size:
            raise UserError(
                f"the tokenizer gives id {highest}, but the model has {self.vocab_size} tokens; "
                "name the model's own tokenizer with --tokenizer DIR."
            )
        return ids

    def decode(self, ids: Any, special: bool = True) -> str:
        """Text of the token ids of one text, nothing tidied; without `special`, special tokens are left out.

        Parameters
        ----------
        ids : sequence of int, or int Tensor or array ``[tokens]``
        special : bool
        """
        return self.tokenizer.decode(
            [int(token) for token in ids], skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )


def load_tokenizer(source: ModelSource, notify: Callable[[str], None] = print_notice) -> LoadedTokenizer:
    """The tokenizer of a model, without its weights.

    Raises
    ------
    UserError
        If there is none, or it does not belong to the model.
    """
    header = read_header(Path(source.path)) if source.kind == "gguf" else None
    if source.tokenizer_path is None:
        folder = tokenizer_folder(header, source.gguf_sha256)
        if not is_trusted(header):
            notify(
                f"The tokenizer was rebuilt from {header.path.name}, which may split some text differently "
                "from the original; name the original's folder with --tokenizer DIR to be sure."
            )
    else:
        folder = Path(source.tokenizer_path)
    tokenizer = _from_folder(folder, source.trust_remote_code)
    if header is not None and source.tokenizer_path is not None:
        _check_belongs(tokenizer, header, folder)
    return wrap_tokenizer(tokenizer, source.config.vocab_size)


def wrap_tokenizer(tokenizer: Any, vocab_size: int | None = None) -> LoadedTokenizer:
    """A :class:`LoadedTokenizer` around a transformers tokenizer."""
    tokenizer.model_max_length = int(1e30)  # the length is our business; silences "sequence longer than"
    prefix = _special_prefix(tokenizer)
    bos = bool(prefix) and prefix[0] == tokenizer.bos_token_id
    return LoadedTokenizer(tokenizer, prefix, bos, _identity(tokenizer, prefix), vocab_size)


def _from_folder(folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        with quiet_libraries():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises Exception itself
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(
            f"no tokenizer can be loaded from {str(folder)!r} ({reason}); name a folder that has one "
            "with --tokenizer DIR."
        ) from error


def _encode(tokenizer: Any, text: str, special: bool) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=special))


def _special_prefix(tokenizer: Any) -> list[int]:
    plain, whole = _encode(tokenizer, PROBE, False), _encode(tokenizer, PROBE, True)
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start]
    raise UserError(
        f"{type(tokenizer).__name__} changes a text's own tokens when it adds special tokens, so positions "
        "would not be comparable; choose another tokenizer with --tokenizer DIR."
    )


def _identity(tokenizer: Any, prefix: list[int]) -> str:
    facts = {
        "model": _model_facts(tokenizer),
        "vocabulary": sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]),
        "special": {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())},
        "prefix": prefix,
        "probe": _encode(tokenizer, PROBE, False),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return f"tokenizer:{digest[:32]}"


def _model_facts(tokenizer: Any) -> dict:
    """Kind, merges and scores. The rest of a serialised tokenizer changes its spelling between versions."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {"type": type(tokenizer).__name__}
    model = json.loads(backend.to_str())["model"]
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model.get("merges") or []]
    scores = model["vocab"] if isinstance(model.get("vocab"), list) else None
    return {"type": model.get("type"), "merges": merges, "scores": scores}


def _check_belongs(tokenizer: Any, header: GGUFHeader, folder: Path) -> None:
    tokens = header.tokens
    checked = range(0, len(tokens), max(1, len(tokens) // 512))
    alike = sum(tokenizer.convert_ids_to_tokens(index) == _spelling(tokens[index]) for index in checked)
    if alike < _SAME_VOCABULARY * len(checked):
        raise UserError(
            f"the tokenizer in {str(folder)!r} does not belong to {header.path.name}: only {alike} of "
            f"{len(checked)} tokens compared are the same; name the folder of the model's own tokenizer."
        )


def _spelling(token: bytes) -> str:
    return token.decode("utf-8", "replace")
