"""Forward Influence: which cached tokens matter for the far future. Names load on first use."""

from __future__ import annotations

import importlib

_WHERE = {
    "load_model": "models", "load_documents": "data", "measure": "study", "influence": "engine",
    "fidelity": "keep_study", "tune": "tuning",
    "MaskingEngine": "engine", "kl_divergence": "kl", "token_signals": "signals",
    "Selector": "selectors", "register_selector": "selectors", "check_selector": "checks",
    "InfluenceCurve": "rows", "RunSpec": "rows", "open_runs": "analysis.frames", "UserError": "errors",
}  # fmt: skip

__all__ = sorted(_WHERE)


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
