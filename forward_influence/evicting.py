"""The evicting engine: one prefix, several compressed caches of it, and the future rerun beside the full cache.

What a compression keeps differs by layer and head, so that masks would be as big as the scores; and what it evicts
need not be read. So each variant is a real, smaller cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from forward_influence.engine import CHUNK_SIZE, compare_in_passes
from forward_influence.errors import UserError
from forward_influence.inputs import pass_sizes
from forward_influence.kl import Comparison
from forward_influence.memory import rows_that_fit
from infokv.forward import forward_chunks
from infokv.store import TokenStore

#: What a variant keeps: for each layer, positions ``[kv_heads or 1, n_kept]``, ascending.
Kept = Sequence[torch.Tensor]


class EvictingEngine:
    """Compressed caches of one prefix, beside the full cache.

    Parameters
    ----------
    model : PreTrainedModel
    prefix : TokenStore
        One row that holds the whole prefix; it is read only.
    continuation : int Tensor ``[1, horizon]``
    kept : sequence of Kept
        One for each compressed cache.
    chunk_size : int
        Tokens of a call; changes the speed only.
    """

    def __init__(self, model, prefix: TokenStore, continuation: torch.Tensor, kept: Sequence[Kept], *, chunk_size: int):
        self._model = model
        self._prefix = prefix
        self._continuation = continuation
        self._chunk_size = chunk_size
        self._groups: dict[tuple[int, ...], list[int]] = {}  # variants that store alike many tokens share a store
        for index, one in enumerate(kept):
            self._groups.setdefault(tuple(layer.shape[-1] for layer in one), []).append(index)
        self._kept = kept

    def states(self) -> Iterator[tuple[int, torch.Tensor]]:
        """First offset and final states ``[1 + caches, chunk, hidden]`` of each chunk; row 0 has the full cache."""
        horizon = self._continuation.shape[1]
        total = self._prefix.seen + horizon
        stores = [self._prefix.fork(1, total), *(self._store(group, horizon) for group in self._groups.values())]
        order = torch.tensor([0, *(1 + index for group in self._groups.values() for index in group)]).argsort()
        runs = [
            forward_chunks(
                self._model, store, self._continuation.expand(store.rows, -1), chunk_size=self._chunk_size,
                total_length=total,
            )
            for store in stores
        ]  # fmt: skip
        for parts in zip(*runs, strict=True):
            yield parts[0][0] - self._prefix.seen, torch.cat([states for _, states in parts])[order]

    def _store(self, group: list[int], horizon: int) -> TokenStore:
        heads = self._prefix.layers[0].keys.shape[1]
        layers = []
        for index, layer in enumerate(self._prefix.layers):
            slots = torch.stack([self._kept[one][index].expand(heads, -1) for one in group])
            layers.append(layer.selected(slots, horizon))
        return TokenStore(layers, layers[0].capacity)


def compare_kept(model, prefix: TokenStore, continuation: torch.Tensor, kept: Sequence[Kept], *,
                 chunk_size: int = CHUNK_SIZE, batch: int | None = None,
                 notify: Callable[[str], None] = lambda sentence: None,
                 progress: Callable[[int], None] = lambda row_tokens: None) -> Comparison:  # fmt: skip
    """Compressed caches against the full one, in as many passes as memory asks for; equal ones are run once.

    Parameters
    ----------
    prefix : TokenStore
        One row that holds the whole prefix.
    continuation : int Tensor ``[1, horizon]``
    kept : sequence of Kept
    chunk_size, batch, notify, progress
        As in :func:`forward_influence.engine.compare_rows`.

    Returns
    -------
    Comparison
        Tensors ``[len(kept), horizon]`` on the CPU.
    """
    chunk_size, batch = pass_sizes(chunk_size, batch)
    if not kept:
        raise UserError("No compressed cache was given; name at least one.")
    unique, source, known = [], [], {}
    for one in kept:
        key = tuple((tuple(layer.shape), layer.cpu().numpy().tobytes()) for layer in one)
        if key not in known:
            known[key] = len(unique)
            unique.append(one)
        source.append(known[key])
    rows = batch or rows_that_fit(model, prefix, continuation.shape[1], chunk_size)

    def engine(part):
        return EvictingEngine(model, prefix, continuation, part, chunk_size=chunk_size)

    return compare_in_passes(
        model, continuation, engine, unique, source, rows=rows, notify=notify, progress=progress
    )  # fmt: skip
