"""The selector that knows: positions ranked by the influence that each had when it was removed alone."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from forward_influence.errors import UserError
from forward_influence.selectors import NotListed
from infokv.scorer import Scorer
from infokv.signals import TokenSignals


@dataclass(frozen=True)
class MeasuredText:
    """Influences that were measured in one prefix.

    Attributes
    ----------
    tokens : int Tensor ``[prefix]``
    scores : float32 Tensor ``[prefix]``
        Nats; minus infinity where nothing was measured.
    """

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
            sinks, recent = int(content["sinks"]), int(content["recent"])
        except OSError as error:
            raise UserError(f"{path!r} cannot be read ({error.strerror}); check the path.") from error
        except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
            raise UserError(
                f"{path!r} is no file of influences ({type(error).__name__}: {error}); give one that "
                "`forward-influence influence` wrote."
            ) from error
        digest = hashlib.sha256(raw).hexdigest()[:8]
        return cls(texts=texts, source=f"{Path(path).name}@{digest}", sinks=sinks, recent=recent)

    def canonical(self) -> str:
        return f"influence:{self.source}"

    def score(self, signals: TokenSignals) -> torch.Tensor:
        """``[1, 1, tokens]``: nats; minus infinity for positions that were not measured.

        Raises
        ------
        NotListed
            If nothing was measured in this text.
        """
        places, device = signals.positions[0].cpu(), signals.input_ids.device
        for text in self.texts:
            if int(places[-1]) < len(text.tokens) and torch.equal(text.tokens[places], signals.input_ids.cpu()):
                return text.scores[places][None, None].to(device)
        raise NotListed(f"{self.source} holds no influences of its text")


def _measured_text(entry: dict) -> MeasuredText:
    tokens = torch.tensor(entry["tokens"], dtype=torch.long)
    scores = torch.full((len(tokens),), float("-inf"))
    scores[torch.tensor(entry["positions"], dtype=torch.long)] = torch.tensor(entry["kl"], dtype=torch.float32)
    return MeasuredText(tokens, scores)
