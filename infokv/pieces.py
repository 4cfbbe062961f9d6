"""One call of a model on a compressed store: cut into pieces, or whole where tokens are left out on the way."""

from __future__ import annotations

from collections.abc import Callable

import torch

from infokv.call_checks import joined
from infokv.calls import StoreCalls
from infokv.compressed import CompressedStore
from infokv.errors import Refused
from infokv.propagation import propagating


def run_in_pieces(calls: StoreCalls, forward: Callable, store: CompressedStore, given: dict, name: str,
                  tokens: torch.Tensor, positions: torch.Tensor, chunk: int):  # fmt: skip
    """A call cut where its pieces would be too long, and where something is evicted.

    Parameters
    ----------
    forward : callable
        The base model's own forward.
    given : dict
        What else the call brings.
    name : str
        ``"input_ids"`` or ``"inputs_embeds"``, which ``tokens`` are.
    positions : int Tensor ``[1, new]``
    chunk : int
        Tokens of a piece, at most.
    """
    rows, new = tokens.shape[:2]
    outputs, start = [], 0
    while start < new:
        stop = min(new, start + chunk)
        if store.boundary is not None:
            stop = min(stop, start + store.boundary - store.seen)
        part = tokens[:, start:stop]
        own = {name: part, "position_ids": positions[:, start:stop], "use_cache": True, calls.cache_name: store}
        ids = part if name == "input_ids" else None
        total = store.total or max(store.prompt, store.seen + stop - start)
        store.comes(rows, stop - start, ids)
        with calls.on(store, total, store.attention_listeners, store.block_listeners):
            out = forward(**{**given, **own})
        store.took(out.last_hidden_state, stop - start, ids)
        outputs.append(out)
        start = stop
    return joined(outputs)


def run_propagated(calls: StoreCalls, forward: Callable, store: CompressedStore, given: dict, name: str,
                   tokens: torch.Tensor, positions: torch.Tensor, chunk: int):  # fmt: skip
    """The whole prompt in one piece; behind one layer, only some of its tokens go on. See :func:`run_in_pieces`."""
    rows, new = tokens.shape[:2]
    scorer = store.plan.scorer
    if rows > 1 or new < store.prompt:
        raise Refused(
            f"FastKV(propagate={scorer.propagate}) takes one whole prompt at a time; the call has {rows} rows and "
            f"{new} of {store.prompt} tokens. Leave propagate out, or pass single prompts in one piece."
        )
    own = {name: tokens, "position_ids": positions, "use_cache": True, calls.cache_name: store}
    store.comes(rows, new, tokens if name == "input_ids" else None)
    with (
        calls.on(store, store.total or new, store.attention_listeners, store.block_listeners),
        propagating(calls.model, store, store.recorder, scorer, new),
    ):
        out = forward(**{**given, **own})
    out.last_hidden_state = out.last_hidden_state[:, -1:]  # the others are not those of their tokens' places
    store.took(out.last_hidden_state, new, None)
    return out
