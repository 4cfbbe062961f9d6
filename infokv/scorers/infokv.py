"""InfoKV: attention mixed with predictive entropy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from infokv.budget import Schedule
from infokv.errors import Refused
from infokv.scorer import Scorer
from infokv.scorers.snapkv import NORMS
from infokv.signals import TokenSignals, signal
from infokv.windows import WindowOptions, one_of, pooled, region_scores, scaled, spread


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
    entropy_renorm : bool
        Whether the k probabilities are scaled to sum 1 before their entropy is taken.
    log_base : {"e", "2"}
        Entropy in nats or bits.
    attn_norm : {"sum1", "mean", "sum", "max"}
        Scale of A, as ``norm`` of SnapKV.
    attn_support : {"all", "region"} or None
        Softmax of attention over all keys, or over the candidates alone. None: all in a prompt, the
        candidates at cuts of generated tokens.
    entropy_support : {"candidates", "all"}
        Over what the softmax of the entropy term runs.
    pool_target : {"attn", "score", "both"}
        Whether A is pooled, the mixed score, or both.
    heads : {"kv", "layer", "query"} or None
        A per KV head, one for the layer, or per query head (which no cache of KV heads can hold). None: per
        KV head in a prompt, one for the layer at cuts of generated tokens.
    layer_budget : {"uniform", "entropy"}
        Whether layers keep alike, or in proportion to their mean (D + tau) * H.
    every : int
        Generated tokens between two cuts.
    decode_window, decode_kernel : int
        Observation window and average pool at cuts of generated tokens; its tokens stay beside the budget.
    sinks : int
        First tokens that are kept by rule; the paper keeps none.

    Notes
    -----
    Source: arXiv 2606.26875, the scorer (alpha 0.9, tau 1, k 256, window 64, kernel 9) and its decoding
    experiments, which follow Reasoning Path Compression (every 1024, window 32, kernel 7). What that text leaves
    open is a parameter. Block outputs before the final norm give D; entropies are those of the time at which
    a token was read.
    """

    alpha: float = 0.9
    tau: float = 1.0
    k: int | None = 256
    align: str = "self"
    temperature: float = 1.0
    window: int = 64
    kernel: int = 9
    entropy_renorm: bool = True
    log_base: str = "e"
    attn_norm: str = "sum1"
    attn_support: str | None = None
    entropy_support: str = "candidates"
    pool_target: str = "attn"
    heads: str | None = None
    layer_budget: str = "uniform"
    every: int = 1024
    decode_window: int = 32
    decode_kernel: int = 7
    sinks: int = 0

    def __post_init__(self):
        if not 0 <= self.alpha <= 1:
            raise Refused(f"alpha is {self.alpha}; it must be from 0 (entropy alone) to 1 (attention alone).")
        if not 0 <= self.tau < float("inf"):
            raise Refused(f"tau is {self.tau}; it must be 0 or more.")
        if self.k is not None and self.k < 1:
            raise Refused(f"k is {self.k}; it must be at least 1, or none for the whole vocabulary.")
        if not 0 < self.temperature < float("inf"):
            raise Refused(f"temperature is {self.temperature}; it must be above 0.")
        if self.window < 1 or self.decode_window < 1:
            raise Refused(
                f"window is {self.window} and decode_window {self.decode_window}; each must be at least 1 query."
            )
        one_of("align", self.align, ("self", "next"))
        one_of("log_base", self.log_base, ("e", "2"))
        one_of("attn_norm", self.attn_norm, NORMS)
        one_of("attn_support", self.attn_support, (None, "all", "region"))
        one_of("heads", self.heads, (None, "kv", "layer", "query"))
        one_of("entropy_support", self.entropy_support, ("candidates", "all"))
        one_of("pool_target", self.pool_target, ("attn", "score", "both"))
        one_of("layer_budget", self.layer_budget, ("uniform", "entropy"))
        for name in ("kernel", "decode_kernel"):
            if getattr(self, name) < 1 or getattr(self, name) % 2 == 0:
                raise Refused(f"{name} is {getattr(self, name)}; it must be odd and at least 1.")
        if self.sinks < 0:
            raise Refused(f"sinks is {self.sinks}; it must be 0 or more.")
        Schedule(every=self.every)  # refuses what is unfit

    @property
    def needs(self) -> tuple[str, ...]:
        return (signal("queries", last=self.window), "keys", *self.entropy_needs)

    @property
    def entropy_needs(self) -> tuple[str, str]:
        """The signals of the entropy term."""
        k = "full" if self.k is None else self.k
        entropy = signal("entropy", k=k, align=self.align, renormalise=self.entropy_renorm, base=self.log_base)
        return entropy, "representation_evolution"

    @property
    def recent(self) -> int:
        return self.window

    @property
    def allocation(self) -> str:
        return self.layer_budget

    @property
    def schedule(self) -> Schedule:
        return Schedule(every=self.every, recent=self.decode_window)

    def for_decoding(self) -> InfoKV:
        return replace(
            self,
            window=self.decode_window,
            kernel=self.decode_kernel,
            attn_support=self.attn_support or "region",
            heads=self.heads or "layer",
        )

    def options(self) -> WindowOptions:
        """How its window attention becomes A."""
        return WindowOptions(
            support=self.attn_support or "all",
            rows="sum" if self.attn_norm == "sum" else "mean",
            heads=self.heads or "kv",
            kernel=1 if self.pool_target == "score" else self.kernel,
        )

    def uncertainty(self, signals: TokenSignals) -> torch.Tensor:
        """The entropy term (D + tau) * H before its softmax, ``[layers, 1, tokens]``."""
        entropy, evolution = (signals[name] for name in self.entropy_needs)
        return (evolution[:, None] + self.tau) * entropy

    def score(self, signals: TokenSignals) -> torch.Tensor:
        """``[layers, heads, tokens]``; 0 outside the candidates."""
        attended = scaled(region_scores(signals, self.window, self.options()), self.attn_norm)
        uncertain = self.uncertainty(signals) / self.temperature
        if self.entropy_support == "all":
            uncertain = uncertain.softmax(dim=-1)[..., signals.candidates]
        else:
            uncertain = uncertain[..., signals.candidates].softmax(dim=-1)
        mixed = self.alpha * attended + (1 - self.alpha) * uncertain.to(attended.device)
        if self.pool_target != "attn":
            mixed = pooled(mixed, "avg", self.kernel)
        return spread(mixed, signals)
