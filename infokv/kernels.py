"""The kernels under the one attention function: scores, soft-caps, and causal attention without a mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

#: Upper bound of the score block of the soft-capped path, elements.
_SCORE_BLOCK = 1 << 24


@dataclass(frozen=True)
class LayerFacts:
    """What a layer told the attention function about itself.

    Attributes
    ----------
    scaling : float
        Factor on query-key products.
    softcap : float or None
        Scores become ``softcap * tanh(score / softcap)``.
    window : int or None
        Sliding window: a query at position p sees positions above ``p - window``.
    """

    scaling: float
    softcap: float | None
    window: int | None


def attention_scores(queries: torch.Tensor, keys: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
    """Scaled and capped query-key products in float32 or better, before any mask.

    Parameters
    ----------
    queries : Tensor ``[..., queries, head_dim]``, post-RoPE
    keys : Tensor ``[..., keys, head_dim]``, post-RoPE
    facts : LayerFacts
    """
    exact = torch.promote_types(queries.dtype, torch.float32)
    scores = queries.to(exact) @ keys.to(exact).transpose(-1, -2) * facts.scaling
    return scores if facts.softcap is None else facts.softcap * torch.tanh(scores / facts.softcap)


def softcapped(folded, keys, values, mask, facts: LayerFacts) -> torch.Tensor:
    """Attention with capped scores, which no fused kernel offers; in blocks of queries."""
    rows, heads, queries, _ = folded.shape
    step = max(1, _SCORE_BLOCK // (rows * heads * keys.shape[2]))
    keys = keys.to(torch.promote_types(keys.dtype, torch.float32))  # once, not for every block
    out = []
    for start in range(0, queries, step):
        block = folded[:, :, start : start + step]
        scores = attention_scores(block, keys, facts)
        if mask is not None:
            scores = scores + mask[:, :, start : start + step]
        out.append(scores.softmax(dim=-1).to(values.dtype) @ values)
    return torch.cat(out, dim=2)


def halves(query: torch.Tensor) -> bool:
    """Whether :func:`causal` can attend to the past and to the new tokens apart: on a CPU, where masks are slow."""
    return query.device.type == "cpu" and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def causal(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """Causal attention of the last slots' tokens, without a mask: ``[rows, query_heads, new, head_dim]``.

    The past, which all see, and the new tokens are attended to apart and joined by their softmax sums. Half of the
    work of a mask is saved on the new tokens, and reading it on the past.
    """
    rows, _, new, width = query.shape
    past = keys.shape[2] - new
    if past == 0:
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own, own_sum = attend(query, keys[:, :, past:], values[:, :, past:], 0.0, True, scale=scaling)
    folded = query.reshape(rows, keys.shape[1], -1, width)
    before, before_sum = attend(folded, keys[:, :, :past], values[:, :, :past], 0.0, False, scale=scaling)
    weight = torch.sigmoid(before_sum.reshape(own_sum.shape) - own_sum)[..., None]
    return torch.lerp(own, before.reshape(own.shape), weight.to(own.dtype))
