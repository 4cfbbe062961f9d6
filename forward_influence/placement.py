"""On which device, in which dtype and with which attention function a model runs."""

from __future__ import annotations

import importlib.util
import numbers
import operator
from typing import TYPE_CHECKING

from forward_influence.errors import UserError

if TYPE_CHECKING:
    import torch

DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "float64": "float64",
    "fp64": "float64",
}
ATTENTIONS = ("sdpa", "eager", "flash_attention_2")


def resolve_device(device: str | int | torch.device = "auto") -> str:
    """The device to use: ``"cpu"`` or ``"cuda:N"``; ``"auto"`` takes the GPU where there is one.

    As in torch, a number is a GPU, and a ``torch.device`` is what it says.

    One device holds one model. To use several GPUs, run one process per GPU with ``--shard``. Apple's
    ``mps`` is not offered: KL is reduced in float64, which it does not have.

    Raises
    ------
    UserError
        If the device is unknown or absent; the message lists those present.
    """
    import torch

    present = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if device == "auto":
        return present[1] if len(present) > 1 else "cpu"
    number = isinstance(device, numbers.Integral) and not isinstance(device, bool)
    device = f"cuda:{operator.index(device)}" if number else str(device)
    name = "cuda:0" if device == "cuda" else device
    if name in present:
        return name
    if device in {"balanced", "balanced_low_0", "sequential", "mps"}:
        why = "one model stays on one CPU or CUDA device (use --shard to spread documents over several GPUs)"
    else:
        why = "it is not on this machine"
    raise UserError(f"device {device!r} cannot be used, because {why}; choose auto, {' or '.join(present)}.")


def resolve_dtype(dtype: str | torch.dtype = "auto", device: str = "cpu") -> str:
    """Canonical dtype name; ``"auto"`` is float32 on the CPU, bfloat16 on a GPU that has it, else float16.

    A ``torch.dtype`` is accepted as well as its name, with or without ``torch.``.

    Raises
    ------
    UserError
        If the name is unknown.
    """
    dtype = str(dtype).removeprefix("torch.")
    if dtype == "auto":
        return "float32" if device == "cpu" else _half_on(device)
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown; choose auto, float32, bfloat16, float16 or float64.")
    return DTYPES[dtype]


def _half_on(device: str) -> str:
    import torch

    with torch.cuda.device(device):
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if native else "float16"


def resolve_attention(attention: str | None, device: str = "cpu") -> str | None:
    """Name of the attention function for plain forwards, or None to take the model's best.

    Raises
    ------
    UserError
        If the name is unknown, or FlashAttention is asked for where it cannot run.
    """
    if attention is None or attention in {"sdpa", "eager"}:
        return attention
    if attention not in ATTENTIONS:
        raise UserError(f"attention {attention!r} is unknown; choose {', '.join(ATTENTIONS)}.")
    if device == "cpu" or importlib.util.find_spec("flash_attn") is None:
        raise UserError(
            f"attention {attention!r} needs a CUDA device and the package flash-attn, but the device is "
            f"{device} or the package is missing; choose sdpa or eager."
        )
    return attention


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a canonical name."""
    import torch

    return getattr(torch, name)
