"""Prefill: a prompt into a token store, and the signals that were asked for on the way."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from infokv.calls import evaluation
from infokv.forward import forward_chunks
from infokv.recorder import Recorder
from infokv.signals import TokenSignals
from infokv.store import TokenStore


def prefill(model, input_ids: torch.Tensor, needs: Iterable[str] = (), *, chunk_size: int = 256,
            total_length: int | None = None, candidates: range | None = None,
            seed: int = 0) -> tuple[TokenStore, TokenSignals]:  # fmt: skip
    """Run a text once, in chunks.

    Parameters
    ----------
    model : PreTrainedModel
        In evaluation mode.
    input_ids : int Tensor ``[1, tokens]``
        On the model's device.
    needs : iterable of str
        Names of signals; see :data:`infokv.signals.SIGNALS`. Nothing else is computed.
    chunk_size : int
        Tokens of a call; changes the speed only.
    total_length : int, optional
        Length of the whole text if this is its beginning (RoPE may depend on it); by default this one's.
    candidates : range, optional
        Positions that may be chosen; by default all.
    seed : int
        Handed to scorers.

    Returns
    -------
    store : TokenStore
        One row that holds the text.
    signals : TokenSignals
    """
    tokens = input_ids.shape[1]
    store, recorder = record(model, input_ids, needs, chunk_size=chunk_size, total_length=total_length)
    return store, recorder.whole(store, candidates=range(tokens) if candidates is None else candidates, seed=seed)


def record(model, input_ids: torch.Tensor, needs: Iterable[str] = (), *, chunk_size: int = 256,
           total_length: int | None = None) -> tuple[TokenStore, Recorder]:  # fmt: skip
    """Like :func:`prefill`, with the recorder that can be asked for the signals of each layer."""
    tokens = input_ids.shape[1]
    recorder = Recorder(model, needs)
    store = TokenStore(recorder.layers, tokens)
    with evaluation(model):  # collectors compute, too
        for start, states in forward_chunks(
            model, store, input_ids, chunk_size=chunk_size, total_length=total_length or tokens,
            listeners=(recorder,), block_listeners=recorder.block_listeners,
        ):  # fmt: skip
            ids = input_ids[:, start : start + states.shape[1]]
            recorder.on_ids(ids)
            if recorder.wants_logits:
                recorder.read(states, ids)
    return store, recorder
