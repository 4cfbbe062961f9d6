"""Removed sets: what may be given, as flags, and which of them are alike."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy
import torch

from forward_influence.errors import UserError
from forward_influence.inputs import shown, whole_number
from infokv.store import TokenStore

Removal = Collection[int] | torch.Tensor


def removal_sets(removed: Iterable[Removal], prefix: int) -> list[torch.Tensor]:
    """Each set of ``removed`` as flags; see :func:`removal_flags`."""
    try:
        sets = iter(removed)
    except TypeError:
        raise UserError(
            f"removed is {shown(removed)}; it must be a list of sets of positions, such as [[3, 4], [10]]."
        ) from None
    return [removal_flags(one, prefix, index) for index, one in enumerate(sets)]


def removal_flags(removed: Removal, prefix: int, index: int = 0) -> torch.Tensor:
    """A set of positions as bool ``[layers or 1, kv_heads or 1, prefix]``.

    Raises
    ------
    UserError
        If a position is outside the prefix or no whole number, a tensor has another shape or dtype, or the numbers
        look like a mask of zeros and ones.
    """
    name = f"removed[{index}]"
    if isinstance(removed, numpy.ndarray) and removed.dtype.kind in "biu":
        removed = torch.from_numpy(numpy.array(removed, dtype=removed.dtype.newbyteorder("=")))
    if isinstance(removed, torch.Tensor) and removed.dtype == torch.bool:
        if removed.dim() != 3 or removed.shape[-1] != prefix:
            raise UserError(
                f"{name} is a bool tensor {list(removed.shape)}; it must be [layers or 1, KV heads or 1, "
                f"{prefix}], the last being the prefix length."
            )
        return removed
    flags = torch.zeros(1, 1, prefix, dtype=torch.bool)
    flags[0, 0, _places(removed, prefix, name)] = True
    return flags


def _places(removed: Removal, prefix: int, name: str) -> list[int]:
    flat = isinstance(removed, Iterable)
    if isinstance(removed, torch.Tensor):
        if removed.dtype == torch.uint8:
            raise UserError(
                f"{name} is a uint8 tensor, which may be a mask or positions; call .bool() on a mask [layers or 1, "
                f"KV heads or 1, {prefix}], or .long() on positions."
            )
        _refuse_numeric_mask(removed, prefix, name)
        flat = removed.dim() == 1
    if not flat:
        raise UserError(
            f"{name} is {shown(removed)}; each set is a collection of positions, such as [3, 4], and removed a list of "
            "these, such as [[3, 4]]."
        )
    places = []
    for position in removed:
        place = whole_number(position)
        if place is None:
            raise UserError(
                f"{name} holds {shown(position)}; positions are whole numbers (a mask is a bool tensor "
                f"[layers or 1, KV heads or 1, {prefix}])."
            )
        if not 0 <= place < prefix:
            raise UserError(
                f"{name} holds position {place}, which is outside the prefix; positions go from 0 to {prefix - 1}."
            )
        places.append(place)
    if isinstance(removed, Sequence | torch.Tensor):
        _refuse_numeric_mask(torch.tensor(places), prefix, name)
    return places


def _refuse_numeric_mask(numbers: torch.Tensor, prefix: int, name: str) -> None:
    """Zeros and ones, one for each position, would be read as the positions 0 and 1."""
    if not numbers.dim() or numbers.shape[-1] != prefix:
        return
    values = numbers.flatten().tolist()
    if len(set(values)) < len(values) and set(values) <= {0, 1}:
        raise UserError(
            f"{name} holds zeros and ones, as many as the prefix has positions, and looks like a mask; call .bool() on "
            f"it as a tensor [layers or 1, KV heads or 1, {prefix}]."
        )


def check_shapes(flags: Sequence[torch.Tensor], prefix: TokenStore) -> None:
    """Refuse sets of another number of layers or heads than the cache has."""
    layers, heads = len(prefix.layers), prefix.layers[0].keys.shape[1]
    for index, one in enumerate(flags):
        if one.shape[0] not in (1, layers) or one.shape[1] not in (1, heads):
            raise UserError(
                f"removed[{index}] is a bool tensor {list(one.shape)}; with this model it must be [{layers} layers "
                f"or 1, {heads} KV heads or 1, {prefix.seen}]."
            )


def unique_sets(flags: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
    """The sets to run, in their smallest shape, and for each given set its place among them.

    Empty sets are never merged.
    """
    unique, source, known = [], [], {}
    for one in map(_smallest, flags):
        key = (tuple(one.shape), one.cpu().numpy().tobytes()) if bool(one.any()) else None
        if key is None or key not in known:
            known[key] = len(unique)
            unique.append(one)
        source.append(known[key])
    return unique, source


def _smallest(flags: torch.Tensor) -> torch.Tensor:
    """The same set with one layer or one head where all of them are alike."""
    for dim in (0, 1):
        first = flags.narrow(dim, 0, 1)
        if bool((flags == first).all()):
            flags = first
    return flags


def stack_sets(flags: Sequence[torch.Tensor], prefix: int, device) -> torch.Tensor:
    """Sets with one or many layers and heads as one tensor ``[rows, layers or 1, kv_heads or 1, prefix]``."""
    if not flags:
        return torch.zeros(0, 1, 1, prefix, dtype=torch.bool, device=device)
    shape = torch.broadcast_shapes(*(one.shape for one in flags))
    return torch.stack([one.to(device).expand(shape) for one in flags])
