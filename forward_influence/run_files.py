"""The files of a run folder: how each is read, written, repaired, locked and moved aside."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from forward_influence.errors import UserError
from forward_influence.row_check import check_row
from forward_influence.rows import SCHEMA_VERSION, RunSpec, loads_row

try:
    import fcntl
except ImportError:  # Windows has no flock
    fcntl = None

RUN_JSON, ROWS, LOCK = "run.json", "rows.jsonl", ".lock"

#: What a tuning writes beside its two run folders.
TUNED = "tuned.json"

#: What `fresh` moves aside: the rows and everything made from them. run.json goes last, so that a
#: kill in between leaves a folder that the same command cleans up.
_MADE_FROM_ROWS = (ROWS, "failed-*.jsonl", "*.csv", "*.parquet", "*.png", "*.pdf", "*.svg", "scores.jsonl",
                   "influence-*.json", RUN_JSON)  # fmt: skip


def scan(path: Path, spec_hash: str) -> Iterator[tuple[dict, bytes, int]]:
    """Each row with its line and the file position behind it; a torn last line ends the scan."""
    if not path.exists():
        return
    try:
        opened = open(path, "rb")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be read ({error.strerror}); check the folder.") from error
    with opened as handle:
        size, position = os.fstat(handle.fileno()).st_size, 0
        for number, line in enumerate(handle, start=1):
            if not line.endswith(b"\n"):
                return
            position += len(line)
            try:
                row = loads_row(line.decode())
            except (ValueError, RecursionError) as error:
                if position >= size:  # after a power cut a torn line may be filled up with anything
                    return
                raise UserError(
                    f"{str(path)!r} is corrupt in line {number} ({error}); delete this line, "
                    "and the same `forward-influence measure` command will do its document again."
                ) from error
            try:
                check_row(row, spec_hash)
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{str(path)!r}, line {number}, is no row of this run ({error}); "
                    "delete this line, or start over with --fresh."
                ) from error
            yield row, line, position


def repair(path: Path, spec_hash: str) -> None:
    """Cut a torn last line off, and move failed and repeated rows aside."""
    done, aside, end = set(), 0, 0
    for row, _, end in scan(path, spec_hash):  # noqa: B007 (the last end is the length that is sound)
        if row["status"] == "failed" or row["key"] in done:
            aside += 1
            continue
        done.add(row["key"])
    if path.exists() and path.stat().st_size > end:
        os.truncate(path, end)
    if aside:
        _split_rows(path, spec_hash)


def _split_rows(path: Path, spec_hash: str) -> None:
    """Leave the first finished row of each key in the file; the others go to failed-<n>.jsonl."""
    kept, rest = path.with_name(f"{ROWS}.tmp"), path.with_name("failed.tmp")
    with open(kept, "wb") as keep, open(rest, "wb") as drop:
        seen = set()
        for row, line, _ in scan(path, spec_hash):
            repeated = row["status"] == "failed" or row["key"] in seen
            (drop if repeated else keep).write(line)
            seen |= set() if repeated else {row["key"]}
        for handle in (keep, drop):
            handle.flush()
            os.fsync(handle.fileno())
    rest.rename(_unused(path.parent, "failed-{}.jsonl"))
    os.replace(kept, path)


def spec_differences(old: dict, new: dict) -> str:
    """The fields in which two specs differ, with both values; both as dicts."""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    named = (f"{name} {old.get(name)!r} there, {new.get(name)!r} here" for name in names)
    return "; ".join(named) or "written by another version of the row format"


def next_header(path: Path, spec: RunSpec, provenance: dict) -> dict:
    """What run.json will hold: that of the run in the folder, if it holds one, with one more invocation.

    Raises
    ------
    UserError
        If it holds another run.
    """
    if (path / RUN_JSON).exists():
        header = read_header(path)
        if header["hash"] != spec.hash():
            raise UserError(
                f"Run folder {str(path)!r} holds another run ("
                f"{spec_differences(header['spec'], spec.to_dict())}); give another --out, "
                "or --fresh to move the old rows aside."
            )
        header["resumed"].append(provenance)
    elif (path / ROWS).exists():
        raise UserError(
            f"Run folder {str(path)!r} has {ROWS} but no {RUN_JSON}; give another --out, "
            "or --fresh to move the rows aside."
        )
    else:
        header = {"schema": SCHEMA_VERSION, "spec": spec.to_dict(), "hash": spec.hash(), "code": {}}
        header |= {"provenance": provenance, "resumed": []}
    return header


def replace_header(path: Path, header: dict) -> None:
    """Write run.json; a kill leaves the old one or the new one."""
    file = path / RUN_JSON
    text = json.dumps(header, indent=2, ensure_ascii=False, allow_nan=False, default=str)
    temporary = file.with_name(f"{RUN_JSON}.tmp")
    # A path that is not UTF-8 holds lone surrogates; written with backslashes they are JSON.
    with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as handle:
        handle.write(text + "\n")
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, file)


def read_header(path: Path) -> dict:
    try:
        header = json.loads((path / RUN_JSON).read_text(encoding="utf-8"))
        header.setdefault("code", {})
        kinds = {"spec": dict, "hash": str, "code": dict, "provenance": dict, "resumed": list}
        sound = all(isinstance(header[name], kind) for name, kind in kinds.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise corrupt_header(path) from error
    except OSError as error:
        raise UserError(f"{str(path / RUN_JSON)!r} cannot be read ({error.strerror}); check the folder.") from error
    if not sound or not all(isinstance(one, dict) for one in header["resumed"]):
        raise corrupt_header(path)
    return header


def corrupt_header(path: Path) -> UserError:
    return UserError(f"{str(path / RUN_JSON)!r} is corrupt; restore it, or start over with --fresh.")


def acquire_lock(path: Path):
    """An open file that holds the folder's lock until it is closed or the process ends, however it ends."""
    handle = open(path / LOCK, "a")  # noqa: SIM115 (the caller keeps it)
    try:
        if fcntl is None:
            raise OSError("this system has no flock")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise UserError(
            f"Run folder {str(path)!r} is in use by another process; wait for it, or give another --out."
        ) from None
    except OSError as error:  # some network file systems have no locks either
        message = f"Run folder {str(path)!r} has no lock ({error}): write it from one process only."
        warnings.warn(message, stacklevel=3)
    return handle


def move_aside(path: Path) -> None:
    found = [file for pattern in _MADE_FROM_ROWS for file in sorted(path.glob(pattern))]
    if any((path / name).exists() for name in (RUN_JSON, ROWS)):
        target = _unused(path, "old-{}")
        target.mkdir()
        for file in found:
            file.rename(target / file.name)


def _unused(folder: Path, pattern: str) -> Path:
    number = 1
    while (folder / pattern.format(number)).exists():
        number += 1
    return folder / pattern.format(number)
