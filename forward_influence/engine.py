"""The masking engine: one prefix, several ablations of it, and the future rerun in lockstep.

Row 0 of a batch is the reference, the others are ablated rows. All share the prefix forward, and from
there on the same calls, kernels and chunks, so that a difference between rows is the ablation and nothing
else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from forward_influence.errors import UserError
from forward_influence.inputs import Removal, check_ids, evaluation, removal_flags
from forward_influence.kl import Comparison, compare_logits
from forward_influence.memory import is_out_of_memory, rows_that_fit
from infokv.forward import Head, forward_chunks, logit_slices
from infokv.prefill import prefill
from infokv.store import TokenStore

CHUNK_SIZE = 256


class MaskingEngine:
    """Ablated rows of one text in lockstep with its reference row.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model of transformers; as before afterwards.
    prefix : TokenStore
        One row that holds the prefix, from :func:`infokv.prefill.prefill`; it is read only.
    continuation : int Tensor ``[1, horizon]``
        The tokens at positions P to P + horizon - 1.
    hidden : bool Tensor ``[rows, layers or 1, kv_heads or 1, prefix]``
        What each ablated row does not see.
    chunk_size : int
        Tokens of a call; changes the speed only.

    Notes
    -----
    Source: arXiv 2606.26875, the masking study behind its Figure 2.
    """

    def __init__(self, model, prefix: TokenStore, continuation: torch.Tensor, hidden: torch.Tensor, *,
                 chunk_size: int = CHUNK_SIZE):  # fmt: skip
        self.model = model
        self.chunk_size = chunk_size
        self._prefix = prefix
        self._continuation = continuation
        self._hidden = torch.cat([hidden.new_zeros(1, *hidden.shape[1:]), hidden])

    @property
    def rows(self) -> int:
        """Rows of the batch, the reference included."""
        return len(self._hidden)

    def states(self) -> Iterator[tuple[int, torch.Tensor]]:
        """First offset and final states ``[rows, chunk, hidden]`` of each chunk; row 0 is the reference."""
        horizon = self._continuation.shape[1]
        total = self._prefix.seen + horizon
        store = self._prefix.fork(self.rows, total)
        store.hide(self._hidden)
        ids = self._continuation.expand(self.rows, -1)
        for start, states in forward_chunks(self.model, store, ids, chunk_size=self.chunk_size, total_length=total):
            yield start - self._prefix.seen, states

    def logits(self) -> Iterator[tuple[int, torch.Tensor]]:
        """First offset and logits ``[rows, tokens, vocabulary]`` of small slices; row 0 is the reference.

        The logits at offset o belong to the query at position P + o and predict token P + o + 1.
        """
        head = Head(self.model)
        for offset, states in self.states():
            for start, part in logit_slices(head, states):
                yield offset + start, part


def next_tokens(continuation: torch.Tensor) -> torch.Tensor:
    """The real next token of each offset ``[horizon]``; -1 for the last, which the text does not hold."""
    return torch.cat([continuation[0, 1:], continuation.new_full((1,), -1)])


def influence(model, input_ids: torch.Tensor, removed: Sequence[Removal], *, prefix_length: int,
              chunk_size: int = CHUNK_SIZE, batch: int | None = None) -> torch.Tensor:  # fmt: skip
    """Forward Influence of sets of prefix positions.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model of transformers; as before afterwards.
    input_ids : int Tensor ``[1, prefix + horizon]``
    removed : sequence
        For each set, a collection of positions (duplicates count once), or a bool tensor
        ``[layers or 1, kv_heads or 1, prefix]``. An empty set is run like any other.
    prefix_length : int
        Tokens that are cached before anything is removed.
    chunk_size : int
        Tokens of a call; changes the speed only.
    batch : int, optional
        Ablated rows of one pass; by default as many as free memory allows.

    Returns
    -------
    float64 Tensor ``[len(removed), horizon]``
        ``KL(full cache || without the set)`` in nats, at each offset, over the whole vocabulary.

    Raises
    ------
    UserError
        If a position lies outside the prefix, a shape does not fit, or the text is too long for the model.
    Refused
        If a set leaves nothing of the prefix, or the model does something that cannot be masked. (A query always
        sees itself, so a sliding window that is emptied behind it is no error.)

    Notes
    -----
    Source: arXiv 2606.26875, definition of Forward Influence.
    """
    ids = check_ids(model, input_ids, prefix_length)
    flags = [removal_flags(one, prefix_length, index) for index, one in enumerate(removed)]
    if not flags:
        return torch.empty(0, ids.shape[1] - prefix_length, dtype=torch.float64)
    with evaluation(model):
        store, _ = prefill(model, ids[:, :prefix_length], chunk_size=chunk_size, total_length=ids.shape[1])
        parts = compare_rows(model, store, ids[:, prefix_length:], flags, chunk_size=chunk_size, batch=batch)
    return parts.kl.cpu()


def compare_rows(model, prefix: TokenStore, continuation: torch.Tensor, flags: Sequence[torch.Tensor], *,
                 chunk_size: int = CHUNK_SIZE, batch: int | None = None,
                 companion: Callable[[], Iterator[torch.Tensor]] | None = None,
                 notify: Callable[[str], None] = lambda sentence: None,
                 progress: Callable[[int], None] = lambda row_tokens: None) -> Comparison:  # fmt: skip
    """All ablated rows against the reference, in as many passes as memory asks for.

    Identical non-empty sets are computed once. When memory runs out, the batch is halved with a notice and
    the pass is run again.

    Parameters
    ----------
    flags : sequence of bool Tensors ``[layers or 1, kv_heads or 1, prefix]``
    batch : int, optional
        Ablated rows of one pass.
    companion : callable, optional
        Gives final states ``[1, tokens, hidden]`` of the same continuation, computed in another way
        (:func:`recomputed_states`); they are compared with the reference of the first pass.
    notify : callable
        Takes a sentence for the user.
    progress : callable
        Takes the number of row-tokens that were finished since the last call.

    Returns
    -------
    Comparison
        Tensors ``[len(flags), horizon]`` on the CPU; with a companion, its row comes last.
    """
    if batch is not None and batch < 1:
        raise UserError(f"batch is {batch}; it must be at least 1 ablated row, or None for what memory allows.")
    unique, source = _unique(flags)
    others = int(companion is not None)  # the companion has a store of its own
    rows = batch or rows_that_fit(model, prefix, continuation.shape[1], chunk_size, others)
    done: list[Comparison] = []
    start = 0
    while start < len(unique) or (companion and not done):
        part = unique[start : start + rows]
        try:
            extra = None if done or companion is None else companion()
            done.append(_one_pass(model, prefix, continuation, part, chunk_size, extra, progress))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or len(part) <= 1:
                raise
            rows = max(1, len(part) // 2)
            notify(f"Memory ran out with {len(part)} ablated rows at once; going on with {rows}.")
            continue
        start += len(part)
    if companion:  # its row ends the first pass; bring it behind all others
        first = done[0].kl.shape[0] - 1
        source = [place + (place >= first) for place in source] + [first]
    joined = [torch.cat(tensors) for tensors in zip(*((one.kl, one.delta_nll, one.top1_changed) for one in done))]
    return Comparison(*(tensor[source] for tensor in joined))


def recomputed_states(model, input_ids: torch.Tensor, prefix_length: int, chunk_size: int) -> Iterator[torch.Tensor]:
    """Final states ``[1, tokens, hidden]`` of the continuation, prefix included run in chunks of another size.

    Their distance from the reference is the numerical floor: what machine and dtype do without any removal.
    """
    # Not a divisor: kernels often give the same bits for a half or a quarter of a block.
    other = max(1, chunk_size * 3 // 8) if chunk_size > 1 else 2
    store = TokenStore(model.config.get_text_config().num_hidden_layers, input_ids.shape[1])
    for part in (input_ids[:, :prefix_length], input_ids[:, prefix_length:]):
        for start, states in forward_chunks(model, store, part, chunk_size=other, total_length=input_ids.shape[1]):
            if start >= prefix_length:
                yield states


def _one_pass(model, prefix, continuation, flags, chunk_size, companion, progress) -> Comparison:
    engine = MaskingEngine(
        model, prefix, continuation, _stack(flags, prefix.seen, continuation.device), chunk_size=chunk_size
    )
    head, targets = Head(model), next_tokens(continuation)
    parts, waiting = [], None
    for offset, states in engine.states():
        if companion is not None:
            waiting, extra = _take(companion, waiting, states.shape[1])
            states = torch.cat([states, extra])
        for start, logits in logit_slices(head, states):
            first = offset + start
            compared = compare_logits(logits[0], logits[1:], targets[first : first + logits.shape[1]])
            parts.append([tensor.cpu() for tensor in (compared.kl, compared.delta_nll, compared.top1_changed)])
            progress(parts[-1][0].numel())
    return Comparison(*(torch.cat(tensors, dim=1) for tensors in zip(*parts)))


def _take(pieces: Iterator[torch.Tensor], waiting: torch.Tensor | None, count: int):
    """The next ``count`` tokens of a stream of states ``[1, tokens, hidden]``, and what is left over."""
    held = [] if waiting is None else [waiting]
    while sum(piece.shape[1] for piece in held) < count:
        held.append(next(pieces))
    joined = torch.cat(held, dim=1)
    return joined[:, count:], joined[:, :count]


def _unique(flags: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
    """The sets to run, and for each given set its place among them. Empty sets are never merged."""
    unique, source, known = [], [], {}
    for one in flags:
        key = (tuple(one.shape), one.cpu().numpy().tobytes()) if bool(one.any()) else None
        if key is None or key not in known:
            known[key] = len(unique)
            unique.append(one)
        source.append(known[key])
    return unique, source


def _stack(flags: Sequence[torch.Tensor], prefix: int, device) -> torch.Tensor:
    """Sets with one or many layers and heads as one tensor ``[rows, layers or 1, kv_heads or 1, prefix]``."""
    if not flags:
        return torch.zeros(0, 1, 1, prefix, dtype=torch.bool, device=device)
    try:
        shape = torch.broadcast_shapes(*(one.shape for one in flags))
    except RuntimeError:
        shapes = ", ".join(str(list(one.shape)) for one in flags)
        raise UserError(f"Removed sets of shapes {shapes} do not fit together; use one number of layers.") from None
    return torch.stack([one.to(device).expand(shape) for one in flags])
