"""Prefill: a prompt into a token store, and the signals that were asked for on the way."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from infokv.collectors import FactsCollector, make_collector
from infokv.forward import Head, forward_chunks, logit_slices
from infokv.signals import TokenSignals, parse_signal, signal
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
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    collectors = {}
    for name in needs:
        kind, parameters = parse_signal(name)
        canonical = signal(kind, **parameters)
        if canonical not in collectors:
            collectors[canonical] = make_collector(canonical, tokens=tokens, layers=layers)
    facts = FactsCollector(layers)
    listeners = (facts, *(one for one in collectors.values() if hasattr(one, "on_attention")))
    block_listeners = tuple(one for one in collectors.values() if hasattr(one, "on_block"))
    readers = [one for one in collectors.values() if one.wants_logits]

    store, head = TokenStore(layers, tokens), Head(model)
    for start, states in forward_chunks(
        model, store, input_ids, chunk_size=chunk_size, total_length=total_length or tokens,
        listeners=listeners, block_listeners=block_listeners,
    ):  # fmt: skip
        if not readers:
            continue
        for offset, logits in logit_slices(head, states):
            first = start + offset + 1
            next_ids = input_ids[0, first : first + logits.shape[1]].to(logits.device)
            for reader in readers:
                reader.on_logits(logits[0], next_ids)
    signals = TokenSignals(
        input_ids=input_ids[0],
        layers=layers,
        query_heads=config.num_attention_heads,
        kv_heads=store.layers[0].keys.shape[1],
        candidates=range(tokens) if candidates is None else candidates,
        seed=seed,
        facts=tuple(facts.facts),
        values_by_name={name: one.result(store) for name, one in collectors.items()},
    )
    return store, signals
