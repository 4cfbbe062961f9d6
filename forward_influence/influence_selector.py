"""The selector that knows: positions ranked by the influence that each had when it was removed alone."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from forward_influence.errors import UserError
from forward_influence.selectors import NotListed, top_positions
from infokv.identity import ModelIdentity
from infokv.scorer import Scorer
from infokv.signals import TokenSignals


@dataclass(frozen=True)
class MeasuredText:
    """Influences that were measured in one prefix.

    Attributes
    ----------
    document : str
    tokens : int Tensor ``[prefix]``
    scores : float32 Tensor ``[prefix]``
        Nats; minus infinity where nothing was measured.
    """

    document: str
    tokens: torch.Tensor
    scores: torch.Tensor


@dataclass(frozen=True)
class Influence(Scorer):
    """Positions whose removal alone cost most, as measured before: ``influence:runs/NAME/influence-far.json``.

    A strong reference, not a bound: sets are not the sum of their members. It knows the texts of its file alone, and
    uses what follows them, which no method has.

    Parameters
    ----------
    texts : tuple of MeasuredText
        By :meth:`load`, from a file that ``forward-influence influence`` wrote.
    source : str
        Name and hash of the file.

    Notes
    -----
    Source: arXiv 2606.26875, Forward Influence, for sets of one token.
    """

    texts: tuple[MeasuredText, ...] = field(default=(), compare=False, repr=False, kw_only=True)
    source: str = field(default="", repr=False, kw_only=True)
    sinks: int = field(default=0, repr=False, kw_only=True)  # what was no candidate then is kept by rule
    recent: int = field(default=0, repr=False, kw_only=True)
    tuned_for: ModelIdentity | None = field(default=None, compare=False, repr=False, kw_only=True)

    needs_file: ClassVar[bool] = True

    def __post_init__(self):
        if not self.source:
            raise UserError("influence needs a file that `forward-influence influence` wrote: influence:FILE.json.")

    @classmethod
    def load(cls, path: str) -> Influence:
        """From a file that the command ``influence`` wrote.

        Raises
        ------
        UserError
            If it is none.
        """
        try:
            raw = Path(path).read_bytes()
            content = json.loads(raw)
            texts = tuple(map(_measured_text, content["documents"]))
            sinks, recent = _by_rule(content, "sinks"), _by_rule(content, "recent")
            model = ModelIdentity.from_dict(content["model"])
        except OSError as error:
            raise UserError(f"{path!r} cannot be read ({error.strerror}); check the path.") from error
        except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
            raise UserError(
                f"{path!r} is no file of influences ({type(error).__name__}: {error}); give one that "
                "`forward-influence influence` wrote."
            ) from error
        digest = hashlib.sha256(raw).hexdigest()[:8]
        return cls(texts=texts, source=f"{Path(path).name}@{digest}", sinks=sinks, recent=recent, tuned_for=model)

    def canonical(self) -> str:
        return f"influence:{self.source}"

    def select(self, signals: TokenSignals, count: int, document: str) -> list[int]:
        """The positions that cost most, ascending.

        Raises
        ------
        NotListed
            If nothing was measured in this text, or fewer positions than are to be removed.
        """
        scores = self._measured(signals, document)
        self._check_measured(scores[signals.candidates.start : signals.candidates.stop], count)
        return top_positions(scores, signals.candidates, count)

    def score(self, signals: TokenSignals) -> torch.Tensor:
        """``[1, 1, tokens]``: nats; minus infinity for positions that are no candidates.

        Raises
        ------
        NotListed
            If nothing was measured in this text, or some candidates were not: what they are worth is not known.
        """
        scores = self._measured(signals)
        self._check_measured(scores[signals.candidates.start : signals.candidates.stop], len(signals.candidates))
        return scores[None, None]

    def _measured(self, signals: TokenSignals, document: str | None = None) -> torch.Tensor:
        """Scores of the tokens that are stored, from the entry whose prefix is this one."""
        places, ids = signals.positions[0].cpu(), signals.input_ids.cpu()
        found = [
            text for text in self.texts if len(text.tokens) == signals.seen and torch.equal(text.tokens[places], ids)
        ]
        if len(found) > 1:  # texts that go on in different ways: what mattered then is told by their names alone
            found = [text for text in found if text.document == document] or found
        if len(found) > 1:
            raise NotListed(f"{self.source} holds {len(found)} texts that begin alike; use a file of one of them")
        if not found:
            raise NotListed(f"{self.source} holds no influences of its text at this prefix")
        return found[0].scores[places].to(signals.input_ids.device)

    def _check_measured(self, candidates: torch.Tensor, needed: int) -> None:
        measured = int(candidates.isfinite().sum())
        if measured < needed:
            raise NotListed(
                f"{self.source} has the influence of {measured} of {len(candidates)} candidates, and {needed} are "
                "needed; run forward-influence influence --every"
            )


def _measured_text(entry: dict) -> MeasuredText:
    """An entry of a file, checked: it may have been edited."""
    tokens, positions, kl = entry["tokens"], entry["positions"], entry["kl"]
    whole = all(type(one) is int for one in (*tokens, *positions))
    if not whole or len(set(positions)) < len(positions) or not set(positions) <= set(range(len(tokens))):
        raise ValueError("positions are not different places of the tokens")
    if len(kl) != len(positions) or not all(type(one) in (int, float) and 0 <= one < math.inf for one in kl):
        raise ValueError("kl has not one number of at least 0 for each position")
    scores = torch.full((len(tokens),), float("-inf"))
    scores[positions] = torch.tensor(kl, dtype=torch.float64).clamp(max=torch.finfo(torch.float32).max).float()
    return MeasuredText(str(entry["document"]), torch.tensor(tokens), scores)


def _by_rule(content: dict, name: str) -> int:
    if type(content[name]) is not int or content[name] < 0:
        raise ValueError(f"{name} is no whole number of at least 0")
    return content[name]
