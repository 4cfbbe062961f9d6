"""InfoKV: attention mixed with predictive entropy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infokv.errors import Refused
from infokv.scorer import Scorer
from infokv.scorers.snapkv import pooled_attention, spread
from infokv.signals import TokenSignals, signal


@dataclass(frozen=True)
class InfoKV(Scorer):
    """Attention mixed with predictive entropy, both as distributions over the candidates.

    ``alpha * A + (1 - alpha) * softmax((D + tau) * H)`` with window attention A, entropy H and, per layer,
    representation evolution D.

    Parameters
    ----------
    alpha : float
        Weight of attention, 0 to 1. At 1 the score is SnapKV's.
    tau : float
        Added to the representation evolution D, at least 0. At 0 the last layer, where D is 0, has a flat
        entropy term.
    k : int or None
        Most likely tokens over which entropy is taken; None for the whole vocabulary.
    align : {"self", "next"}
        Whether H is the uncertainty about the token itself (logits at i - 1) or about the one after it.
    temperature : float
        Of the softmax over the entropy term, above 0.
    window, kernel : int
        Observation window and average pool of A, as in SnapKV.

    Notes
    -----
    Source: arXiv 2606.26875, the scorer (alpha 0.9, tau 1, k 256, window 64, kernel 9).
    """

    alpha: float = 0.9
    tau: float = 1.0
    k: int | None = 256
    align: str = "self"
    temperature: float = 1.0
    window: int = 64
    kernel: int = 9

    def __post_init__(self):
        if not 0 <= self.alpha <= 1:
            raise Refused(f"alpha is {self.alpha}; it must be from 0 (entropy alone) to 1 (attention alone).")
        if not 0 <= self.tau < float("inf"):
            raise Refused(f"tau is {self.tau}; it must be 0 or more.")
        if self.k is not None and self.k < 1:
            raise Refused(f"k is {self.k}; it must be at least 1, or none for the whole vocabulary.")
        if self.align not in ("self", "next"):
            raise Refused(f"align is {self.align!r}; it must be 'self' or 'next'.")
        if not 0 < self.temperature < float("inf"):
            raise Refused(f"temperature is {self.temperature}; it must be above 0.")
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise Refused(f"window is {self.window} and kernel {self.kernel}; window >= 1, kernel odd.")

    @property
    def needs(self) -> tuple[str, ...]:
        return (
            signal("window_attention", window=self.window),
            signal("entropy", k="full" if self.k is None else self.k, align=self.align),
            "representation_evolution",
        )

    @property
    def recent(self) -> int:
        return self.window

    def score(self, signals: TokenSignals) -> torch.Tensor:
        """``[layers, kv_heads, tokens]``; 0 outside the candidates."""
        attention, entropy, evolution = (signals[name][..., signals.candidates] for name in self.needs)
        attended = pooled_attention(attention, signals.kv_heads, self.kernel)
        if self.alpha == 1:
            return spread(attended, signals)
        uncertain = ((evolution + self.tau) * entropy / self.temperature).softmax(dim=-1)[:, None]
        return spread(self.alpha * attended + (1 - self.alpha) * uncertain, signals)
