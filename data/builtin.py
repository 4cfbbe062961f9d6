"""The embedded corpus: the Python language reference that ships with CPython, cut into documents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from forward_influence.data.documents import Corpus, Document, Encode, TokenizedDocuments, seeded_order
from forward_influence.data.errors import DataError

#: Characters on which the tokenizer's special tokens are told from the text's own.
_PROBE = 1000


def builtin_text() -> str:
    """All topics of ``pydoc_data.topics``, sorted by name and joined by newlines.

    Raises
    ------
    DataError
        If this Python was packaged without them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "Corpus 'builtin' needs the module pydoc_data, which this Python was packaged without; "
            "name another corpus: 'arxiv', or a .jsonl, .parquet or .txt file or folder."
        ) from error
    return "\n".join(topics[name] for name in sorted(topics))


@dataclass(frozen=True)
class BuiltinCorpus(Corpus):
    """Running text, tokenised once and cut without overlap. Untokenised, it is one document.

    Attributes
    ----------
    text : str
    """

    text: str = field(default="", repr=False)

    @property
    def size(self) -> None:
        return None

    def __iter__(self) -> Iterator[Document]:
        yield Document(f"builtin-{_sha(self.text)[:8]}", self.text)

    def tokenized(self, encode: Encode, length: int) -> TokenizedDocuments:
        """Documents of exactly `length` tokens, the leading special tokens included in each.

        Raises
        ------
        DataError
            If the text does not fill one document, or the special tokens cannot be told from the text.
        """
        prefix = leading_special_tokens(encode, self.text[:_PROBE])
        tokens = encode(self.text, special=False)
        step = length - len(prefix)
        count = len(tokens) // step if step > 0 else 0
        if count == 0:
            raise DataError(
                f"Corpus 'builtin' gives no document of {length} tokens with this tokenizer "
                f"(at least {len(prefix) + 1}, at most {len(tokens) + len(prefix)}); "
                "ask for another prefix and horizon, or name a corpus of longer documents."
            )
        stem = f"builtin-{_sha(self.text)[:8]}"
        pieces = {
            f"{stem}-{index:04d}": (*prefix, *tokens[index * step : (index + 1) * step]) for index in range(count)
        }
        return TokenizedDocuments(
            [(name, partial(pieces.__getitem__, name)) for name in seeded_order(pieces, self.seed)]
        )


def load_builtin(seed: int, *, reasons: Sequence[str] = ()) -> BuiltinCorpus:
    """The embedded corpus; its identity carries the hash of its text, which Python versions change.

    Parameters
    ----------
    seed : int
    reasons : sequence of str
        Sentences to put before the corpus's own notice.
    """
    text = builtin_text()
    return BuiltinCorpus(
        name="builtin",
        identity=f"builtin:{_sha(text)}",
        seed=seed,
        notices=(*reasons, f"Corpus 'builtin': the Python language reference, {len(text):,} characters."),
        text=text,
    )


def leading_special_tokens(encode: Encode, text: str) -> tuple[int, ...]:
    """What the tokenizer puts before a text (BOS, say), found by comparing with and without.

    Raises
    ------
    DataError
        If the ids without special tokens are not a stretch of the ids with them.
    """
    with_special, plain = list(encode(text, special=True)), list(encode(text, special=False))
    for start in range(len(with_special) - len(plain) + 1):
        if with_special[start : start + len(plain)] == plain:
            return tuple(with_special[:start])
    raise DataError(
        "Corpus 'builtin' cannot be cut for a tokenizer that splits text differently with its special tokens "
        "than without; name a .jsonl, .parquet or .txt file or folder instead."
    )


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
