"""The masking engine: one prefix, several ablations of it, and the future rerun in lockstep.

Row 0 of a batch is the reference, the others are ablated rows. All share the prefix forward, and from
there on the same calls, kernels and chunks, so that a difference between rows is the ablation and nothing
else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from forward_influence.errors import UserError
from forward_influence.inputs import (
    at_least,
    causal_model,
    check_ids,
    check_length,
    pass_sizes,
    shown,
    token_ids,
)
from forward_influence.kl import Comparison, compare_logits
from forward_influence.memory import rows_that_fit
from forward_influence.removal import Removal, check_shapes, removal_sets, stack_sets, unique_sets
from infokv.calls import evaluation
from infokv.errors import is_out_of_memory
from infokv.forward import Head, forward_chunks, logit_slices
from infokv.prefill import prefill
from infokv.store import TokenStore

CHUNK_SIZE = 256


class MaskingEngine:
    """Ablated rows of one text in lockstep with its reference row.

    Parameters
    ----------
    model : PreTrainedModel or LoadedModel
        A causal language model of transformers; as before afterwards.
    prefix : TokenStore
        One row that holds the prefix, from :func:`infokv.prefill.prefill`; it is read only.
    continuation : int Tensor, array or list ``[1, horizon]``
        The tokens at positions P to P + horizon - 1.
    hidden : bool Tensor ``[rows, layers or 1, kv_heads or 1, prefix]``
        What each ablated row does not see.
    chunk_size : int
        Tokens of a call; changes the speed only.

    Raises
    ------
    UserError
        If something is not of these kinds, or the text is too long for the model.
    Refused
        If the store has more than one row, or the flags do not fit it.

    Notes
    -----
    Source: arXiv 2606.26875, the masking study behind its Figure 2.
    """

    def __init__(self, model, prefix: TokenStore, continuation: torch.Tensor, hidden: torch.Tensor, *,
                 chunk_size: int = CHUNK_SIZE):  # fmt: skip
        if not isinstance(prefix, TokenStore):
            raise UserError(f"prefix is {shown(prefix)}; it must be the store from infokv.prefill.prefill.")
        if not isinstance(hidden, torch.Tensor) or hidden.dtype != torch.bool or hidden.dim() != 4:
            raise UserError(
                f"hidden is {shown(hidden)}; it must be a bool tensor [rows, layers or 1, KV heads or 1, "
                f"{prefix.seen}]."
            )
        self.model = causal_model(model)
        self.chunk_size = at_least(1, "chunk_size", chunk_size, "tokens of a call")
        self._prefix = prefix
        self._continuation = token_ids(self.model, continuation, "continuation")
        check_length(self.model, prefix.seen + self._continuation.shape[1])
        self._hidden = torch.cat([hidden.new_zeros(1, *hidden.shape[1:]), hidden]).to(self._continuation.device)

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
    model : PreTrainedModel or LoadedModel
        A causal language model of transformers; as before afterwards.
    input_ids : int Tensor, array or list ``[1, prefix + horizon]``
    removed : sequence
        For each set, a collection of positions (duplicates count once), or a bool tensor
        ``[layers or 1, kv_heads or 1, prefix]``. An empty set is run like any other. A mask of zeros and ones as
        integers is refused: it could not be told from positions.
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
        If a position lies outside the prefix, an id outside the vocabulary, something has another kind or shape,
        or the text is too long for the model.
    Refused
        If a set leaves nothing of the prefix, or the model does something that cannot be masked. (A query always
        sees itself, so a sliding window that is emptied behind it is no error.)

    Notes
    -----
    Source: arXiv 2606.26875, definition of Forward Influence.
    """
    model = causal_model(model)
    chunk_size, batch = pass_sizes(chunk_size, batch)
    ids, prefix_length = check_ids(model, input_ids, prefix_length)
    flags = removal_sets(removed, prefix_length)
    if not flags:
        return torch.empty(0, ids.shape[1] - prefix_length, dtype=torch.float64)
    with evaluation(model):
        store, _ = prefill(model, ids[:, :prefix_length], chunk_size=chunk_size, total_length=ids.shape[1])
        parts = compare_rows(model, store, ids[:, prefix_length:], flags, chunk_size=chunk_size, batch=batch)
    return parts.kl


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
    chunk_size, batch = pass_sizes(chunk_size, batch)
    check_shapes(flags, prefix)
    unique, source = unique_sets(flags)
    others = int(companion is not None)  # the companion has a store of its own
    rows = batch or rows_that_fit(model, prefix, continuation.shape[1], chunk_size, others)

    def engine(part):
        hidden = stack_sets(part, prefix.seen, continuation.device)
        return MaskingEngine(model, prefix, continuation, hidden, chunk_size=chunk_size)

    return compare_in_passes(
        model, continuation, engine, unique, source, rows=rows, companion=companion, notify=notify, progress=progress
    )


def compare_in_passes(model, continuation: torch.Tensor, engine: Callable, unique: Sequence, source: list[int], *,
                      rows: int, companion=None, notify, progress) -> Comparison:  # fmt: skip
    """Variants of a prefix against its reference, some at a time; see :func:`compare_rows`.

    Parameters
    ----------
    engine : callable
        Takes some of the variants and gives what has ``states()`` as :class:`MaskingEngine` has.
    unique : sequence
        Variants that differ.
    source : list of int
        For each row of the result, which of them it is.
    rows : int
        Variants of one pass.
    """
    done: list[Comparison] = []
    start = 0
    while start < len(unique) or (companion and not done):
        part = unique[start : start + rows]
        try:
            extra = None if done or companion is None else companion()
            done.append(_one_pass(model, continuation, engine(part), extra, progress))
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
    joined = _joined(done, dim=0)
    return Comparison(joined.kl[source], joined.delta_nll[source], joined.top1_changed[source])


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


def _one_pass(model, continuation, engine, companion, progress) -> Comparison:
    head, targets = Head(model), next_tokens(continuation)
    done, waiting = [], None
    for offset, states in engine.states():
        if companion is not None:
            waiting, extra = _take(companion, waiting, states.shape[1])
            states = torch.cat([states, extra])
        parts = []
        for start, logits in logit_slices(head, states):
            first = offset + start
            parts.append(compare_logits(logits[0], logits[1:], targets[first : first + logits.shape[1]]))
        chunk = _joined(parts, dim=1)
        # Once a chunk: each copy waits for all that a GPU was given.
        done.append(Comparison(chunk.kl.cpu(), chunk.delta_nll.cpu(), chunk.top1_changed.cpu()))
        progress(chunk.kl.numel())
    return _joined(done, dim=1)


def _joined(parts: Sequence[Comparison], dim: int) -> Comparison:
    """Comparisons of other rows (dim 0) or later offsets (dim 1) as one."""
    return Comparison(
        torch.cat([one.kl for one in parts], dim),
        torch.cat([one.delta_nll for one in parts], dim),
        torch.cat([one.top1_changed for one in parts], dim),
    )


def _take(pieces: Iterator[torch.Tensor], waiting: torch.Tensor | None, count: int):
    """The next ``count`` tokens of a stream of states ``[1, tokens, hidden]``, and what is left over."""
    held = [] if waiting is None else [waiting]
    while sum(piece.shape[1] for piece in held) < count:
        held.append(next(pieces))
    joined = torch.cat(held, dim=1)
    return joined[:, count:], joined[:, :count]
