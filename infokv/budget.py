"""How much of a cache stays, and when the generated part is cut."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from infokv.errors import Refused

ALLOCATIONS = ("uniform", "pyramid", "entropy")


@dataclass(frozen=True)
class Budget:
    """Tokens that stay in each layer, on average over layers.

    Parameters
    ----------
    keep : float, str or Decimal, optional
        Share of the tokens, above 0 and at most 1; exact on the decimal that was typed.
    tokens : int, optional
        A number of tokens, at least 1. One of both must be given.
    layers : {"uniform", "pyramid", "entropy"}, optional
        How the budget is spread over layers; None takes the scorer's own way.

    Raises
    ------
    Refused
        If both or neither are given, or one is out of range.
    """

    keep: float | str | Decimal | None = None
    tokens: int | None = None
    layers: str | None = None

    def __post_init__(self):
        if (self.keep is None) == (self.tokens is None):
            raise Refused(
                f"Budget(keep={self.keep}, tokens={self.tokens}): give one of both, such as keep=0.4 or tokens=512."
            )
        if self.keep is not None and not 0 < self.share <= 1:
            raise Refused(f"keep is {self.keep}; it must be above 0 and at most 1 (the share that stays).")
        if self.tokens is not None and (type(self.tokens) is not int or self.tokens < 1):
            raise Refused(f"tokens is {self.tokens}; it must be a whole number of at least 1.")
        if self.layers is not None and self.layers not in ALLOCATIONS:
            raise Refused(f"layers is {self.layers!r}; it must be one of {', '.join(ALLOCATIONS)}.")

    def resolve(self, n: int) -> int:
        """Tokens that stay of ``n``: ``max(1, floor(n * keep))``, or ``tokens``; never more than ``n``."""
        return min(n, self.tokens if self.keep is None else max(1, int(n * self.share)))

    @property
    def share(self) -> Decimal:
        """``keep`` as the decimal that was typed; 0 for what is no number, and where ``tokens`` is given."""
        try:
            value = Decimal(str(self.keep))
        except InvalidOperation:
            value = Decimal("NaN")
        return value if value.is_finite() else Decimal(0)


@dataclass(frozen=True)
class Schedule:
    """When and how the generated part of a cache is cut.

    Parameters
    ----------
    every : int
        Generated tokens between two cuts. The first cut comes when ``every + recent`` are cached.
    recent : int
        Last tokens that a cut leaves alone, beside the budget.
    keep : float, str or Decimal, optional
        Share of the generated tokens that stays; None takes the budget's.
    protect_prompt : bool
        Whether the prompt is left as it is.

    Notes
    -----
    Source: Reasoning Path Compression (arXiv 2505.13866): after the k-th cut ``floor(k * every * keep)``
    generated tokens and the recent ones are left; survivors of earlier cuts compete again.
    """

    every: int = 1024
    recent: int = 32
    keep: float | str | Decimal | None = None
    protect_prompt: bool = True

    def __post_init__(self):
        if type(self.every) is not int or self.every < 1:
            raise Refused(f"every is {self.every}; it must be a whole number of at least 1 token.")
        if type(self.recent) is not int or self.recent < 0:
            raise Refused(f"recent is {self.recent}; it must be a whole number of at least 0 tokens.")
        if self.keep is not None:
            Budget(keep=self.keep)  # refuses what is out of range
