"""What a measurement needs in memory, what is free, and whether an error means that it ran out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forward_influence.cgroups import free_in_groups
from forward_influence.shapes import layer_shapes
from infokv.store import TokenStore

#: Share of the free memory that a pass may plan for; the rest absorbs what an estimate cannot see.
_USABLE = 0.8
_MOST_ROWS = 32


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of a pass, beyond the weights."""

    fixed: int
    per_row: int

    def total(self, rows: int) -> int:
        """Bytes with ``rows`` ablated rows; the reference row comes on top."""
        return self.fixed + self.per_row * (rows + 1)


def memory_need(config, *, prefix: int, horizon: int, chunk_size: int, element_size: int) -> MemoryNeed:
    """Estimate from a model's configuration; no weights needed.

    Parameters
    ----------
    config : PretrainedConfig
    prefix, horizon, chunk_size : int
        Tokens.
    element_size : int
        Bytes of one number in the model's dtype.
    """
    layers, hidden = layer_shapes(config), config.get_text_config().hidden_size
    token = sum(2 * layer.heads * layer.width for layer in layers) * element_size
    length = prefix + horizon
    chunk = min(chunk_size, max(prefix, horizon))
    widest = max(3 * layer.inner + 4 * layer.queries * layer.width for layer in layers)
    activations = chunk * (6 * hidden + widest) * element_size
    mask = max(layer.queries // layer.heads for layer in layers) * chunk * length * (element_size + 1)
    logits = 1 << 28  # slices of logits and their float64 copies
    return MemoryNeed(fixed=prefix * token + logits, per_row=length * token + activations + mask)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device; on the CPU within the limits of a container or batch job."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    import psutil

    available, allowed = psutil.virtual_memory().available, free_in_groups()
    return available if allowed is None else min(available, allowed)


def rows_that_fit(model, prefix: TokenStore, horizon: int, chunk_size: int, others: int = 0) -> int:
    """How many ablated rows one pass can hold beside the reference and ``others``; at least 1."""
    weight = model.get_input_embeddings().weight
    need = memory_need(
        model.config,
        prefix=prefix.seen,
        horizon=horizon,
        chunk_size=chunk_size,
        element_size=weight.element_size(),
    )
    room = int(free_memory(weight.device) * _USABLE) - need.total(others)
    return max(1, min(_MOST_ROWS, room // need.per_row))
