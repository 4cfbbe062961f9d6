"""Signals of queries without their rotation; see :mod:`infokv.rotation`."""

from __future__ import annotations

import torch

from infokv.collectors import Collector
from infokv.errors import Refused
from infokv.kernels import LayerFacts
from infokv.rotation import Tables, rotation_of
from infokv.store_layer import StoreLayer


class _Unrotating(Collector):
    """Sees the queries of each layer with the rotation of the call undone."""

    def __init__(self, model):
        self._layers = model.config.get_text_config().num_hidden_layers
        self._rotation = rotation_of(model)
        self._tables: Tables = {}  # of the call that is running

    def on_attention(self, index: int, queries: torch.Tensor, stored: StoreLayer, facts: LayerFacts) -> None:
        if index == 0:
            new, device = queries.shape[2], queries.device
            self._tables = self._rotation.tables(torch.arange(stored.seen - new, stored.seen, device=device), queries)
        here = _on(self._tables, queries.device)
        self.on_unrotated(index, self._rotation.undo(index, queries[0], here), stored)

    def on_unrotated(self, index: int, queries: torch.Tensor, stored: StoreLayer) -> None:
        """Layer ``index`` attends with queries ``[query_heads, new, head_dim]``, float32, before RoPE."""
        raise NotImplementedError


class UnrotatedQueriesCollector(_Unrotating):
    """Signal ``unrotated_queries``: per layer ``[query_heads, tokens or last, head_dim]``, float32."""

    def __init__(self, model, *, last: int | None):
        super().__init__(model)
        self._last = last
        self._held: list[torch.Tensor | None] = [None] * self._layers

    def on_unrotated(self, index: int, queries: torch.Tensor, stored: StoreLayer) -> None:
        held = self._held[index]
        joined = queries if held is None else torch.cat([held, queries], dim=1)
        self._held[index] = joined if self._last is None else joined[:, -self._last :].clone()

    def of_layer(self, index: int, layer: StoreLayer, heads: slice) -> list[torch.Tensor]:
        return [self._held[index][heads]]


class FutureQueriesCollector(_Unrotating):
    """Signal ``future_queries``: per layer ``[query_heads, 1 + head_dim, head_dim]``, mean and covariance.

    The first ``skip`` queries of a text are left out. Mean and covariance are kept up to date, not the queries;
    at the end they are rotated by the mean rotation of the next ``future`` positions. The covariance divides by
    the number of queries. Source: Expected Attention (arXiv 2510.00636) as in kvpress.
    """

    def __init__(self, model, *, skip: int, future: int):
        super().__init__(model)
        self._skip = skip
        self._future = future
        self._ahead: Tables = {}
        self._counts = [0] * self._layers
        self._moments: list[torch.Tensor | None] = [None] * self._layers  # mean in row 0, scatter in the others

    def on_unrotated(self, index: int, queries: torch.Tensor, stored: StoreLayer) -> None:
        self._add(index, queries[:, max(0, self._skip - (stored.seen - queries.shape[1])) :])
        if index == self._layers - 1:  # inside the call, where RoPE that depends on the length is the text's
            ahead = torch.arange(stored.seen, stored.seen + self._future, device=queries.device)
            self._check_rotation(ahead, queries)
            self._ahead = self._rotation.mean_tables(ahead, queries)

    def _check_rotation(self, ahead: torch.Tensor, queries: torch.Tensor) -> None:
        """RoPE that depends on the length turns later queries in a way that does not fit the keys of this text."""
        beyond = self._rotation.tables(torch.cat([ahead[:1] - 1, ahead]), queries)
        for kind, pair in self._tables.items():
            if not all(torch.equal(here[-1], there[0]) for here, there in zip(pair, beyond[kind])):
                raise Refused(
                    f"This model rotates keys by the length of the text, which its next {self._future} positions would "
                    "change; use another scorer, or a smaller n_future."
                )

    def _add(self, index: int, queries: torch.Tensor) -> None:
        """Join the moments of these queries with those so far."""
        heads, new, width = queries.shape
        if self._moments[index] is None:
            self._moments[index] = queries.new_zeros(heads, 1 + width, width)
        if not new:
            return
        moments, before = self._moments[index], self._counts[index]
        self._counts[index] = total = before + new
        mean = queries.mean(dim=1)
        centred = queries - mean[:, None]
        apart = mean - moments[:, 0]
        moments[:, 1:] += centred.transpose(1, 2) @ centred
        moments[:, 1:] += apart[:, :, None] * apart[:, None] * (before * new / total)
        moments[:, 0] += apart * (new / total)

    def of_layer(self, index: int, layer: StoreLayer, heads: slice) -> list[torch.Tensor]:
        moments = self._moments[index][heads]
        ahead = _on(self._ahead, moments.device)
        covariance = moments[:, 1:] / max(1, self._counts[index])
        turned = self._rotation.rotate(index, torch.cat([moments[:, :1], covariance], dim=1), ahead)
        turned[:, 1:] = self._rotation.rotate(index, turned[:, 1:].transpose(1, 2), ahead)
        return [turned]


def _on(tables: Tables, device: torch.device) -> Tables:
    """Tables on the device of a layer; layers may be on several."""
    return {kind: (cos.to(device), sin.to(device)) for kind, (cos, sin) in tables.items()}
