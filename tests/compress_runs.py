"""Scorers on short texts, tiny models run inside compress(), and what the naive reference wants to know of it."""

from __future__ import annotations

import torch

from infokv import TOVA, InfoKV, PyramidKV, SnapKV
from infokv.calls import cache_argument

#: Tokens of a prompt, and of the text that goes on from it.
PROMPT, LENGTH = 40, 52

#: Sets per head, shared by the heads, and shared with uneven layers.
SCORERS = {
    "per head": SnapKV(window=6, kernel=3),
    "mixed": InfoKV(window=6, kernel=3, alpha=0.5),
    "shared": TOVA(),
    "uneven": PyramidKV(window=6, kernel=3, beta=5),
    "entropy layers": InfoKV(window=6, kernel=3, layer_budget="entropy"),
}


def flags(kept, before: int) -> list[torch.Tensor]:
    """Kept positions per layer as bool ``[kv_heads, before]``, of the first row."""
    return [torch.zeros(one.shape[1], before, dtype=torch.bool).scatter_(1, one[0], True) for one in kept]


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error over the largest absolute logit, or over 1 if that is less."""
    return ((got - expected).abs().max() / expected.abs().max().clamp_min(1)).item()


def run(model, ids: torch.Tensor, pieces, cache=None) -> torch.Tensor:
    """A hand-written loop over a text cut at ``pieces``; logits of all tokens."""
    name, out = cache_argument(model), []
    with torch.no_grad():
        for start, stop in zip((0, *pieces), (*pieces, ids.shape[1])):
            result = model(ids[:, start:stop], **({} if cache is None else {name: cache}))
            cache = result[name]
            out.append(result.logits)
    return torch.cat(out, dim=1)


def steps(ids: torch.Tensor, prompt: int) -> tuple[int, ...]:
    """Cuts of a text into its prompt and single tokens."""
    return tuple(range(prompt, ids.shape[1]))
