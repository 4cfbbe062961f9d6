"""Cutting what a layer stores: which signals a scorer is given, which slots stay, and the eviction itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from infokv.allocation import layer_allocation, layer_counts, layer_weights
from infokv.budget import Budget
from infokv.errors import Refused
from infokv.recorder import Recorder
from infokv.scorer import Scorer
from infokv.selection import kept_slots
from infokv.store_layer import StoreLayer


def prompt_slots(layers: Sequence[StoreLayer], recorder: Recorder, scorer: Scorer, budget: Budget,
                 prompt: int) -> Iterator[torch.Tensor | None]:  # fmt: skip
    """What each layer keeps of a prompt, one layer after the other.

    Parameters
    ----------
    layers : sequence of StoreLayer
        All layers of a store that has just taken the prompt; sliding windows may have left slots behind.
    recorder : Recorder
        Has seen the prompt and has the scorer's signals, and those of the allocation.
    prompt : int
        Its length, of which the budget is a share.

    Yields
    ------
    int Tensor ``[rows, kv_heads or 1, n_kept]`` or None
        Slots, ascending; None where all stay.
    """
    counts = layer_counts(prompt, len(layers), budget, scorer, _weights(layers, recorder, scorer, budget))
    for index, (layer, count) in enumerate(zip(layers, counts)):
        positions = layer.slot_positions()[0, 0]
        sinks = int((positions < scorer.sinks).sum())  # a window may have left some behind
        yield chosen_slots(layer, recorder, scorer, index, count, sinks=sinks, recent=scorer.recent, seed=index)


def _weights(layers, recorder: Recorder, scorer: Scorer, budget: Budget) -> list[float] | None:
    """Weights of the layers where the budget is spread by them."""
    if layer_allocation(budget, scorer) != "entropy":
        return None
    if recorder.rows > 1:
        raise Refused(
            f"The batch has {recorder.rows} texts, whose layers would get budgets of their own; use "
            "Budget(layers='uniform') or one text at a time."
        )
    weights = []
    for index, layer in enumerate(layers):
        stop = max(1, layer.length - scorer.recent)
        candidates = range(min(scorer.sinks, stop - 1), stop)
        weights += layer_weights(scorer, recorder.of_layer(0, index, layer, candidates=candidates))
    return weights


def chosen_slots(layer: StoreLayer, recorder: Recorder, scorer: Scorer, index: int, count: int, *, sinks: int,
                 recent: int, seed: int) -> torch.Tensor | None:  # fmt: skip
    """The slots with the highest scores of one layer: int ``[rows, kv_heads or 1, count]``; None if all stay.

    Parameters
    ----------
    layer : StoreLayer
        Layer ``index`` of a store, all rows.
    recorder : Recorder
        Has seen all that the layer stores.
    sinks, recent : int
        First and last slots that stay by rule, inside ``count``.
    """
    if count >= layer.length:
        return None
    rows, kv_heads = layer.keys.shape[:2]
    candidates = range(min(sinks, layer.length), max(min(sinks, layer.length), layer.length - recent))
    if count <= sinks + recent or not candidates:  # nothing to choose
        return kept_slots(torch.zeros(1, layer.length), count, sinks=sinks, recent=recent)[None]
    groups = [slice(0, kv_heads)]
    # Where heads hold other tokens, each is asked alone; but a set for the whole layer needs the candidates alone.
    if not _alike(layer, candidates if scorer.heads == "layer" else range(layer.length)):
        groups = [slice(head, head + 1) for head in range(kv_heads)]
    return torch.stack([
        torch.cat([
            kept_slots(
                _scores(recorder, scorer, row, index, layer, heads, candidates, seed), count,
                sinks=sinks, recent=recent,
            )
            for heads in groups
        ])
        for row in range(rows)
    ])  # fmt: skip


def evict(layer: StoreLayer, recorder: Recorder, index: int, slots: torch.Tensor | None) -> None:
    """Keep these slots of layer ``index`` alone, and tell the recorder; None keeps all."""
    if slots is not None:
        recorder.on_evict(index, slots)
        layer.keep(slots)


def _scores(recorder, scorer, row, index, layer, heads, candidates, seed) -> torch.Tensor:
    """``[heads or 1, slots]``, float32 on the device of the signals."""
    signals = recorder.of_layer(row, index, layer, heads, candidates=candidates, seed=seed)
    written = layer.keys._version, layer.values._version
    scores = scorer.score(signals)
    name, kv_heads = type(scorer).__name__, signals.kv_heads
    shape = tuple(getattr(scores, "shape", ()))
    if not isinstance(scores, torch.Tensor) or shape not in ((1, 1, layer.length), (1, kv_heads, layer.length)):
        what = f"scores of shape {list(shape)}" if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise Refused(f"{name} gave {what} for one layer; they must be a tensor [1, {kv_heads} or 1, {layer.length}].")
    if scores.is_complex():
        raise Refused(f"{name} gave {scores.dtype} scores; they must be real, such as float32.")
    if written != (layer.keys._version, layer.values._version):
        raise Refused(f"{name} wrote into the cache; let it work on clones of signals.keys and signals.values.")
    return scores[0].float()


def _alike(layer: StoreLayer, slots: range) -> bool:
    """Whether all KV heads of a row hold the same positions in these slots."""
    part = layer.slot_positions()[:, :, slots.start : slots.stop]
    return part.shape[1] == 1 or bool((part == part[:, :1]).all())
