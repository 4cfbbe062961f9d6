"""Records to unique, stable ids: own ids where there are any, else the file's name and the text's hash."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence

from forward_influence.data.records import Record


def named_records(records: Sequence[Record]) -> tuple[dict[str, Record], int]:
    """Ids of the records that are kept, and how many were dropped as duplicates.

    Records are duplicates if their texts are equal and their own ids do not differ. A name that
    different documents claim gets longer for each of them, so no name depends on the order of the files.
    """
    kept = _without_duplicates(records)
    level = [0] * len(kept)
    while True:
        claims = defaultdict(list)
        for index, record in enumerate(kept):
            claims[_candidates(record)[level[index]]].append(index)
        contested = [index for indices in claims.values() if len(indices) > 1 for index in indices]
        if not contested:
            break
        for index in contested:
            level[index] = min(level[index] + 1, len(_candidates(kept[index])) - 1)
    return {name: kept[index] for name, (index,) in claims.items()}, len(records) - len(kept)


def _without_duplicates(records: Sequence[Record]) -> list[Record]:
    by_text: dict[str, dict[str | None, Record]] = defaultdict(dict)
    for record in records:
        same = by_text[record.sha]
        known = same.get(record.own_id)
        if known is None or record.stem < known.stem:
            same[record.own_id] = record
    for same in by_text.values():
        if len(same) > 1:
            same.pop(None, None)
    return [record for same in by_text.values() for record in same.values()]


def _candidates(record: Record) -> list[str]:
    """Names from the shortest to one that no other kept record can have."""
    if record.own_id is None:
        return [f"{record.stem}-{record.sha[:digits]}" for digits in (8, 16, 64)]
    name = f"{record.stem}-{record.own_id}"
    unique = hashlib.sha256(json.dumps([record.own_id, record.sha]).encode()).hexdigest()
    return [record.own_id, name, f"{name}-{record.sha[:8]}", f"{name}-{unique}"]
