"""Whether a line of a run is a row: what each field may hold, and how the fields fit together."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forward_influence.rows import CHUNK_FIELDS, ROW_FIELDS, STATUSES, row_key


@dataclass(frozen=True)
class _Kind:
    """What a field, or each item of its list, may hold."""

    words: str
    types: frozenset[type]
    low: float = -math.inf
    high: float = math.inf

    def fits(self, values) -> bool:
        if not set(map(type, values)) <= self.types:  # a bool is an int, but not of type int
            return False
        return self.low == -math.inf or not values or (min(values) >= self.low and max(values) <= self.high)


_NOTHING = type(None)
_TEXT = _Kind("a text", frozenset({str}))
_COUNT = _Kind("a whole number of at least 0", frozenset({int}), 0)
_SHARE = _Kind("a number from 0 to 1", frozenset({int, float}), 0, 1)
_NATS = _Kind('a number of at least 0 or "inf"', frozenset({int, float}), 0)

_FIELDS = {name: _TEXT for name in ("key", "document", "selector", "mode", "status")}
_FIELDS |= {
    "document_sha": _TEXT,
    "n_tokens": _COUNT,
    "seconds": _Kind("a number of at least 0", frozenset({int, float}), 0),
}
#: None in a row without numbers.
_OPTIONAL = {"reason": _TEXT, "n_removed": _COUNT, "removed_fraction": _SHARE, "kept_fraction": _SHARE}
#: Lists; None where there is nothing to list.
_LISTS = {
    "removed": _COUNT,
    "kept_counts": _COUNT,
    "chunk_start": _COUNT,
    "chunk_count": _Kind("a whole number of at least 1", frozenset({int}), 1),
    "kl_mean": _NATS,
    "kl": _NATS,
    "delta_nll": _Kind("a number, an infinity or null", frozenset({int, float, _NOTHING})),
    "nll_count": _COUNT,
    "top1_changed": _SHARE,
}


def check_row(row: dict, spec_hash: str) -> None:
    """Check that a row has exactly the fields of the schema, that they fit together, and the run's key.

    Raises
    ------
    ValueError
        Names the first fault.
    """
    if set(row) != set(ROW_FIELDS):
        missing, extra = sorted(set(ROW_FIELDS) - set(row)), sorted(set(row) - set(ROW_FIELDS))
        raise ValueError(f"a row's fields are ROW_FIELDS; missing: {missing}, unknown: {extra}")
    _check_kinds(row)
    if row["status"] not in STATUSES:
        raise ValueError(f"status {row['status']!r} is none of {', '.join(STATUSES)}")
    if row["key"] != row_key(spec_hash, row["document"], row["selector"]):
        raise ValueError(
            f"the key of document {row['document']!r}, selector {row['selector']!r} belongs to another run"
        )
    if row["status"] == "ok":
        _check_numbers(row)


def _check_kinds(row: dict) -> None:
    for name, kind in (_FIELDS | _OPTIONAL).items():
        value = row[name]
        if not (kind.fits([value]) or (value is None and name in _OPTIONAL)):
            raise ValueError(f"{name} is {_short(value)}, not {kind.words}")
    for name, kind in _LISTS.items():
        values = row[name]
        if values is None:
            continue
        if not isinstance(values, list | tuple):
            raise ValueError(f"{name} is {_short(values)}, not one of the lists")
        if not kind.fits(values):
            value = next(value for value in values if not kind.fits([value]))
            raise ValueError(f"{name} holds {_short(value)}, which is not {kind.words}")


def _check_numbers(row: dict) -> None:
    """Check that the numbers of a measured row are there and fit together."""
    other = {"remove": "kept_counts", "keep": "removed"}.get(row["mode"])
    if other is None:
        raise ValueError(f"mode {row['mode']!r} is neither remove nor keep")
    for name in (*_LISTS, "n_removed", "removed_fraction", "kept_fraction"):
        if row[name] is None and name != other:
            raise ValueError(f"{name} is null; lists and numbers of an ok row are not")
    if not row["chunk_start"] or len({len(row[name]) for name in CHUNK_FIELDS}) != 1:
        raise ValueError(f"{', '.join(CHUNK_FIELDS)} are not lists of one length above 0")
    if len(row["kl"]) != sum(row["chunk_count"]):
        raise ValueError(f"kl has {len(row['kl'])} values for {sum(row['chunk_count'])} offsets")
    if row["removed"] is not None and len(row["removed"]) != row["n_removed"]:
        raise ValueError(f"removed has {len(row['removed'])} positions, and n_removed is {row['n_removed']}")
    if any((value is None) != (count == 0) for value, count in zip(row["delta_nll"], row["nll_count"])):
        raise ValueError("delta_nll is null in other chunks than those whose nll_count is 0")


def _short(value) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:40]}..."
