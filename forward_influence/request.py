"""What a request must look like, checked before anything heavy is imported, read or made."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from forward_influence.builtin_selectors import NoRemoval, Positions, Recompute
from forward_influence.errors import UserError
from forward_influence.selectors import Selector

#: Least value and meaning of each number that a study takes.
_NUMBERS = {
    "prefix": (1, "tokens that are cached before anything is removed"),
    "horizon": (1, "tokens that follow the prefix"),
    "chunk": (1, "offsets over which a reported number is averaged"),
    "sinks": (0, "first positions that are not candidates"),
    "recent": (0, "last positions of the prefix that are not candidates"),
    "limit": (1, "documents"),
    "skip": (0, "documents that are left out at the start of the order"),
    "seed": (0, "it fixes the order of documents and random selections"),
    "trials": (2, "settings to try, the default included"),
    "train": (1, "documents for the search"),
    "held_out": (1, "documents for the judgement"),
    "greedy": (0, "tokens to choose one by one"),
    "batch": (1, "ablated rows at once"),
}


def check_numbers(**given) -> None:
    """Refuse numbers that make no study; ``limit`` and ``batch`` may be None."""
    for name, value in given.items():
        least, meaning = _NUMBERS[name]
        if value is None and name in ("limit", "batch"):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"{name} is {value}; it must be a whole number of at least {least} ({meaning}).")


def parse_shard(shard: str | None) -> tuple[int, int] | None:
    """``"3/16"`` as (3, 16): the third of sixteen; None for none."""
    if shard is None:
        return None
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", str(shard).strip())
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"shard {shard!r} is not of the form 3/16; with 16 shards it goes from 1/16 to 16/16.")
    return int(match[1]), int(match[2])


def check_candidates(count: int, prefix: int, sinks: int, recent: int, selectors: Iterable[Selector]) -> None:
    """Refuse a study that is to remove more positions than may be chosen."""
    if all(isinstance(one, Positions | NoRemoval | Recompute) for one in selectors):
        return  # these choose nothing
    candidates = max(0, prefix - sinks - recent)
    if count > min(candidates, prefix - 1):
        raise UserError(
            f"{count} of {prefix} prefix positions are to be removed, but {candidates} are candidates after "
            f"{sinks} sinks and {recent} recent ones, and one must stay; use a larger prefix, a smaller fraction, "
            "or fewer sinks and recent ones."
        )


def check_positions(selectors: dict[str, Selector], prefix: int) -> None:
    """Refuse explicit positions outside the prefix."""
    for name, selector in selectors.items():
        for place in selector.listed() if isinstance(selector, Positions) else ():
            if not 0 <= place < prefix:
                raise UserError(
                    f"{name} has position {place}, which is outside the prefix; positions go from 0 to {prefix - 1}."
                )


def check_listed(selectors: dict[str, Selector], documents: list) -> None:
    """Refuse a file of positions that is about other documents altogether."""
    for name, selector in selectors.items():
        listed = selector.by_document if isinstance(selector, Positions) else None
        if listed is not None and not any(document.id in listed for document in documents):
            raise UserError(
                f"{name} lists none of the {len(documents)} documents; their ids look like {documents[0].id!r}, those "
                f"in the file like {next(iter(listed), '')!r}."
            )


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be made or written, before anything is computed."""
    if "\0" in str(folder):
        raise UserError(f"out is {str(folder)!r}, which holds a character that no path has; give another --out.")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"out is {str(folder)!r}, which is a file; give a folder.")
    place = folder
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise UserError(f"{str(folder)!r} cannot be made, because {str(place)!r} is a file; give another --out.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"{str(folder)!r} cannot be written ({str(place)!r} is not writable); give another --out.")
