"""What a corpus is: documents with ids, in an order that depends on the seed and the ids alone."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, overload


@dataclass(frozen=True)
class Document:
    """A text under an id that is unique in its corpus."""

    id: str
    text: str


@dataclass(frozen=True)
class TokenizedDocument:
    """Token ids of one document, special tokens included."""

    id: str
    ids: tuple[int, ...]

    @property
    def sha(self) -> str:
        """First 16 hex digits of the SHA-256 over the decimal token ids, joined by commas."""
        return hashlib.sha256(",".join(map(str, self.ids)).encode()).hexdigest()[:16]


class Encode(Protocol):
    """A tokenizer as this folder needs it: text in, token ids out."""

    def __call__(self, text: str, *, special: bool) -> Sequence[int]:
        """Token ids of the text, with or without the tokenizer's own special tokens."""
        ...


class TokenizedDocuments(Sequence[TokenizedDocument]):
    """Documents in their order, each tokenised when it is asked for and not kept.

    A slice is lazy too, so ``documents[2::16]`` is a shard and ``documents[:100]`` a limit.

    Parameters
    ----------
    entries : sequence of (str, callable)
        Id of each document and what gives its token ids.
    """

    def __init__(self, entries: Sequence[tuple[str, Callable[[], Sequence[int]]]]) -> None:
        self._entries = entries

    @property
    def ids(self) -> list[str]:
        """Ids of the documents, in order; nothing is read or tokenised."""
        return [name for name, _ in self._entries]

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> TokenizedDocument: ...
    @overload
    def __getitem__(self, index: slice) -> TokenizedDocuments: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return TokenizedDocuments(self._entries[index])
        name, tokens = self._entries[index]
        return TokenizedDocument(name, tuple(tokens()))


@dataclass(frozen=True)
class Corpus(ABC):
    """Documents in a seeded order. Iterating gives :class:`Document`, read one at a time.

    Attributes
    ----------
    name : str
        ``"builtin"``, ``"arxiv"`` or ``"local"``.
    identity : str
        What enters a run's hash: the kind, and the version of the text where it is known.
    seed : int
        Seed of the order.
    notices : tuple of str
        Sentences for the user: which corpus was taken and why, how much it holds.
    problems : tuple of str
        Sentences about records and files that were left out.
    """

    name: str
    identity: str
    seed: int = 0
    notices: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    @abstractmethod
    def size(self) -> int | None:
        """Number of documents; None where it depends on the tokenizer and the length asked for."""

    @abstractmethod
    def __iter__(self) -> Iterator[Document]: ...

    @abstractmethod
    def tokenized(self, encode: Encode, length: int) -> TokenizedDocuments:
        """The documents as token ids, with the tokenizer's own special tokens.

        Parameters
        ----------
        encode : Encode
        length : int
            Tokens wanted of each document. Running text is cut into documents of exactly this many;
            documents that exist as such are given whole, shorter or longer.
        """


@dataclass(frozen=True)
class RecordCorpus(Corpus):
    """A corpus whose documents exist as records; each text is read when it is asked for.

    Attributes
    ----------
    entries : sequence of (str, callable)
        Id of each document and what reads its text, in any order.
    """

    entries: Sequence[tuple[str, Callable[[], str]]] = field(default=(), repr=False)

    @property
    def size(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Document]:
        for name, read in self._ordered():
            yield Document(name, read())

    def tokenized(self, encode: Encode, length: int) -> TokenizedDocuments:
        return TokenizedDocuments([(name, partial(_read_and_encode, read, encode)) for name, read in self._ordered()])

    def _ordered(self) -> list[tuple[str, Callable[[], str]]]:
        readers = dict(self.entries)
        return [(name, readers[name]) for name in seeded_order(readers, self.seed)]


def seeded_order(names: Iterable[str], seed: int) -> list[str]:
    """Names in an order in which each one's place depends only on the seed and itself.

    More names leave the order of the others as it was, which a shuffled list would not.
    """
    return sorted(names, key=lambda name: (hashlib.sha256(f"{seed}\n{name}".encode()).digest(), name))


def _read_and_encode(read: Callable[[], str], encode: Encode) -> Sequence[int]:
    return encode(read(), special=True)
