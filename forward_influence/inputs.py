"""What the public functions are given: a model, token ids, and whole numbers."""

from __future__ import annotations

import operator
import reprlib

import numpy
import torch

from forward_influence.context import context_limit
from forward_influence.errors import UserError
from infokv.modelcheck import ensure_checked


def shown(value) -> str:
    """A value for a sentence: short, and on one line."""
    return " ".join(reprlib.repr(value).split())


def whole_number(value) -> int | None:
    """The int that an integer of any library stands for; None for all else, booleans and floats included."""
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def at_least(least: int, name: str, value, meaning: str) -> int:
    """A whole number from an int, or an integer of NumPy or torch, or a sentence about what it is instead."""
    number = whole_number(value)
    if number is None or number < least:
        raise UserError(f"{name} is {shown(value)}; it must be a whole number of at least {least} ({meaning}).")
    return number


def pass_sizes(chunk_size, batch) -> tuple[int, int | None]:
    """``chunk_size`` and ``batch`` of the engine as ints; the batch may be None."""
    chunk_size = at_least(1, "chunk_size", chunk_size, "tokens of a call")
    return chunk_size, None if batch is None else at_least(1, "batch", batch, "ablated rows at once, or None")


def causal_model(given):
    """The causal language model itself, also out of what ``load_model`` returns.

    Raises
    ------
    UserError
        If it is something else, or has no head.
    Refused
        If it does not run right on a token store, as far as a short text shows.
    """
    from forward_influence.models import LoadedModel

    model = given.model if isinstance(given, LoadedModel) else given
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "get_output_embeddings"):
        raise UserError(
            f"model is {shown(given)}; it must be a causal language model of transformers, or what load_model returns."
        )
    if model.get_output_embeddings() is None:
        raise UserError(f"{type(model).__name__} has no head that predicts tokens; load it with AutoModelForCausalLM.")
    ensure_checked(model)
    return model


def token_ids(model, given, name: str = "input_ids") -> torch.Tensor:
    """``given`` as int64 ``[1, tokens]`` on the model's device.

    Raises
    ------
    UserError
        If it has another shape, is empty, holds no whole numbers, or an id that the model does not have.
    """
    if not isinstance(given, torch.Tensor):
        try:
            array = numpy.array(given)
        except (TypeError, ValueError):  # ragged, or a tensor of another device
            array = numpy.array(None)
        if array.size and array.dtype.kind not in "iu":
            raise UserError(
                f"{name} is {shown(given)}; it must be a tensor, an array or a list [1, tokens], and token ids are "
                "whole numbers."
            )
        given = (
            torch.from_numpy(array.astype(array.dtype.newbyteorder("="))) if array.size else torch.empty(array.shape)
        )
    if given.dim() != 2 or given.shape[0] != 1 or given.shape[1] == 0:
        raise UserError(f"{name} has shape {list(given.shape)}; it must be [1, tokens], with at least one token.")
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise UserError(f"{name} is {given.dtype}; token ids are whole numbers.")
    table = model.get_input_embeddings().weight
    count = len(table)
    ids = given.to(table.device, torch.int64)
    unknown = ((ids < 0) | (ids >= count)).nonzero()
    if len(unknown):
        place = int(unknown[0, 1])
        raise UserError(
            f"{name} holds {int(ids[0, place])} at position {place}; {type(model).__name__} has token ids from 0 to "
            f"{count - 1}, so use its own tokenizer."
        )
    return ids


def check_ids(model, input_ids, prefix_length) -> tuple[torch.Tensor, int]:
    """``input_ids`` on the model's device and the prefix length, or a sentence about what is wrong with them."""
    ids = token_ids(model, input_ids)
    length, prefix = ids.shape[1], whole_number(prefix_length)
    if prefix is None or not 1 <= prefix < length:
        raise UserError(
            f"prefix_length is {shown(prefix_length)}; with {length} tokens it must be a whole number from 1 to "
            f"{length - 1}, so that at least one token follows."
        )
    check_length(model, length)
    return ids, prefix


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
