"""Running a text through a model chunk by chunk, over a token store.

The only loop over chunks: the prefill of a prompt and the lockstep continuation of ablated rows both go
through :func:`forward_chunks`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator

import torch

from infokv.attention import ONE_AT_A_TIME, AttentionListener
from infokv.calls import BlockListener, StoreCalls, evaluation
from infokv.errors import Refused
from infokv.store import TokenStore

#: Logits held at a time, elements over all rows.
_LOGITS = 1 << 24


def forward_chunks(
    model,
    store: TokenStore,
    input_ids: torch.Tensor,
    *,
    chunk_size: int,
    total_length: int,
    listeners: tuple[AttentionListener, ...] = (),
    block_listeners: tuple[BlockListener, ...] = (),
) -> Iterator[tuple[int, torch.Tensor]]:
    """Feed tokens to the model in chunks; keys and values go to the store.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model with its head. Dropout and autocast are off for the call.
    store : TokenStore
        Receives the tokens behind those it has seen.
    input_ids : int Tensor ``[rows, tokens]``
    chunk_size : int
        Tokens of a call; changes the speed only.
    total_length : int
        Length of the whole text, of which this may be a part. RoPE whose frequencies depend on the length
        is fixed for it.

    Yields
    ------
    start : int
        Position of the chunk's first token.
    states : Tensor ``[rows, chunk, hidden]``
        What the model's head takes: final states after the last norm.
    """
    if chunk_size < 1:
        raise Refused(f"chunk_size is {chunk_size}; a call takes at least 1 token.")
    calls = StoreCalls(model)
    for offset in range(0, input_ids.shape[1], chunk_size):
        ids = input_ids[:, offset : offset + chunk_size]
        start = store.seen
        positions = torch.arange(start, start + ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
        # All of it lasts for one call: whoever consumes this generator may use the model in between.
        with evaluation(model), calls.on(store, total_length, listeners, block_listeners):
            out = calls.base(
                input_ids=ids, position_ids=positions, use_cache=True, return_dict=True, **{calls.cache_name: store}
            )
        yield start, out.last_hidden_state


class Head:
    """The model's own way from final states to logits: projection, soft-cap and scale included.

    The model's forward runs with its base replaced by the given states, so nothing of the head is
    written again here.
    """

    def __init__(self, model):
        self._model = model

    @property
    def vocabulary(self) -> int:
        """Number of logits per token."""
        return self._model.get_output_embeddings().weight.shape[0]

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """``[rows, tokens, hidden]`` to logits ``[rows, tokens, vocabulary]`` in the dtype of the head.

        Raises
        ------
        Refused
            If the model does not take its states from its base model.
        """
        from transformers.modeling_outputs import BaseModelOutputWithPast

        class FinalStates(BaseModelOutputWithPast):
            """Whatever else a head looks for (router logits, cross attentions) is absent."""

            def __getattr__(self, name):
                if name.startswith("__"):
                    raise AttributeError(name)

        base = self._model.base_model
        states = states.to(self._model.get_output_embeddings().weight.dtype)
        here, asked = threading.get_ident(), []

        def give(*args, **kwargs):
            if threading.get_ident() != here:  # somebody else's call of the same model
                return (before or type(base).forward.__get__(base))(*args, **kwargs)
            asked.append(True)
            return FinalStates(last_hidden_state=states)

        with ONE_AT_A_TIME, torch.no_grad(), evaluation(self._model), _unhooked(base):
            before = base.__dict__.get("forward")
            base.forward = give
            try:
                ids = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
                # Not a call of the module: its hooks are meant for the calls of whoever made them.
                logits = self._model.forward(input_ids=ids, use_cache=False, return_dict=True).logits
            finally:
                del base.forward
                if before is not None:
                    base.forward = before
        if not asked:
            raise Refused(
                f"{type(self._model).__name__} does not take the states for its head from its base model, "
                f"{type(base).__name__}, so that its logits cannot be computed from them. Use another model."
            )
        return logits


@contextlib.contextmanager
def _unhooked(module) -> Iterator[None]:
    """Without a module's hooks: they are meant for the calls of whoever made them."""
    hooks = module._forward_hooks, module._forward_pre_hooks
    module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        module._forward_hooks, module._forward_pre_hooks = hooks


def logit_slices(head: Head, states: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Logits of a chunk of final states, a few tokens at a time: start in the chunk, and logits.

    Logits of a whole chunk would outweigh everything else in memory.
    """
    step = max(1, _LOGITS // (states.shape[0] * head.vocabulary))
    for start in range(0, states.shape[1], step):
        # Contiguous, so that the rows fold into one matrix product with the vocabulary.
        yield start, head(states[:, start : start + step].contiguous())
