"""KV-cache scorers and compression for transformers models. Names load on first use."""

from __future__ import annotations

import importlib

_WHERE = {
    "Scorer": "scorer", "register": "scorer", "get_scorer": "scorer",
    "TokenSignals": "signals", "signal": "signals",
    "restricted_entropy": "entropy",
    "InfoKV": "scorers.infokv", "SnapKV": "scorers.snapkv",
    "SelfInformation": "scorers.self_information", "Random": "scorers.random",
    "RPC": "scorers.rpc", "RKV": "scorers.rkv", "TOVA": "scorers.tova", "H2O": "scorers.h2o",
    "ObservedAttention": "scorers.observed_attention", "StreamingLLM": "scorers.streaming_llm",
    "KNorm": "scorers.knorm", "KeyDiff": "scorers.keydiff", "LagKV": "scorers.lagkv",
    "Mixture": "scorers.mixture",
    "PyramidKV": "scorers.pyramidkv", "FastKV": "scorers.fastkv", "FullCache": "scorers.full_cache",
    "ExpectedAttention": "scorers.expected_attention",
    "Budget": "budget", "Schedule": "budget", "compress": "compression",
}  # fmt: skip

__all__ = sorted(_WHERE)


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
