"""Predictive entropy of next-token distributions."""

from __future__ import annotations

import math

import torch

from infokv.errors import Refused


def restricted_entropy(
    logits: torch.Tensor, k: int | None = 256, *, renormalise: bool = True, base: str = "e"
) -> torch.Tensor:
    """Entropy of the k most likely next tokens.

    Parameters
    ----------
    logits : Tensor ``[..., vocabulary]``
        Raw logits, before temperature and processors; computed in float32.
    k : int or None
        How many of the most likely tokens count; None, or the vocabulary size or more: all.
    renormalise : bool
        Whether the k probabilities are scaled to sum to 1 (a true entropy, at most ln k). Otherwise their
        terms of the full entropy are summed.
    base : {"e", "2"}
        Nats or bits.

    Returns
    -------
    Tensor ``[...]``, float32
        Tokens of probability 0 contribute 0.

    Raises
    ------
    Refused
        If k or base is out of range.

    Notes
    -----
    Source: arXiv 2606.26875, the entropy term of InfoKV (k = 256).
    """
    if k is not None and k < 1:
        raise Refused(f"k is {k}; entropy needs at least 1 token, or None for the whole vocabulary.")
    if base not in ("e", "2"):
        raise Refused(f"base is {base!r}; entropy is measured in base 'e' (nats) or '2' (bits).")
    logits = logits.float()
    if k is None or k >= logits.shape[-1]:
        probabilities = logits.softmax(dim=-1)
    else:
        top = logits.topk(k, dim=-1, sorted=False).values
        total = (top if renormalise else logits).logsumexp(dim=-1, keepdim=True)
        probabilities = (top - total).exp()
    entropy = torch.special.entr(probabilities).sum(dim=-1)
    return entropy if base == "e" else entropy / math.log(2)
