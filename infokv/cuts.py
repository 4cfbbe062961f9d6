"""Cutting what a layer stores: which signals a scorer is given, which slots stay, and the eviction itself."""

from __future__ import annotations

import torch

from infokv.recorder import Recorder
from infokv.scorer import Scorer
from infokv.selection import kept_slots
from infokv.store import StoreLayer


def cut_layer(layer: StoreLayer, recorder: Recorder, scorer: Scorer, index: int, count: int, *, sinks: int,
              recent: int, seed: int) -> None:  # fmt: skip
    """Evict the lowest scores of one layer until ``count`` slots are left per row and KV head.

    Parameters
    ----------
    layer : StoreLayer
        Layer ``index`` of a store, all rows.
    recorder : Recorder
        Has seen all that the layer stores; it is told what is left.
    sinks, recent : int
        First and last slots that stay by rule, inside ``count``.
    """
    if count >= layer.length:
        return
    rows, kv_heads = layer.keys.shape[:2]
    candidates = range(min(sinks, layer.length), max(min(sinks, layer.length), layer.length - recent))
    if count <= sinks + recent or not candidates:  # nothing to choose
        slots = kept_slots(torch.zeros(1, layer.length), count, sinks=sinks, recent=recent)[None]
    else:
        groups = [slice(0, kv_heads)]
        if not _alike(layer, candidates):
            groups = [slice(head, head + 1) for head in range(kv_heads)]
        slots = torch.stack([
            torch.cat([
                kept_slots(
                    _scores(recorder, scorer, row, index, layer, heads, candidates, seed), count,
                    sinks=sinks, recent=recent,
                )
                for heads in groups
            ])
            for row in range(rows)
        ])  # fmt: skip
    recorder.on_evict(index, slots)
    layer.keep(slots)


def _scores(recorder, scorer, row, index, layer, heads, candidates, seed) -> torch.Tensor:
    """``[heads or 1, slots]``, float32 on the device of the signals."""
    signals = recorder.of_layer(row, index, layer, heads, candidates=candidates, seed=seed)
    return scorer.score(signals)[0].float().expand(-1, layer.length)


def _alike(layer: StoreLayer, slots: range) -> bool:
    """Whether all KV heads of a row hold the same positions in these slots."""
    if layer.positions is None or layer.positions.shape[1] == 1:
        return True
    part = layer.positions[:, :, slots.start : slots.stop]
    return bool((part == part[:, :1]).all())
