"""The selectors that come along; scorers of infokv are selectors too (see :mod:`infokv.scorer`)."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from forward_influence.errors import UserError
from forward_influence.inputs import shown, whole_number
from forward_influence.selectors import NotListed, Selector
from infokv.errors import Refused
from infokv.scorer import Scorer
from infokv.scorers.snapkv import SnapKV
from infokv.signals import TokenSignals, signal


@dataclass(frozen=True)
class Attention(SnapKV):
    """Tokens that the last queries of the prefix attend to (SnapKV's score).

    Parameters
    ----------
    window : int
        Last queries of the prefix whose attention counts.
    kernel : int
        Width of the average pool over positions, odd.
    """


@dataclass(frozen=True)
class Entropy(Scorer):
    """Tokens that were hard to predict: entropy of the distribution from which they came.

    Parameters
    ----------
    k : int or None
        Most likely tokens over which entropy is taken; None for the whole vocabulary.
    """

    k: int | None = 256
    align: ClassVar[str] = "self"
    sign: ClassVar[int] = 1

    def __post_init__(self):
        k = whole_number(self.k)
        if self.k is not None and (k is None or k < 1):
            raise Refused(f"k is {self.k}; it must be a whole number of at least 1, or none for the whole vocabulary.")
        object.__setattr__(self, "k", k)

    @property
    def needs(self) -> tuple[str, ...]:
        return (signal("entropy", k="full" if self.k is None else self.k, align=self.align),)

    def score(self, signals: TokenSignals) -> torch.Tensor:
        return self.sign * signals[self.needs[0]][None, None]


@dataclass(frozen=True)
class EntropyNext(Entropy):
    """Tokens after which the next one was hard to predict.

    Parameters
    ----------
    k : int or None
        Most likely tokens over which entropy is taken; None for the whole vocabulary.
    """

    align: ClassVar[str] = "next"


@dataclass(frozen=True)
class LowEntropy(Entropy):
    """Tokens that were easy to predict: the opposite of ``entropy``, a control.

    Parameters
    ----------
    k : int or None
        Most likely tokens over which entropy is taken; None for the whole vocabulary.
    """

    sign: ClassVar[int] = -1


#: Positions as text: digits of ASCII, few enough for a position.
_LIST = r"\s*[0-9]{1,18}\s*(\+\s*[0-9]{1,18}\s*)*"


@dataclass(frozen=True)
class Positions(Selector):
    """Explicit positions: ``positions:at=5+9+12``, or ``positions:file.json`` (document id to list).

    Parameters
    ----------
    at : str
        Positions joined by ``+``, the same for every document.
    """

    example: ClassVar[str] = "positions:at=5+9+12"
    explicit: ClassVar[bool] = True

    at: str = ""
    by_document: dict | None = field(default=None, compare=False, repr=False, kw_only=True)
    source: str = field(default="", repr=False, kw_only=True)

    def __post_init__(self):
        object.__setattr__(self, "at", "" if self.at is None else str(self.at))
        if not self.at and self.by_document is None:
            raise UserError("positions needs to know where: write positions:at=5+9+12 or positions:file.json.")
        if self.at and not re.fullmatch(_LIST, self.at):
            raise UserError(f"positions:at={shown(self.at)} is not a list of positions; write it like at=5+9+12.")

    @classmethod
    def load(cls, path: str) -> Positions:
        """From a JSON object that maps document ids to lists of positions."""
        try:
            raw = Path(path).read_bytes()
            mapping = json.loads(raw)
        except OSError as error:
            raise UserError(f"{path!r} cannot be read ({error.strerror}); check the path.") from error
        except ValueError as error:
            raise UserError(f"{path!r} is not JSON ({error}).") from error
        fits = isinstance(mapping, dict) and all(
            isinstance(places, list) and all(type(place) is int for place in places) for places in mapping.values()
        )
        if not fits:
            raise UserError(f"{path!r} must be a JSON object of document id to a list of positions.")
        digest = hashlib.sha256(json.dumps(mapping, sort_keys=True).encode()).hexdigest()[:8]
        return cls(by_document=mapping, source=f"{Path(path).name}@{digest}")

    def listed(self) -> list[int]:
        """All positions of all documents."""
        if self.by_document is None:
            return self.select(None, 0, "")
        return [place for places in self.by_document.values() for place in places]

    def canonical(self) -> str:
        if self.by_document is not None:
            return f"positions:{self.source}"
        return "positions:at=" + "+".join(map(str, self.select(None, 0, "")))

    def select(self, signals, count: int, document: str) -> list[int]:
        if self.by_document is None:
            return sorted({int(part) for part in self.at.split("+")})
        if document not in self.by_document:
            raise NotListed(f"{self.source} lists no positions for it")
        return sorted(set(self.by_document[document]))


@dataclass(frozen=True)
class NoRemoval(Selector):
    """Nothing is removed: a real row of the batch, which proves that the rows are alike."""

    def select(self, signals, count: int, document: str) -> list[int]:
        return []


@dataclass(frozen=True)
class Recompute(Selector):
    """Nothing is removed, and the reference is computed again in other chunks: the numerical floor.

    What it shows is the error of machine and dtype; an influence below it is not a measurement.
    """

    def select(self, signals, count: int, document: str) -> list[int]:
        return []
