"""Asking a selector: it gets signals of its own, and its answer is checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from forward_influence.errors import UserError
from forward_influence.inputs import shown, whole_number
from forward_influence.selectors import Selector, selector_name
from infokv.signals import TokenSignals, parse_signal, signal

#: Integers of as many bytes as a number has.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def chosen_positions(selector: Selector, signals: TokenSignals, count: int, document: str) -> list[int]:
    """What a selector chooses, ascending.

    It sees copies of the signals that it needs, and no others: some signals are views of the cache, and what one
    selector does may not depend on who else is asked.

    Parameters
    ----------
    selector : Selector
    signals : TokenSignals
    count : int
    document : str
        Id of the document.

    Raises
    ------
    UserError
        If an answer is no whole number or outside the prefix, comes twice, or is more than was asked for or no
        candidate (explicit positions may be); if all of the prefix would go; or if the signals were changed.
    """
    own = _copied(signals, selector.needs)
    answer = selector.select(own, count, document)
    name = selector_name(selector)
    if not isinstance(answer, Iterable) or getattr(answer, "ndim", 1) != 1:
        raise UserError(f"{name} gave {shown(answer)}; select returns a flat collection of positions, such as [3, 4].")
    chosen: set[int] = set()
    for given in answer:
        place = whole_number(given)
        if place is None:
            raise UserError(f"{name} gave {shown(given)} among its positions; they must be whole numbers.")
        if not 0 <= place < signals.tokens:
            raise UserError(f"{name} gave position {place}, which is outside the prefix (0 to {signals.tokens - 1}).")
        if place in chosen:
            raise UserError(f"{name} gave position {place} twice; each counts once.")
        chosen.add(place)
    if not getattr(selector, "explicit", False):
        _check_request(name, chosen, count, signals.candidates)
    if len(chosen) == signals.tokens:
        raise UserError(f"{name} removes all {signals.tokens} positions of the prefix; one must stay.")
    changed = _changed(own, signals)
    if changed:
        raise UserError(f"{name} changed the signal {changed!r} in place; let it work on signals[{changed!r}].clone().")
    return sorted(chosen)


def _check_request(name: str, chosen: set[int], count: int, candidates: range) -> None:
    if len(chosen) > count:
        raise UserError(f"{name} gave {len(chosen)} positions where at most {count} were asked for.")
    for place in sorted(chosen):
        if place not in candidates:
            raise UserError(
                f"{name} gave position {place}, which is no candidate; choose among signals.candidates "
                f"({candidates.start} to {candidates.stop - 1})."
            )


def _copied(signals: TokenSignals, needs) -> TokenSignals:
    values = {}
    for need in needs:
        kind, parameters = parse_signal(need)
        name = signal(kind, **parameters)
        value = signals[name]
        values[name] = [one.clone() for one in value] if isinstance(value, list) else value.clone()
    return replace(signals, input_ids=signals.input_ids.clone(), values_by_name=values)


def _changed(own: TokenSignals, signals: TokenSignals) -> str | None:
    """The first signal whose copy is no longer the same, bit by bit (a NaN is the same as itself)."""
    if not _same(own.input_ids, signals.input_ids):
        return "input_ids"
    for name, value in own.values_by_name.items():
        given = signals.values_by_name[name]
        pairs = zip(value, given) if isinstance(given, list) else [(value, given)]
        if not all(_same(one, other) for one, other in pairs):
            return name
    return None


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = _BITS[one.element_size()]
    return torch.equal(one.view(bits), other.view(bits))
