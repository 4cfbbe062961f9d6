"""Running tiny models inside compress(), and what the naive reference wants to know of it."""

from __future__ import annotations

import torch

from infokv.calls import cache_argument


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
