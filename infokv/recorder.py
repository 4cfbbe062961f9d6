"""Collectors of all rows of a batch, fed from the calls of a model and read layer by layer."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from infokv.collectors import Collector, make_collector
from infokv.forward import Head, logit_slices
from infokv.kernels import LayerFacts
from infokv.signals import TokenSignals, parse_signal, signal
from infokv.store import TokenStore
from infokv.store_layer import StoreLayer


class Stopwatch:
    """Seconds spent inside its blocks, nested ones counted once."""

    def __init__(self):
        self.seconds = 0.0
        self._depth = 0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._began = time.perf_counter()
        self._depth += 1

    def __exit__(self, *error) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._began


class Recorder:
    """Signals of a running text.

    Parameters
    ----------
    model : PreTrainedModel
    needs : iterable of str
        Names of signals; nothing else is computed.
    rows : int
        Texts of the batch, all of one length.
    """

    def __init__(self, model, needs: Iterable[str], rows: int = 1):
        config = model.config.get_text_config()
        self.layers = config.num_hidden_layers
        self.rows = rows
        self._query_heads = config.num_attention_heads
        self._head = Head(model)
        names = list(dict.fromkeys(signal(kind, **given) for kind, given in map(parse_signal, needs)))
        self._collectors = [{name: make_collector(name, model=model) for name in names} for _ in range(rows)]
        self._who = {method: self._that(method) for method in ("on_attention", "on_block", "on_logits", "on_evict")}
        self.watch = Stopwatch()
        self.facts: list[LayerFacts | None] = [None] * self.layers
        self._ids: list[torch.Tensor] = []

    def _that(self, method: str) -> list[tuple[int, Collector]]:
        """Row and collector, for all collectors that do something with a call of this name."""
        return [
            (row, one)
            for row, collectors in enumerate(self._collectors)
            for one in collectors.values()
            if getattr(type(one), method) is not getattr(Collector, method)
        ]

    @property
    def wants_logits(self) -> bool:
        """Whether :meth:`read` must be given the final states of every token."""
        return any(one.wants_logits for one in self._collectors[0].values())

    @property
    def attention_listeners(self) -> tuple[Recorder, ...]:
        """For the calls to come: this one, as long as layers have something to say."""
        return (self,) if None in self.facts or self._who["on_attention"] else ()

    @property
    def block_listeners(self) -> tuple[Recorder, ...]:
        """For the calls to come: this one, if block outputs are needed."""
        return (self,) if self._who["on_block"] else ()

    def on_attention(self, index: int, queries: torch.Tensor, stored: StoreLayer, facts: LayerFacts) -> None:
        self.facts[index] = facts
        with self.watch:
            for row, one in self._who["on_attention"]:
                own = stored if self.rows == 1 else stored.part(row)  # a view for each token and layer takes its time
                one.on_attention(index, queries[row : row + 1], own, facts)

    def on_block(self, index: int, states: torch.Tensor) -> None:
        with self.watch:
            for row, one in self._who["on_block"]:
                one.on_block(index, states[row : row + 1])

    def on_evict(self, index: int, slots: torch.Tensor) -> None:
        """Layer ``index`` keeps the slots ``[rows or 1, kv_heads or 1, n_kept]`` alone."""
        for row, one in self._who["on_evict"]:
            one.on_evict(index, slots[row if slots.shape[0] > 1 else 0])

    def on_ids(self, ids: torch.Tensor) -> None:
        """Tokens ``[rows, new]`` that have passed."""
        self._ids.append(ids)

    def read(self, states: torch.Tensor, ids: torch.Tensor | None) -> None:
        """Final states ``[rows, new, hidden]`` of tokens that have passed: their logits are computed."""
        with self.watch:
            for start, logits in logit_slices(self._head, states):
                self.on_logits(logits, None if ids is None else ids[:, start : start + logits.shape[1]])

    def on_logits(self, logits: torch.Tensor, ids: torch.Tensor | None) -> None:
        """Logits ``[rows, new, vocabulary]`` of tokens that have passed, in order, each once."""
        with self.watch:
            for row, one in self._who["on_logits"]:
                one.on_logits(logits[row], None if ids is None else ids[row].to(logits.device))

    def of_layer(self, row: int, index: int, layer: StoreLayer, kv_heads: slice = slice(None), *,
                 candidates: range, seed: int = 0) -> TokenSignals:  # fmt: skip
        """What one row of one layer stores, as signals of a single layer.

        Parameters
        ----------
        layer : StoreLayer
            Layer ``index`` of the store, all rows.
        kv_heads : slice
            The KV heads that are described; they must store the same positions unless the signals that are read
            are those of the candidates alone.
        candidates : range
            Slots that may be chosen.
        seed : int
            Added to a number made of the text.
        """
        total = layer.keys.shape[1]
        view = layer.part(row, kv_heads)
        group = self._query_heads // total
        first, stop, _ = kv_heads.indices(total)
        heads = slice(first * group, stop * group)
        positions = view.slot_positions()[0]
        ids = self._ids_of(row)
        return TokenSignals(
            input_ids=ids[positions[0].to(ids.device)],
            layers=1,
            query_heads=(stop - first) * group,
            kv_heads=stop - first,
            candidates=candidates,
            seed=seed + _text_seed(ids),
            facts=(self.facts[index],),
            positions=positions,
            seen=view.seen,
            values_by_name={name: one.of_layer(index, view, heads) for name, one in self._collectors[row].items()},
        )

    def _ids_of(self, row: int) -> torch.Tensor:
        self._ids = [torch.cat(self._ids, dim=1)]
        return self._ids[0][row]

    def whole(self, store: TokenStore, *, candidates: range, seed: int = 0) -> TokenSignals:
        """The signals of all layers of a one-row store from which nothing was evicted."""
        self._ids = [torch.cat(self._ids, dim=1)]
        views = [layer.part(0) for layer in store.layers]
        return TokenSignals(
            input_ids=self._ids[0][0],
            layers=self.layers,
            query_heads=self._query_heads,
            kv_heads=store.layers[0].keys.shape[1],
            candidates=candidates,
            seed=seed,
            facts=tuple(self.facts),
            values_by_name={name: _of_all_layers(one, views) for name, one in self._collectors[0].items()},
        )

    def keep(self, needs: Iterable[str]) -> None:
        """Drop all collectors but those of these signals."""
        names = {signal(kind, **given) for kind, given in map(parse_signal, needs)}
        self._collectors = [{name: one for name, one in row.items() if name in names} for row in self._collectors]
        self._who = {method: self._that(method) for method in self._who}

    @property
    def held_bytes(self) -> int:
        """Bytes of all that is held for scoring."""
        return sum(_bytes(vars(one)) for collectors in self._collectors for one in collectors.values())


def _text_seed(ids: torch.Tensor) -> int:
    """A number that differs between texts: the same text draws the same, alone or in a batch."""
    return int((ids * torch.arange(1, len(ids) + 1, device=ids.device)).sum()) % 2**31 * 10_007


def _of_all_layers(collector: Collector, layers: list[StoreLayer]):
    if not collector.per_layer:
        return collector.of_layer(0, layers[0], slice(None))
    parts = [collector.of_layer(index, layer, slice(None)) for index, layer in enumerate(layers)]
    if isinstance(parts[0], list):
        return [one for part in parts for one in part]
    return torch.cat([part.to(parts[-1].device) for part in parts])


def _bytes(held) -> int:
    if isinstance(held, torch.Tensor):
        return held.numel() * held.element_size()
    if isinstance(held, dict):
        return sum(map(_bytes, held.values()))
    return sum(map(_bytes, held)) if isinstance(held, (list, tuple)) else 0
