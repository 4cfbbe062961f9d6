"""A weighted mixture of any signals, each brought to one scale."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import torch

from infokv.errors import Refused
from infokv.scorer import Scorer
from infokv.scorers.expected_attention import ExpectedAttention
from infokv.scorers.observed_attention import ObservedAttention
from infokv.signals import TokenSignals, signal
from infokv.windows import WindowOptions, region_scores, spread

#: What a term may be about, and the scale that it is brought to unless the term says otherwise.
KINDS = {
    "attention": "sum1",
    "expected-attention": "sum1",
    "observed-attention": "sum1",
    "entropy": "softmax",
    "entropy-next": "softmax",
    "evolving-entropy": "softmax",
    "self-information": "softmax",
    "evolution": "softmax",
    "key-norm": "rank",
    "value-norm": "rank",
}

SCALES = ("sum1", "softmax", "rank", "max")

_TERM = re.compile(r"([a-z-]+)(?:/([a-z0-9]+))?\*([0-9.eE-]+)")


@dataclass(frozen=True)
class Mixture(Scorer):
    """Any signals, weighted, each as a distribution over the candidates.

    Parameters
    ----------
    terms : str
        Such as ``attention*0.9+self-information/rank*0.1``: signal, scale if not its usual one, weight. Signals are
        attention, expected-attention and observed-attention (those methods' scores), entropy, entropy-next,
        evolving-entropy (InfoKV's (D + tau) * H), self-information, evolution, key-norm (small keys first) and
        value-norm; scales are sum1, softmax, rank and max.
    tau : float
        Added to the representation evolution D in evolving-entropy, at least 0.
    k : int or None
        Most likely tokens over which entropies are taken; None for the whole vocabulary.
    temperature : float
        Of every softmax, above 0.
    window, kernel : int
        Observation window and average pool of attention, as in SnapKV.
    sinks : int
        First tokens that are kept by rule.

    Notes
    -----
    Source: generalises the scorer of arXiv 2606.26875, which is ``attention*0.9+evolving-entropy*0.1``.
    """

    terms: str = "attention*0.9+evolving-entropy*0.1"
    tau: float = 1.0
    k: int | None = 256
    temperature: float = 1.0
    window: int = 64
    kernel: int = 9
    sinks: int = 0

    def __post_init__(self):
        if not 0 <= self.tau < float("inf"):
            raise Refused(f"tau is {self.tau}; it must be 0 or more.")
        if not 0 < self.temperature < float("inf"):
            raise Refused(f"temperature is {self.temperature}; it must be above 0.")
        if self.window < 1:
            raise Refused(f"window is {self.window}; it must be at least 1 query.")
        if self.sinks < 0:
            raise Refused(f"sinks is {self.sinks}; it must be 0 or more.")
        WindowOptions(kernel=self.kernel)  # refuses what is unfit
        if not any(weight for _, _, weight in self._parsed):
            raise Refused(f"terms are {self.terms!r}, whose weights are all 0; give one some weight.")

    @cached_property
    def _parsed(self) -> tuple[tuple[str, str, float], ...]:
        """Kind, scale and weight of each term."""
        parsed = []
        for text in str(self.terms).split("+"):
            match = _TERM.fullmatch(text.strip())
            kind, scale, weight = match.groups() if match else (None, None, None)
            try:
                number = float(weight)
            except (TypeError, ValueError):
                number = float("nan")
            if kind not in KINDS or not 0 <= number < float("inf") or (scale or "sum1") not in SCALES:
                raise Refused(
                    f"The term {text!r} is not like 'entropy*0.1' or 'entropy/rank*0.1'; signals are "
                    f"{', '.join(KINDS)}, scales {', '.join(SCALES)}, weights 0 or more."
                )
            parsed.append((kind, scale or KINDS[kind], number))
        if len({kind for kind, _, _ in parsed}) < len(parsed):
            raise Refused(f"terms are {self.terms!r}, where a signal stands twice; add up its weights.")
        return tuple(parsed)

    def _entropy(self, align: str) -> str:
        return signal("entropy", k="full" if self.k is None else self.k, align=align)

    @property
    def needs(self) -> tuple[str, ...]:
        needs = {
            "attention": (signal("queries", last=self.window), "keys"),
            "expected-attention": ExpectedAttention().needs,
            "observed-attention": ObservedAttention().needs,
            "entropy": (self._entropy("self"),),
            "entropy-next": (self._entropy("next"),),
            "evolving-entropy": (self._entropy("self"), "representation_evolution"),
            "self-information": ("self_information",),
            "evolution": ("representation_evolution",),
            "key-norm": ("keys",),
            "value-norm": ("values",),
        }
        return tuple(dict.fromkeys(need for kind, _, weight in self._parsed if weight for need in needs[kind]))

    @property
    def recent(self) -> int:
        return self.window

    def score(self, signals: TokenSignals) -> torch.Tensor:
        """``[layers, kv_heads or 1, tokens]``; 0 outside the candidates."""
        total = None
        for kind, scale, weight in self._parsed:
            if not weight:
                continue
            part = weight * self._scaled(self._values(kind, signals), scale)
            total = part if total is None else total + part.to(total.device)
        return spread(total, signals)

    def _values(self, kind: str, signals: TokenSignals) -> torch.Tensor:
        """What a term is about, ``[layers or 1, kv_heads or 1, candidates]``."""
        inside = slice(signals.candidates.start, signals.candidates.stop)
        if kind == "attention":
            return region_scores(signals, self.window, WindowOptions(kernel=self.kernel))
        if kind in ("expected-attention", "observed-attention"):
            method = ExpectedAttention() if kind == "expected-attention" else ObservedAttention()
            return method.score(signals)[..., inside]
        if kind in ("key-norm", "value-norm"):
            held, sign = (signals.keys, -1) if kind == "key-norm" else (signals.values, 1)
            return torch.stack([sign * one[:, inside].float().norm(dim=-1) for one in held])
        if kind == "evolution":
            return signals["representation_evolution"][:, None, inside]
        if kind == "self-information":
            return signals["self_information"][None, None, inside]
        entropy = signals[self._entropy("next" if kind == "entropy-next" else "self")][None, None, inside]
        if kind == "evolving-entropy":
            return (signals["representation_evolution"][:, None, inside] + self.tau) * entropy
        return entropy

    def _scaled(self, values: torch.Tensor, scale: str) -> torch.Tensor:
        """Values on one scale over the candidates, per layer and head."""
        if scale == "softmax":
            return (values / self.temperature).softmax(dim=-1)
        if scale == "rank":  # as a distribution: the highest of n has 2 / (n + 1); equal values share their ranks
            values = values.contiguous()
            ordered = values.sort(dim=-1).values
            lower, upper = (torch.searchsorted(ordered, values, right=right) for right in (False, True))
            ranks = (lower + upper + 1).float()
            return ranks / ranks.sum(dim=-1, keepdim=True)
        largest = values.amax(dim=-1, keepdim=True) if scale == "max" else values.sum(dim=-1, keepdim=True)
        return values / largest.clamp_min(torch.finfo(values.dtype).tiny)
