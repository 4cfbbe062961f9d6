"""How each signal is computed during a prefill, chunk by chunk.

A collector sees what passes by (queries, block outputs, logits) and gives its signal at the end. None
holds vocabulary x tokens or tokens x tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from infokv.attention import LayerFacts, attention_scores, visible
from infokv.entropy import restricted_entropy
from infokv.signals import parse_signal
from infokv.store import TokenStore


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


class QueriesCollector:
    """Signal ``queries``: per layer ``[query_heads, tokens or last, head_dim]``, post-RoPE."""

    wants_logits = False

    def __init__(self, tokens: int, *, last: int | None, layers: int):
        self._first = 0 if last is None else max(0, tokens - last)
        self._parts: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self._seen = [0] * layers
        self.facts: list[LayerFacts | None] = [None] * layers

    def on_attention(self, layer: int, queries: torch.Tensor, facts: LayerFacts) -> None:
        self.facts[layer] = facts
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

    def __init__(self, tokens: int, *, window: int, layers: int):
        super().__init__(tokens, last=window, layers=layers)

    def result(self, store: TokenStore) -> torch.Tensor:
        queries = super().result(store)
        device = queries[-1].device
        return torch.stack([self._of_layer(i, one, store).to(device) for i, one in enumerate(queries)])

    def _of_layer(self, index: int, queries: torch.Tensor, store: TokenStore) -> torch.Tensor:
        layer, facts = store.layers[index], self.facts[index]
        keys = layer.stored_keys[0]
        grouped = queries.reshape(keys.shape[0], -1, *queries.shape[1:])
        places = torch.arange(layer.seen - queries.shape[1], layer.seen, device=keys.device)
        sight = visible(layer.slot_positions(keys.device)[0, 0], places, facts.window)
        means = []
        for group, head_keys in zip(grouped, keys):  # one KV head at a time: group x window x tokens scores
            scores = attention_scores(group, head_keys, facts).masked_fill(~sight, float("-inf"))
            means.append(scores.softmax(dim=-1).mean(dim=1))
        return torch.cat(means).float()


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
    if kind == "queries":
        return QueriesCollector(tokens, layers=layers, **parameters)
    return StoredCollector(tokens, which=f"stored_{kind}")
