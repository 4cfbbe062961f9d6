"""What a study will need: arithmetic, memory, disk and time, from a configuration alone."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from forward_influence.memory import free_memory, memory_need
from forward_influence.shapes import layer_shapes

#: Share of the matrix-product rate that the engine reaches, for estimates of time (benchmarks/README.md).
_EFFICIENCY = 0.7

_ELEMENT_SIZE = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Estimate:
    """Need of a study.

    Attributes
    ----------
    weights, one_row, all_rows : int
        Bytes: the weights; a pass with one ablated row; a pass with all of them at once.
    free : int
        Bytes that are free on the device now.
    disk : int
        Bytes of the rows.
    seconds : float
        At the matrix-product rate measured now on the device.
    """

    weights: int
    one_row: int
    all_rows: int
    free: int
    disk: int
    seconds: float

    def sentence(self) -> str:
        """The estimate for a person."""
        from forward_influence.progress import duration

        return (
            f"Expected: about {duration(self.seconds)}; memory {size(self.weights)} for the weights and "
            f"{size(self.one_row)} (one ablated row at a time) to {size(self.all_rows)} (all at once) for the cache, "
            f"of {size(self.free)} free; {size(self.disk)} on disk."
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
    work = text.hidden_size * text.vocab_size
    for layer in layer_shapes(config):
        work += text.hidden_size * (layer.width * 2 * (layer.queries + layer.heads) + 3 * layer.inner)
        work += 2 * layer.queries * layer.width * context
    return work


def matrix_rate(device: str, dtype: str, *, shape=(1536, 576, 1536), seconds: float = 0.3) -> float:
    """Multiply-adds per second of a matrix product, measured now: best of what fits in ``seconds``."""
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


def estimate(plan, todo: list[tuple], *, chunk_size: int) -> Estimate:
    """What is left of a plan.

    Parameters
    ----------
    plan : Plan
    todo : list of (TokenizedDocument, dict of selectors)
        Documents with the selectors whose rows are still to be measured; at least one.
    chunk_size : int
        Tokens of a call.
    """
    spec, config = plan.spec, plan.source.config
    horizons = [min(len(document.ids) - spec.prefix, spec.horizon) for document, _ in todo]
    rows = [len(selectors) for _, selectors in todo]
    need = memory_need(
        config,
        prefix=spec.prefix,
        horizon=max(horizons),
        chunk_size=chunk_size,
        element_size=_ELEMENT_SIZE[plan.dtype],
    )
    work = len(todo) * spec.prefix * multiply_adds(config, spec.prefix / 2)
    for horizon, count in zip(horizons, rows):  # the reference is a row as well
        work += (count + 1) * horizon * multiply_adds(config, spec.prefix + horizon / 2)
    return Estimate(
        weights=plan.source.weights_bytes(plan.dtype),
        one_row=need.total(1),
        all_rows=need.total(max(rows)),
        free=free_memory(torch.device(plan.device)),
        disk=sum(count * (h * 12 + h // spec.chunk * 65 + 500) for h, count in zip(horizons, rows)),
        seconds=work / matrix_rate(plan.device, plan.dtype) / _EFFICIENCY,
    )
