"""What a study will need: arithmetic, memory, disk and time, from a configuration alone."""

from __future__ import annotations

import time
from dataclasses import dataclass

from forward_influence.memory import memory_need

#: Share of the matrix-product rate that the engine reaches, for estimates of time (benchmarks/README.md).
_EFFICIENCY = 0.8

_ELEMENT_SIZE = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Estimate:
    """Need of a study.

    Attributes
    ----------
    weights, one_row, all_rows : int
        Bytes: the weights; a pass with one ablated row; a pass with all of them at once.
    disk : int
        Bytes of the rows.
    seconds : float
        At the matrix-product rate measured now on the device.
    """

    weights: int
    one_row: int
    all_rows: int
    disk: int
    seconds: float

    def sentence(self) -> str:
        """The estimate for a person."""
        from forward_influence.progress import duration

        return (
            f"Expected: about {duration(self.seconds)}; memory {size(self.weights)} for the weights and "
            f"{size(self.one_row)} (one ablated row at a time) to {size(self.all_rows)} (all at once) for the cache; "
            f"{size(self.disk)} on disk."
        )


def size(count: int) -> str:
    """Bytes as people say them."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{max(1, round(count / 2**20))} MiB"


def multiply_adds(config, context: float) -> float:
    """Multiply-adds of one token: projections, attention over ``context`` tokens, and the head.

    Parameters
    ----------
    config : PretrainedConfig
    context : float
        Mean number of keys that a query sees.
    """
    text = config.get_text_config()
    hidden, queries = text.hidden_size, text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or queries
    width = getattr(text, "head_dim", None) or hidden // queries
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    active = getattr(text, "num_experts_per_tok", None) or 1
    inner = (getattr(text, "moe_intermediate_size", None) or inner) * active
    projections = hidden * width * (2 * queries + 2 * heads)
    block = projections + 3 * hidden * inner + 2 * queries * width * context
    return text.num_hidden_layers * block + hidden * text.vocab_size


def matrix_rate(device: str, dtype: str, *, shape=(1536, 576, 1536), seconds: float = 0.3) -> float:
    """Multiply-adds per second of a matrix product, measured now: best of what fits in ``seconds``."""
    import torch

    rows, inner, columns = shape
    left = torch.randn(rows, inner, device=device, dtype=getattr(torch, dtype))
    right = torch.randn(inner, columns, device=device, dtype=getattr(torch, dtype))
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        left @ right
        synchronize()
        best = min(best, time.perf_counter() - began)
    return rows * inner * columns / best


def estimate(plan, *, rows_pending: int, chunk_size: int) -> Estimate:
    """What is left of a plan.

    Parameters
    ----------
    plan : Plan
    rows_pending : int
        Rows that are still to be measured.
    chunk_size : int
    """
    spec, config = plan.spec, plan.source.config
    lengths = [min(len(one.ids), spec.prefix + spec.horizon) - spec.prefix for one in plan.documents]
    horizon = max(lengths)
    mean_horizon = sum(lengths) / len(lengths)
    need = memory_need(
        config,
        prefix=spec.prefix,
        horizon=horizon,
        chunk_size=chunk_size,
        element_size=_ELEMENT_SIZE[plan.dtype],
    )
    documents = rows_pending / len(plan.selectors)
    row_tokens = (rows_pending + documents) * mean_horizon  # the reference is a row as well
    work = row_tokens * multiply_adds(config, spec.prefix + mean_horizon / 2)
    work += documents * spec.prefix * multiply_adds(config, spec.prefix / 2)
    return Estimate(
        weights=plan.source.weights_bytes(plan.dtype),
        one_row=need.total(1),
        all_rows=need.total(len(plan.selectors)),
        disk=int(rows_pending * (mean_horizon * 13 + mean_horizon / spec.chunk * 90 + 600)),
        seconds=work / matrix_rate(plan.device, plan.dtype) / _EFFICIENCY,
    )
