"""Per-token facts of a text, for people who look at tokens rather than run a study."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from forward_influence.errors import UserError
from forward_influence.inputs import at_least, causal_model, check_length, shown, token_ids
from infokv.calls import evaluation
from infokv.prefill import prefill
from infokv.signals import TokenSignals


def token_signals(model, input_ids: torch.Tensor, needs: Iterable[str] = ("entropy", "self_information"), *,
                  chunk_size: int = 256, total_length: int | None = None) -> TokenSignals:  # fmt: skip
    """Facts about each token of one text.

    Parameters
    ----------
    model : PreTrainedModel or LoadedModel
        A causal language model of transformers; as before afterwards.
    input_ids : int Tensor, array or list ``[1, tokens]``
    needs : iterable of str
        Names of signals, such as ``"entropy(k=64)"``; see :data:`infokv.signals.SIGNALS`.
    chunk_size : int
        Tokens of a call; changes the speed only.
    total_length : int, optional
        Length of the whole text if this is its beginning: RoPE may depend on it.

    Returns
    -------
    TokenSignals
        All positions are candidates.

    Raises
    ------
    UserError, Refused
        If the text is not one row of the model's tokens, or a signal or another argument is unknown.
    """
    if isinstance(needs, str) or not isinstance(needs, Iterable):
        raise UserError(f"needs is {shown(needs)}; write a tuple of signals, such as ('entropy',).")
    model = causal_model(model)
    ids = token_ids(model, input_ids)
    tokens = ids.shape[1]
    chunk_size = at_least(1, "chunk_size", chunk_size, "tokens of a call")
    if total_length is not None:
        total_length = at_least(tokens, "total_length", total_length, "tokens of the whole text, or None for this one")
    check_length(model, total_length or tokens)
    with evaluation(model):
        return prefill(model, ids, needs, chunk_size=chunk_size, total_length=total_length)[1]
