"""What a measurement needs in memory, what is free, and whether an error means that it ran out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
    text = config.get_text_config()
    queries = text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or queries
    width = getattr(text, "head_dim", None) or text.hidden_size // queries
    token = 2 * text.num_hidden_layers * heads * width * element_size
    length = prefix + horizon
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    chunk = min(chunk_size, max(prefix, horizon))
    activations = chunk * (6 * text.hidden_size + 3 * inner + 4 * queries * width) * element_size
    mask = (queries // heads) * chunk * length * (element_size + 1)
    logits = 1 << 28  # slices of logits and their float64 copies
    return MemoryNeed(fixed=prefix * token + logits, per_row=length * token + activations + mask)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    import psutil

    return psutil.virtual_memory().available


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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on any device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    words = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed", "bad_alloc")
    return any(one in text for one in words)
