"""Per-token facts of a text, for people who look at tokens rather than run a study."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from forward_influence.errors import UserError
from forward_influence.inputs import check_length, evaluation
from infokv.prefill import prefill
from infokv.signals import TokenSignals


def token_signals(model, input_ids: torch.Tensor, needs: Iterable[str] = ("entropy", "self_information"), *,
                  chunk_size: int = 256, total_length: int | None = None) -> TokenSignals:  # fmt: skip
    """Facts about each token of one text.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model of transformers; as before afterwards.
    input_ids : int Tensor ``[1, tokens]``
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
        If the text is not one row of tokens, or a signal is unknown.
    """
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise UserError(f"input_ids has shape {list(input_ids.shape)}; it must be [1, tokens] with a token.")
    ids = input_ids.to(model.get_input_embeddings().weight.device)
    check_length(model, max(ids.shape[1], total_length or 0))
    with evaluation(model):
        return prefill(model, ids, needs, chunk_size=chunk_size, total_length=total_length)[1]
