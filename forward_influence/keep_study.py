"""Fidelity: what a compressed cache loses against the full one, as a study like any other."""

from __future__ import annotations

from collections.abc import Iterable

from forward_influence.methods import make_methods
from forward_influence.study import Outcome, measure

DEFAULT_METHODS = ("snapkv", "infokv", "streaming-llm", "random")
DEFAULT_KEEP = ("0.4", "0.2")


def fidelity(*, method: Iterable = DEFAULT_METHODS, keep: Iterable = (), tokens: Iterable = (),
             layers: str | None = None, horizon: int = 1024, **options) -> Outcome:  # fmt: skip
    """Keep each method's tokens per layer and head, as compression would, and measure what the future loses.

    The rows are those of :func:`forward_influence.measure` with mode ``"keep"``: one for each document, method and
    budget, all against the full cache on the same text.

    Parameters
    ----------
    method : str, scorer, or iterable of these
        Such as ``"snapkv"`` or ``"infokv:alpha=0.5"``.
    keep : str, float, or iterable of these
        Budgets as shares of the prefix; by default 0.4 and 0.2, unless `tokens` is given.
    tokens : int or iterable of int
        Budgets as numbers of tokens per layer.
    layers : {"uniform", "pyramid", "entropy"}, optional
        How budgets are spread over layers, if not in each scorer's own way.
    horizon : int
        Tokens that follow the prefix.
    **options
        As in :func:`forward_influence.measure`: model, tokenizer, data, prefix, full_horizon, chunk, limit,
        skip, seed, batch, dtype, device, offline, extend_context, shard, accept_model, out, fresh, dry_run,
        quiet, debug.

    Returns
    -------
    Outcome

    Raises
    ------
    UserError, DataError, Refused
        If the request cannot be met; nothing was measured.
    """
    asked = keep or tokens
    methods = make_methods(method, keep=keep if asked else DEFAULT_KEEP, tokens=tokens, layers=layers)
    return measure(selector=methods, horizon=horizon, **options)
