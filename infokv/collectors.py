"""How each signal is computed during a prefill, chunk by chunk.

A collector sees what passes by (queries, block outputs, logits) and gives its signal at the end. None
holds vocabulary x tokens or tokens x tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from infokv.attention import LayerFacts
from infokv.entropy import restricted_entropy
from infokv.signals import parse_signal
from infokv.store import StoreLayer, TokenStore
from infokv.windows import WindowOptions, window_scores


class EntropyCollector:
    """Signal ``entropy``: ``[tokens]``, nats, of the next-token distribution at i (``next``) or i - 1 (``self``)."""

    wants_logits = True

    def __init__(self, tokens: int, *, k, align: str, renormalise: bool, base: str):
        self._align = align
        self._options = {"k": None if k == "full" else k, "renormalise": renormalise, "base": base}
        self._parts: list[torch.Tensor] = []

    def on_logits(self, logits: torch.Tensor, next_ids: torch.Tensor) -> None:
        self._parts.append(restricted_entropy(logits, **self._options))

    def result(self, store: TokenStore) -> torch.Tensor:
        return _aligned(torch.cat(self._parts), self._align)


class SelfInformationCollector:
    """Signal ``self_information``: ``[tokens]``, nats, -log p(token | earlier ones), from logits at i - 1.

    Source: Selective Context (its signal), in the full context of the same model.
    """

    wants_logits = True

    def __init__(self, tokens: int):
        self._parts: list[torch.Tensor] = []

    def on_logits(self, logits: torch.Tensor, next_ids: torch.Tensor) -> None:
        self._parts.append(F.cross_entropy(logits[: len(next_ids)].float(), next_ids, reduction="none"))

    def result(self, store: TokenStore) -> torch.Tensor:
        known = torch.cat(self._parts)
        return torch.cat([known.new_zeros(1), known])


def _aligned(at: torch.Tensor, align: str) -> torch.Tensor:
    """Values at i as they are, or moved to the token that they are about; the first token then has 0."""
    return at if align == "next" else torch.cat([at.new_zeros(1), at[:-1]])


class RepresentationEvolutionCollector:
    """Signal ``representation_evolution``: ``[layers, tokens]``, 1 - cosine with the last block's output.

    The states of one chunk are held until its last block has run, never those of the text.
    Source: arXiv 2606.26875, D^(l) of the scorer.
    """

    wants_logits = False

    def __init__(self, tokens: int, *, layers: int):
        self._last = layers - 1
        self._chunk: list[torch.Tensor] = []
        self._parts: list[torch.Tensor] = []

    def on_block(self, layer: int, states: torch.Tensor) -> None:
        if layer == 0:
            self._chunk = []
        if layer < self._last:
            self._chunk.append(states[0])
            return
        final = F.normalize(states[0].float(), dim=-1)
        rows = [1 - (F.normalize(one.to(final.device).float(), dim=-1) * final).sum(-1) for one in self._chunk]
        self._parts.append(torch.stack([*rows, torch.zeros_like(final[:, 0])]))
        self._chunk = []

    def result(self, store: TokenStore) -> torch.Tensor:
        return torch.cat(self._parts, dim=1)


class FactsCollector:
    """Scaling, soft-cap and window of each layer, as the layers themselves say."""

    def __init__(self, layers: int):
        self.facts: list[LayerFacts | None] = [None] * layers

    def on_attention(self, layer: int, queries: torch.Tensor, stored: StoreLayer, facts: LayerFacts) -> None:
        self.facts[layer] = facts


class QueriesCollector(FactsCollector):
    """Signal ``queries``: per layer ``[query_heads, tokens or last, head_dim]``, post-RoPE."""

    wants_logits = False

    def __init__(self, tokens: int, *, last: int | None, layers: int):
        super().__init__(layers)
        self._first = 0 if last is None else max(0, tokens - last)
        self._parts: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self._seen = [0] * layers

    def on_attention(self, layer: int, queries: torch.Tensor, stored: StoreLayer, facts: LayerFacts) -> None:
        super().on_attention(layer, queries, stored, facts)
        skipped = max(0, self._first - self._seen[layer])
        self._seen[layer] += queries.shape[2]
        if skipped < queries.shape[2]:
            self._parts[layer].append(queries[0, :, skipped:].clone())

    def result(self, store: TokenStore) -> list[torch.Tensor]:
        return [torch.cat(parts, dim=1) for parts in self._parts]


class WindowAttentionCollector(QueriesCollector):
    """Signal ``window_attention``: ``[layers, query_heads, tokens]``, mean over the last ``window`` queries.

    Softmax in float32 over all keys that the layer lets a query see (its own sliding window included), with
    its scaling and soft-cap. Source: SnapKV (arXiv 2404.14469), the observation window.
    """

    _OPTIONS = WindowOptions(heads="query", kernel=1)

    def __init__(self, tokens: int, *, window: int, layers: int):
        super().__init__(tokens, last=window, layers=layers)

    def result(self, store: TokenStore) -> torch.Tensor:
        queries = super().result(store)
        device = queries[-1].device
        return torch.stack([self._of_layer(i, one, store).to(device) for i, one in enumerate(queries)])

    def _of_layer(self, index: int, queries: torch.Tensor, store: TokenStore) -> torch.Tensor:
        layer = store.layers[index]
        device = queries.device
        return window_scores(
            queries,
            layer.stored_keys[0],
            torch.arange(layer.seen - queries.shape[1], layer.seen, device=device),
            layer.slot_positions(device)[0],
            range(layer.length),
            self.facts[index],
            self._OPTIONS,
        )


class AttentionMassCollector:
    """Signal ``attention_mass``: ``[layers, query_heads, tokens]``, attention that each token received.

    The sum over all queries of their softmax weights, block by block; a token near the end was seen by fewer
    queries. Source: H2O (arXiv 2306.14048), accumulated attention.
    """

    wants_logits = False

    def __init__(self, tokens: int, *, layers: int):
        self._tokens = tokens
        self._mass: list[torch.Tensor | None] = [None] * layers

    def on_attention(self, layer: int, queries: torch.Tensor, stored: StoreLayer, facts: LayerFacts) -> None:
        heads, new = queries.shape[1], queries.shape[2]
        if self._mass[layer] is None:
            self._mass[layer] = queries.new_zeros(heads, self._tokens, dtype=torch.float32)
        weights = window_scores(
            queries[0],
            stored.stored_keys[0],
            torch.arange(stored.seen - new, stored.seen, device=queries.device),
            stored.slot_positions(queries.device)[0],
            range(stored.length),
            facts,
            WindowOptions(heads="query", rows="sum", kernel=1),
        )
        self._mass[layer][:, : stored.length] += weights

    def result(self, store: TokenStore) -> torch.Tensor:
        return torch.stack([one.to(self._mass[-1].device) for one in self._mass])


class StoredCollector:
    """Signals ``keys`` and ``values``: per layer ``[kv_heads, tokens, head_dim]``, views of the store."""

    wants_logits = False

    def __init__(self, tokens: int, *, which: str):
        self._which = which

    def result(self, store: TokenStore) -> list[torch.Tensor]:
        return [getattr(layer, self._which)[0] for layer in store.layers]


def make_collector(name: str, *, tokens: int, layers: int):
    """The collector of a signal, by the signal's name."""
    kind, parameters = parse_signal(name)
    if kind == "entropy":
        return EntropyCollector(tokens, **parameters)
    if kind == "self_information":
        return SelfInformationCollector(tokens)
    if kind == "representation_evolution":
        return RepresentationEvolutionCollector(tokens, layers=layers)
    if kind == "window_attention":
        return WindowAttentionCollector(tokens, layers=layers, **parameters)
    if kind == "attention_mass":
        return AttentionMassCollector(tokens, layers=layers)
    if kind == "queries":
        return QueriesCollector(tokens, layers=layers, **parameters)
    return StoredCollector(tokens, which=f"stored_{kind}")
