"""Per-token facts of a prefix, from which scores are made.

A signal has a name, such as ``entropy``, and may have parameters: ``entropy(k=64)``. Scorers list the
names they need; only those are computed (see :mod:`infokv.collectors`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import torch

from infokv.errors import Refused
from infokv.kernels import LayerFacts

#: Parameters of each kind of signal, with defaults.
SIGNALS: dict[str, dict[str, object]] = {
    "entropy": {"k": 256, "align": "self", "renormalise": True, "base": "e"},
    "self_information": {},
    "representation_evolution": {},
    "window_attention": {"window": 64},
    "attention_mass": {},
    "keys": {},
    "values": {},
    "queries": {"last": None},
    "unrotated_queries": {"last": None},
    "future_queries": {"skip": 4, "future": 512},
}


def signal(kind: str, **parameters) -> str:
    """Canonical name of a signal with parameters, for a scorer's ``needs``.

    Parameters
    ----------
    kind : str
        A key of :data:`SIGNALS`.
    **parameters
        Those that differ from the defaults.

    Returns
    -------
    str
        Such as ``"entropy(k=64)"``; parameters at their default are left out.

    Raises
    ------
    Refused
        If the kind or a parameter is unknown.
    """
    if kind not in SIGNALS:
        raise Refused(f"There is no signal {kind!r}; there are {', '.join(SIGNALS)}.")
    defaults = SIGNALS[kind]
    unknown = sorted(set(parameters) - set(defaults))
    if unknown:
        raise Refused(f"The signal {kind!r} has no parameter {unknown[0]!r}; it has {', '.join(defaults) or 'none'}.")
    given = [
        f"{name}={parameters[name]}" for name in defaults if parameters.get(name, defaults[name]) != defaults[name]
    ]
    return f"{kind}({','.join(given)})" if given else kind


def parse_signal(name: str) -> tuple[str, dict[str, object]]:
    """Kind and all parameters of a signal's name; inverse of :func:`signal`."""
    match = re.fullmatch(r"(\w+)(?:\((.*)\))?", name)
    if not match:
        raise Refused(f"{name!r} is no signal name; write it like 'entropy' or 'entropy(k=64)'.")
    kind, inner = match.groups()
    pairs = [part.partition("=") for part in inner.split(",")] if inner else []
    if not all(equals for _, equals, _ in pairs):
        raise Refused(f"{name!r} is no signal name; write parameters as key=value.")
    given = {key.strip(): text.strip() for key, _, text in pairs}
    signal(kind, **given)  # refuses what is unknown
    parsed = {key: _parse_value(text, SIGNALS[kind][key]) for key, text in given.items()}
    for key, value in parsed.items():
        allowed, meaning = _ALLOWED[key]
        if not allowed(value):
            raise Refused(f"{name!r}: {key} is {value}; it must be {meaning}.")
    return kind, {**SIGNALS[kind], **parsed}


def _count(value: object) -> bool:
    return type(value) is int and value >= 1


#: What each parameter may be.
_ALLOWED = {
    "k": (lambda value: value == "full" or _count(value), "a whole number of at least 1, or full"),
    "align": (lambda value: value in ("self", "next"), "self (about the token itself) or next"),
    "renormalise": (lambda value: isinstance(value, bool), "True or False"),
    "base": (lambda value: value in ("e", "2"), "e (nats) or 2 (bits)"),
    "window": (_count, "a whole number of at least 1"),
    "skip": (lambda value: value == 0 or _count(value), "a whole number of at least 0"),
    "future": (_count, "a whole number of at least 1"),
    "last": (lambda value: value is None or _count(value), "a whole number of at least 1, or None"),
}


def _parse_value(text: str, default: object) -> object:
    words = {"None": None, "True": True, "False": False}
    if isinstance(default, str):
        return text
    if text in words:
        return words[text]
    return int(text) if re.fullmatch(r"-?\d+", text) else text


@dataclass(frozen=True)
class TokenSignals:
    """Per-token facts of one prefix. Only what was asked for is there.

    Attributes
    ----------
    input_ids : int Tensor ``[tokens]``
    layers, query_heads, kv_heads : int
        Query head h reads KV head ``h // (query_heads // kv_heads)``.
    candidates : range
        Positions that may be chosen: neither attention sinks nor the observation window. Normalisation and
        pooling run over these alone.
    seed : int
        Differs from text to text, and in compression from layer to layer and cut to cut; the only source of
        randomness for a scorer.
    facts : tuple of LayerFacts
        Scaling, soft-cap and sliding window of each layer.
    positions : int Tensor ``[kv_heads or 1, tokens]``
        Original position of each token. In a prefix token i is at position i; at a cut during decoding the
        signals describe what one layer still stores.
    seen : int
        Position of the next token; the last queries are at ``seen - 1`` and before.
    """

    input_ids: torch.Tensor
    layers: int
    query_heads: int
    kv_heads: int
    candidates: range
    seed: int = 0
    facts: tuple[LayerFacts, ...] = ()
    positions: torch.Tensor | None = None
    seen: int | None = None
    values_by_name: dict[str, object] = field(default_factory=dict, repr=False)

    def __post_init__(self):
        if self.positions is None:
            object.__setattr__(self, "positions", torch.arange(self.tokens, device=self.input_ids.device)[None])
        if self.seen is None:
            object.__setattr__(self, "seen", self.tokens)

    @property
    def tokens(self) -> int:
        """Length of the prefix."""
        return self.input_ids.shape[0]

    def __getitem__(self, name: str):
        """A signal by its name, such as ``signals["entropy(k=64)"]``."""
        kind, parameters = parse_signal(name)
        name = signal(kind, **parameters)
        if name not in self.values_by_name:
            raise Refused(
                f"The signal {name!r} was not asked for; add it to the scorer's needs "
                f"(computed: {', '.join(sorted(self.values_by_name)) or 'none'})."
            )
        return self.values_by_name[name]

    @property
    def entropy(self) -> torch.Tensor:
        """``[tokens]``, nats: uncertainty about each token before it was read (top 256, renormalised)."""
        return self["entropy"]

    @property
    def self_information(self) -> torch.Tensor:
        """``[tokens]``, nats: minus log-probability of each token; 0 for the first."""
        return self["self_information"]

    @property
    def representation_evolution(self) -> torch.Tensor:
        """``[layers, tokens]``: 1 - cosine of a block's output and the last block's, before the final norm."""
        return self["representation_evolution"]

    @property
    def window_attention(self) -> torch.Tensor:
        """``[layers, query_heads, tokens]``: mean attention of the last 64 queries, softmax over all keys."""
        return self["window_attention"]

    @property
    def keys(self) -> list[torch.Tensor]:
        """Per layer ``[kv_heads, tokens, head_dim]``, post-RoPE."""
        return self["keys"]

    @property
    def values(self) -> list[torch.Tensor]:
        """Per layer ``[kv_heads, tokens, head_dim]``."""
        return self["values"]

    @property
    def queries(self) -> list[torch.Tensor]:
        """Per layer ``[query_heads, tokens, head_dim]``, post-RoPE."""
        return self["queries"]

    @property
    def unrotated_queries(self) -> list[torch.Tensor]:
        """Per layer ``[query_heads, tokens, head_dim]``, float32: queries with the call's RoPE undone."""
        return self["unrotated_queries"]

    @property
    def future_queries(self) -> list[torch.Tensor]:
        """Per layer ``[query_heads, 1 + head_dim, head_dim]``: expected mean (row 0) and covariance of later queries.

        Those of the queries so far, the first 4 left out, rotated on average to the next 512 positions.
        """
        return self["future_queries"]

    def held_before(self, position: int) -> int:
        """How many of the tokens stood before a position; a sliding window may have left the first ones behind."""
        return int((self.positions[0] < position).sum())

    def with_candidates(self, candidates: range) -> TokenSignals:
        """The same facts, with other positions to choose from."""
        return replace(self, candidates=candidates)
