"""The files beside the rows of a per-token run: scores of signals, and rankings by influence. No torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

from forward_influence.errors import UserError
from forward_influence.horizon_bands import named_bands
from forward_influence.paths import write_whole
from forward_influence.token_sets import RANDOM

SCORES, SETS = "scores.jsonl", "sets.jsonl"

#: Instead of infinity in a ranking: JSON has none.
LARGEST = 1e300


def ranking_file(band: str) -> str:
    """Name of the file with the influences in a band: ``influence-far.json``."""
    return f"influence-{band}.json"


def read_scores(folder: Path, spec_hash: str) -> list[dict]:
    """Lines of ``scores.jsonl``: document, signal, and scores ``[prefix]``; a torn last line is left out.

    Raises
    ------
    UserError
        If a line is broken or belongs to another run.
    """
    return _read_lines(folder / SCORES, spec_hash, "signal", "scores", (int, float, type(None)))


def read_sets(folder: Path, spec_hash: str) -> list[dict]:
    """Lines of ``sets.jsonl``: which positions were removed together, and who chose them.

    ``document`` is empty for sets that were dealt at random, which are the same in all texts. ``among`` is the number
    of measured positions from which a set was chosen (None: at random). Of several sets of one size that one signal
    ranked highest in a text the last counts: the others were its choice among fewer positions, or by other code.

    Raises
    ------
    UserError
        If a line is broken or belongs to another run.
    """
    newest = {}
    for line in _read_lines(folder / SETS, spec_hash, "chosen_by", "positions", (int,)):
        places = tuple(line["positions"])
        about = places if line["chosen_by"] == RANDOM else len(places)
        newest[line["document"], line["document_sha"], line["chosen_by"], about] = line
    return list(newest.values())


def append_sets(plan, chosen: Iterable[tuple]) -> None:
    """Note sets that are not yet noted: document (None where it is any), who chose, among how many, and positions."""
    known = read_sets(plan.out, plan.spec.hash())
    lines = [
        {
            "hash": plan.spec.hash(), "document": "" if one is None else one.id,
            "document_sha": "" if one is None else one.sha, "chosen_by": who, "among": among, "positions": list(places),
        }
        for one, who, among, places in chosen
    ]  # fmt: skip
    _append_lines(plan.out / SETS, [line for line in lines if line not in known])


def _read_lines(path: Path, spec_hash: str, name: str, values: str, kinds: tuple[type, ...]) -> list[dict]:
    if not path.exists():
        return []
    out = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except ValueError as error:
        raise UserError(f"{str(path)!r} is no text ({error}); delete the file.") from error
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline was torn
        try:
            entry = json.loads(line)
            fits = entry["hash"] == spec_hash and isinstance(entry[values], list)
            fits = fits and all(type(entry[key]) is str for key in ("document", "document_sha", name))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{str(path)!r} is corrupt in line {number} ({error}); delete the file.") from error
        if not fits:
            raise UserError(f"{str(path)!r}, line {number}, belongs to another run; delete the file.")
        if odd := [one for one in entry[values] if type(one) not in kinds]:
            raise UserError(f"{str(path)!r} has {odd[0]!r} among the {values} of line {number}; delete the file.")
        out.append(entry)
    return out


def scored(plan, codes: dict[str, str]) -> set[tuple[str, str]]:
    """Documents and signals whose scores are there, for the texts of a plan and this code of other people's signals.

    Raises
    ------
    UserError
        If a line has not one score for each position.
    """
    texts = {document.id: document.sha for document in plan.documents}
    entries = read_scores(plan.out, plan.spec.hash())
    for one in entries:
        if len(one["scores"]) != plan.spec.prefix:
            raise UserError(
                f"{str(plan.out / SCORES)!r} has {len(one['scores'])} scores of {one['signal']!r} for "
                f"{plan.spec.prefix} positions; delete the file."
            )
    newest = {(one["document"], one["signal"]): one for one in entries}  # the last line counts, for all readers
    return {
        key
        for key, one in newest.items()
        if texts.get(one["document"]) == one["document_sha"] and codes.get(one["signal"]) == one.get("code")
    }


def append_scores(plan, document, scores: dict[str, list[float]], codes: dict[str, str]) -> None:
    """Write the scores of a document, together and durably; values that are no numbers become null."""
    lines = [
        {
            "hash": plan.spec.hash(), "document": document.id, "document_sha": document.sha, "signal": name,
            "code": codes.get(name),
            "scores": [float(f"{value:.7g}") if math.isfinite(value) else None for value in values],
        }
        for name, values in scores.items()
    ]  # fmt: skip
    _append_lines(plan.out / SCORES, lines)


def _append_lines(path: Path, lines: list[dict]) -> None:
    try:
        sound = _sound_length(path)
        with open(path, "ab") as file:
            file.truncate(sound)
            file.write("".join(f"{json.dumps(line)}\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be written ({error.strerror}); make room and run again.") from error


def _sound_length(path: Path) -> int:
    """Bytes up to the end of the last whole line."""
    return path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0


def rankings_of(plan, rows: list[dict]) -> dict[str, dict[str, dict[int, float]]]:
    """What every single removed position cost, mean nats by band, document and position.

    A document that ends before a band does is not in it.
    """
    documents = {document.id for document in plan.documents}
    found: dict[str, dict[str, dict[int, float]]] = {}
    for name, (start, stop) in named_bands(plan.spec.horizon).items():
        found[name] = {}
        for row in rows:
            whole = row["status"] == "ok" and len(row["kl"]) >= stop
            if whole and row["n_removed"] == 1 and row["document"] in documents:
                mean = sum(row["kl"][start:stop]) / (stop - start)
                found[name].setdefault(row["document"], {})[row["removed"][0]] = mean
    return found


def in_order(first: list[int], alone: dict[int, float]) -> dict[int, float]:
    """Influences of positions, lifted for some so that they come first and in this order."""
    top = max((value for value in alone.values() if math.isfinite(value)), default=0.0)
    others = {place: min(value, top) for place, value in alone.items()}
    return others | {place: top + len(first) - number for number, place in enumerate(first)}


def write_rankings(plan, rankings: dict[str, dict[str, dict[int, float]]], model: dict) -> None:
    """``influence-<name>.json`` for each ranking: positions and what they cost, with the texts in which it was so.

    Parameters
    ----------
    plan : Plan
    rankings : dict
        As :func:`rankings_of` gives them.
    model : dict
        Identity of the model.
    """
    bands = named_bands(plan.spec.horizon)
    for name, of_document in rankings.items():
        content = {
            "band": list(bands.get(name, bands["all"])), "run": plan.spec.hash(), "sinks": plan.spec.sinks,
            "recent": plan.spec.recent, "model": model,
            "documents": [
                {
                    "document": document.id, "tokens": list(document.ids[: plan.spec.prefix]),
                    "positions": sorted(found),
                    "kl": [min(found[place], LARGEST) for place in sorted(found)],
                }
                for document in plan.documents
                if (found := of_document.get(document.id))
            ],
        }  # fmt: skip
        write_whole(plan.out / ranking_file(name), json.dumps(content, allow_nan=False) + "\n")
