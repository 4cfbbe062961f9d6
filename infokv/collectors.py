"""How each signal is computed while tokens pass, chunk by chunk or one by one.

A collector belongs to one row of a batch. It sees what passes by (queries, block outputs, logits) and gives its
signal for what a layer stores, at any time. None holds vocabulary x tokens or tokens x tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from infokv.entropy import restricted_entropy
from infokv.errors import Refused
from infokv.kernels import LayerFacts
from infokv.signals import parse_signal
from infokv.store_layer import StoreLayer
from infokv.windows import WindowOptions, window_scores

#: Elements of all layers' states that are compared at a time.
_STATES = 1 << 22


class Collector:
    """What a collector may do; each method has a default that does nothing.

    Attributes
    ----------
    wants_logits : bool
        Whether :meth:`on_logits` must be told of every token.
    per_layer : bool
        Whether the signal differs from layer to layer.
    """

    wants_logits = False
    per_layer = True

    def on_attention(self, index: int, queries: torch.Tensor, stored: StoreLayer, facts: LayerFacts) -> None:
        """Layer ``index`` attends with queries ``[1, query_heads, new, head_dim]``; their keys are stored."""

    def on_block(self, index: int, states: torch.Tensor) -> None:
        """Block ``index`` gives states ``[1, new, hidden]``."""

    def on_logits(self, logits: torch.Tensor, ids: torch.Tensor | None) -> None:
        """Logits ``[new, vocabulary]`` of the tokens ``ids``, which come in order, each once."""

    def on_evict(self, index: int, slots: torch.Tensor) -> None:
        """Layer ``index`` keeps the slots ``[kv_heads or 1, n_kept]`` alone."""

    def of_layer(self, index: int, layer: StoreLayer, heads: slice):
        """The signal of what ``layer`` stores, as a :class:`TokenSignals` of one layer has it.

        ``layer`` may be some KV heads of layer ``index``; ``heads`` are the query heads that read them.
        """
        raise NotImplementedError


class _PositionTable(Collector):
    """Numbers by position, on the last dimension."""

    def __init__(self):
        self._parts: list[torch.Tensor] = []

    def table(self) -> torch.Tensor:
        """All numbers so far, ``[..., positions]``."""
        self._parts = [torch.cat(self._parts, dim=-1)]
        return self._parts[0]

    def _at(self, table: torch.Tensor, layer: StoreLayer) -> torch.Tensor:
        if layer.length == layer.seen:
            return table[..., : layer.seen]
        return table[..., layer.slot_positions()[0, 0].to(table.device)]


class EntropyCollector(_PositionTable):
    """Signal ``entropy``: ``[tokens]``, nats, of the next-token distribution at i (``next``) or i - 1 (``self``)."""

    wants_logits = True
    per_layer = False

    def __init__(self, *, k, align: str, renormalise: bool, base: str):
        super().__init__()
        self._align = align
        self._options = {"k": None if k == "full" else k, "renormalise": renormalise, "base": base}

    def on_logits(self, logits: torch.Tensor, ids: torch.Tensor | None) -> None:
        self._parts.append(restricted_entropy(logits, **self._options))

    def of_layer(self, index: int, layer: StoreLayer, heads: slice) -> torch.Tensor:
        table = self.table()
        if self._align == "self":  # moved to the token that it is about; the first one has 0
            table = torch.cat([table.new_zeros(1), table[:-1]])
        return self._at(table, layer)


class SelfInformationCollector(_PositionTable):
    """Signal ``self_information``: ``[tokens]``, nats, -log p(token | earlier ones), from logits at i - 1.

    Source: Selective Context (its signal), in the full context of the same model.
    """

    wants_logits = True
    per_layer = False

    def __init__(self):
        super().__init__()
        self._before: torch.Tensor | None = None  # logits of the token before

    def on_logits(self, logits: torch.Tensor, ids: torch.Tensor | None) -> None:
        if ids is None:
            raise Refused("Self-information needs token ids, and embeddings were passed; pass input_ids.")
        if self._before is None:
            self._parts.append(logits.new_zeros(1, dtype=torch.float32))
        else:
            self._parts.append(F.cross_entropy(self._before.float(), ids[:1], reduction="none"))
        self._parts.append(F.cross_entropy(logits[:-1].float(), ids[1:], reduction="none"))
        self._before = logits[-1:].clone()

    def of_layer(self, index: int, layer: StoreLayer, heads: slice) -> torch.Tensor:
        return self._at(self.table(), layer)


class RepresentationEvolutionCollector(_PositionTable):
    """Signal ``representation_evolution``: ``[layers, tokens]``, 1 - cosine with the last block's output.

    The states of one chunk are held until its last block has run, never those of the text.
    Source: arXiv 2606.26875, D^(l) of the scorer.
    """

    def __init__(self, *, layers: int):
        super().__init__()
        self._last = layers - 1
        self._chunk: list[torch.Tensor] = []

    def on_block(self, index: int, states: torch.Tensor) -> None:
        if index == 0:
            self._chunk = []
        self._chunk.append(states[0])
        if index < self._last:
            return
        chunk, device = self._chunk, states.device
        self._chunk = []
        step = max(1, _STATES // (len(chunk) * states.shape[-1]))
        for start in range(0, states.shape[1], step):
            part = torch.stack([one[start : start + step].to(device) for one in chunk]).float()
            size = torch.linalg.vector_norm(part, dim=-1).clamp_min(torch.finfo(part.dtype).tiny)
            evolution = 1 - torch.linalg.vecdot(part, part[-1:]) / size / size[-1]
            evolution[-1] = 0  # by identity, not by arithmetic
            self._parts.append(evolution)

    def of_layer(self, index: int, layer: StoreLayer, heads: slice) -> torch.Tensor:
        return self._at(self.table()[index : index + 1], layer)


class QueriesCollector(Collector):
    """Signal ``queries``: per layer ``[query_heads, tokens or last, head_dim]``, post-RoPE."""

    def __init__(self, *, last: int | None, layers: int):
        self._last = last
        self._parts: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self._held = [0] * layers
        self.facts: list[LayerFacts | None] = [None] * layers

    def on_attention(self, index: int, queries: torch.Tensor, stored: StoreLayer, facts: LayerFacts) -> None:
        self.facts[index] = facts
        new = queries[0, :, -(self._last or 0) :].clone()
        self._parts[index].append(new)
        self._held[index] += new.shape[1]
        if self._last is not None and self._held[index] > 2 * self._last:
            self.queries(index, slice(None))

    def queries(self, index: int, heads: slice) -> torch.Tensor:
        """The held queries of one layer."""
        joined = torch.cat(self._parts[index], dim=1)[:, -(self._last or 0) :].contiguous()
        self._parts[index], self._held[index] = [joined], joined.shape[1]
        return joined[heads]

    def of_layer(self, index: int, layer: StoreLayer, heads: slice) -> list[torch.Tensor]:
        return [self.queries(index, heads)]


class WindowAttentionCollector(QueriesCollector):
    """Signal ``window_attention``: ``[layers, query_heads, tokens]``, mean over the last ``window`` queries.

    Softmax in float32 over all keys that the layer lets a query see (its own sliding window included), with
    its scaling and soft-cap. Source: SnapKV (arXiv 2404.14469), the observation window.
    """

    _OPTIONS = WindowOptions(heads="query", kernel=1)

    def __init__(self, *, window: int, layers: int):
        super().__init__(last=window, layers=layers)

    def of_layer(self, index: int, layer: StoreLayer, heads: slice) -> torch.Tensor:
        queries = self.queries(index, heads)
        scores = _scores(queries, layer, range(layer.length), self.facts[index], self._OPTIONS)
        return scores[None]


class AttentionMassCollector(Collector):
    """Signal ``attention_mass``: ``[layers, query_heads, tokens]``, attention that each token received.

    The sum over all queries of their softmax weights, block by block; a token near the end was seen by fewer
    queries. Source: H2O (arXiv 2306.14048), accumulated attention.
    """

    _OPTIONS = WindowOptions(heads="query", rows="sum", kernel=1)

    def __init__(self, *, layers: int):
        self._mass: list[torch.Tensor | None] = [None] * layers  # by slot

    def on_attention(self, index: int, queries: torch.Tensor, stored: StoreLayer, facts: LayerFacts) -> None:
        weights = _scores(queries[0], stored, range(stored.length), facts, self._OPTIONS)
        if self._mass[index] is not None:
            weights[:, : self._mass[index].shape[1]] += self._mass[index]
        self._mass[index] = weights

    def on_evict(self, index: int, slots: torch.Tensor) -> None:
        mass = self._mass[index]
        by_head = slots.to(mass.device).repeat_interleave(mass.shape[0] // slots.shape[0], dim=0)
        self._mass[index] = mass.gather(-1, by_head)

    def of_layer(self, index: int, layer: StoreLayer, heads: slice) -> torch.Tensor:
        return self._mass[index][None, heads, -layer.length :]  # a window may have left the first ones behind


class StoredCollector(Collector):
    """Signals ``keys`` and ``values``: per layer ``[kv_heads, tokens, head_dim]``, views of the store."""

    def __init__(self, *, which: str):
        self._which = which

    def of_layer(self, index: int, layer: StoreLayer, heads: slice) -> list[torch.Tensor]:
        return [getattr(layer, self._which)[0]]


def _scores(queries, layer: StoreLayer, region: range, facts: LayerFacts, options: WindowOptions) -> torch.Tensor:
    """Window attention of the newest queries over what a layer stores."""
    device = queries.device
    places = torch.arange(layer.seen - queries.shape[1], layer.seen, device=device)
    return window_scores(
        queries, layer.stored_keys[0], places, layer.slot_positions()[0].to(device), region, facts, options
    )  # fmt: skip


def make_collector(name: str, *, model) -> Collector:
    """The collector of a signal, by the signal's name, for one row of a batch."""
    kind, parameters = parse_signal(name)
    layers = model.config.get_text_config().num_hidden_layers
    if kind == "entropy":
        return EntropyCollector(**parameters)
    if kind == "self_information":
        return SelfInformationCollector()
    if kind == "representation_evolution":
        return RepresentationEvolutionCollector(layers=layers)
    if kind == "window_attention":
        return WindowAttentionCollector(layers=layers, **parameters)
    if kind == "attention_mass":
        return AttentionMassCollector(layers=layers)
    if kind == "queries":
        return QueriesCollector(layers=layers, **parameters)
    if kind in ("unrotated_queries", "future_queries"):
        from infokv.query_collectors import FutureQueriesCollector, UnrotatedQueriesCollector

        made = UnrotatedQueriesCollector if kind == "unrotated_queries" else FutureQueriesCollector
        return made(model, **parameters)
    return StoredCollector(which=f"stored_{kind}")
