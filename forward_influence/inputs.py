"""What the engine is given: removed sets, token ids, and a model in evaluation mode."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator

import torch

from forward_influence.context import context_limit
from forward_influence.errors import UserError

Removal = Collection[int] | torch.Tensor


def removal_flags(removed: Removal, prefix: int, index: int = 0) -> torch.Tensor:
    """A set of positions as bool ``[layers or 1, kv_heads or 1, prefix]``.

    Raises
    ------
    UserError
        If a position is outside the prefix or no whole number, or a tensor has another shape or dtype.
    """
    if isinstance(removed, torch.Tensor) and removed.dtype == torch.bool:
        if removed.dim() != 3 or removed.shape[-1] != prefix:
            raise UserError(
                f"removed[{index}] is a bool tensor {list(removed.shape)}; it must be [layers or 1, KV heads or 1, "
                f"{prefix}], the last being the prefix length."
            )
        return removed
    if not isinstance(removed, Iterable):
        raise UserError(f"removed[{index}] is {removed!r}; each set is a collection of positions, such as [3, 4].")
    flags = torch.zeros(1, 1, prefix, dtype=torch.bool)
    for position in removed:
        boolean = isinstance(position, bool) or str(getattr(position, "dtype", "")).endswith("bool")
        try:
            place = None if boolean else position.__index__()
        except (AttributeError, TypeError):
            place = None
        if place is None:
            raise UserError(
                f"removed[{index}] holds {position!r}; positions are whole numbers (a mask is a bool tensor "
                f"[layers or 1, KV heads or 1, {prefix}])."
            )
        if not 0 <= place < prefix:
            raise UserError(
                f"removed[{index}] holds position {place}, which is outside the prefix; positions go from 0 to "
                f"{prefix - 1}."
            )
        flags[0, 0, place] = True
    return flags


def check_ids(model, input_ids: torch.Tensor, prefix_length: int) -> torch.Tensor:
    """``input_ids`` on the model's device, or a sentence about what is wrong with them."""
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise UserError(f"input_ids has shape {list(input_ids.shape)}; it must be [1, prefix + horizon].")
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise UserError(f"input_ids is {input_ids.dtype}; token ids are whole numbers.")
    length = input_ids.shape[1]
    if not isinstance(prefix_length, int) or not 1 <= prefix_length < length:
        raise UserError(
            f"prefix_length is {prefix_length}; with {length} tokens it must be from 1 to {length - 1}, "
            "so that at least one token follows."
        )
    check_length(model, length)
    return input_ids.to(model.get_input_embeddings().weight.device)


def check_length(model, length: int) -> None:
    """Refuse a text beyond the model's context limit, where models go on silently with nonsense."""
    config = model.config.get_text_config()
    limit = context_limit(config)
    grows = "dynamic" in str(getattr(config, "rope_parameters", None) or "")  # made for any length
    if limit is not None and length > limit and not grows:
        raise UserError(
            f"The text has {length} tokens, and {type(model).__name__} has a context of {limit}; use a shorter one, or "
            "load the model with extend_context='yarn'."
        )


@contextlib.contextmanager
def evaluation(model) -> Iterator[None]:
    """Dropout off inside the block; the training flag of every module is put back afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
