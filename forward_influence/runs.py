"""The run folder: rows on disk, written so that a kill at any moment loses nothing and repeats nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from forward_influence.contents import Contents, Inputs, survey
from forward_influence.errors import UserError
from forward_influence.paths import reachable_path
from forward_influence.row_check import check_row
from forward_influence.rows import SCHEMA_VERSION, RunSpec, dumps_row
from forward_influence.run_files import (
    ROWS,
    RUN_JSON,
    acquire_lock,
    corrupt_header,
    move_aside,
    next_header,
    read_header,
    repair,
    replace_header,
    scan,
)

#: Of a study that says nothing about what it goes by name.
_NO_INPUTS = Inputs()


class CannotWrite(UserError):
    """The disk takes no more; what was written before is kept."""


@dataclass(frozen=True)
class Run:
    """One run folder as it was read: `resumed` holds the provenance of each later invocation.

    `code` has the hash of the source of each selector that does not come with this package.
    """

    path: Path
    spec: RunSpec
    hash: str
    provenance: dict
    resumed: list[dict]
    rows: list[dict]
    code: dict[str, str]


class RunFolder:
    """A run folder open for writing; made by :meth:`open`, closed by ``with`` or :meth:`close`.

    Attributes
    ----------
    path : Path
    spec : RunSpec
    """

    def __init__(self, path: Path, spec: RunSpec, contents: Contents, lock):
        self.path, self.spec = path, spec
        self._hash, self._contents, self._lock = spec.hash(), contents, lock
        self._failed: set[str] = set()  # of this invocation; the next one tries them again
        self._file = open(path / ROWS, "ab", buffering=0)  # noqa: SIM115 (closed by close)
        self._size = os.fstat(self._file.fileno()).st_size

    @classmethod
    def open(
        cls, path: str | Path, spec: RunSpec, provenance: dict, inputs: Inputs = _NO_INPUTS, *, fresh: bool = False
    ) -> RunFolder:
        """Create or resume the run in a folder.

        Rows with status ``failed`` and repeated keys move to ``failed-<n>.jsonl``, so that the failed
        ones are tried again; a torn last line is cut off.

        Parameters
        ----------
        path : path
            Made if absent, with its parents.
        spec : RunSpec
            Must have the hash of the run that the folder holds, if it holds one.
        provenance : dict
            Stored in run.json: the first invocation's as ``provenance``, later ones' in ``resumed``.
        inputs : Inputs
            Documents and selectors of this invocation; must be those that the folder has rows of. The hashes of
            code are stored in run.json.
        fresh : bool
            Move an existing run to ``old-<n>`` inside the folder and start anew.

        Raises
        ------
        UserError
            If the folder cannot be written, is in use, holds another run or rows of other documents or selectors
            under the same names, or has a corrupt file.
        """
        path = reachable_path(path, "out")
        if path.exists() and not path.is_dir():
            raise UserError(f"Run folder {str(path)!r} is a file; give a folder as --out.")
        lock = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = acquire_lock(path)
            if fresh:
                move_aside(path)
            header = next_header(path, spec, provenance)
            contents = survey((row for row, _, _ in scan(path / ROWS, header["hash"])), path)
            inputs.check(contents, header["code"], path)
            repair(path / ROWS, header["hash"])
            header["code"] |= inputs.code
            replace_header(path, header)
            return cls(path, spec, contents, lock)
        except BaseException as error:
            if lock is not None:
                lock.close()
            if isinstance(error, OSError):
                raise UserError(
                    f"Run folder {str(path)!r} cannot be written ({error.strerror}); give another --out."
                ) from error
            raise

    def done(self) -> set[str]:
        """Keys of the finished rows (``ok`` and ``skipped``)."""
        return set(self._contents.done)

    def tried(self) -> set[str]:
        """Keys of the finished rows, and of those that have failed since the folder was opened."""
        return self._contents.done | self._failed

    def append(self, rows: Iterable[dict]) -> None:
        """Write rows, together and durably: after a kill either the file has them or they are redone.

        Raises
        ------
        ValueError
            If a row breaks the schema, holds NaN, or repeats a key.
        UserError
            If the disk refuses, or a document's text is not that of its earlier rows.
        """
        rows = list(rows)
        contents, failed = self._contents.copy(), set(self._failed)
        for row in rows:
            check_row(row, self._hash)
            if row["key"] in contents.done or row["key"] in failed:
                raise ValueError(f"document {row['document']!r} already has a row of selector {row['selector']!r}")
            if row["status"] == "failed":
                failed.add(row["key"])
            contents.add(row, self.path)
        self._write("".join(dumps_row(row) + "\n" for row in rows).encode(errors="backslashreplace"))
        self._contents, self._failed = contents, failed

    def note(self, facts: dict) -> None:
        """Add facts that were not known at the start to the provenance of this invocation."""
        header = read_header(self.path)
        (header["resumed"][-1] if header["resumed"] else header["provenance"]).update(facts)
        try:
            replace_header(self.path, header)
        except OSError as error:
            raise self._cannot_write(RUN_JSON, error) from error

    def rows(self) -> Iterator[dict]:
        """All rows on disk, in the order in which they were written.

        Raises
        ------
        UserError
            If the file is not the one that was written.
        """
        self._check_file()
        return (row for row, _, _ in scan(self.path / ROWS, self._hash))

    def close(self) -> None:
        self._file.close()
        self._lock.close()  # releases the lock

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _write(self, data: bytes) -> None:
        self._check_file()
        written = 0
        try:
            while written < len(data):  # one write, unless the disk takes only a part
                written += self._file.write(data[written:])
            os.fsync(self._file.fileno())
        except BaseException as error:
            with contextlib.suppress(OSError):  # where even that fails, the next invocation cuts the line off
                self._file.truncate(self._size)  # half a line would be glued to the next one
            if isinstance(error, OSError):
                raise self._cannot_write(ROWS, error) from error
            raise
        self._size += len(data)

    def _check_file(self) -> None:
        """Refuse to go on if rows would go where nobody finds them, or stand among somebody else's."""
        mine, file = os.fstat(self._file.fileno()), self.path / ROWS
        try:
            there = os.stat(file)
        except OSError:
            there = None
        if there is None or (there.st_dev, there.st_ino, there.st_size) != (mine.st_dev, mine.st_ino, self._size):
            raise UserError(
                f"{str(file)!r} was {'removed' if there is None else 'changed'} by somebody else while this study was "
                "writing it; leave the folder alone, and run the same command again."
            )

    def _cannot_write(self, name: str, error: OSError) -> CannotWrite:
        return CannotWrite(
            f"{str(self.path / name)!r} could not be written ({error.strerror}); make room and run the same command "
            "again."
        )


def read_run(path: str | Path) -> Run:
    """Read a run folder, also while it is being written: a torn last line is left out.

    Raises
    ------
    UserError
        If the folder is no run, or names the corrupt file and line.
    """
    path = reachable_path(path, "run")
    if path.name in (RUN_JSON, ROWS):
        path = path.parent
    if not (path / RUN_JSON).is_file():
        raise UserError(
            f"{str(path)!r} is no run folder ({RUN_JSON} is missing); "
            "give a folder that `forward-influence measure` wrote."
        )
    header = read_header(path)
    try:
        spec = RunSpec.from_dict(header["spec"])
    except TypeError as error:
        raise corrupt_header(path) from error
    if header.get("schema") == SCHEMA_VERSION and spec.hash() != header["hash"]:
        raise corrupt_header(path)  # edited by hand: its rows belong to another spec
    rows = [row for row, _, _ in scan(path / ROWS, header["hash"])]
    return Run(path, spec, header["hash"], header["provenance"], header["resumed"], rows, header["code"])


def find_runs(path: str | Path) -> list[Path]:
    """The run folders that a path stands for: itself, or those directly inside it (shards)."""
    path = reachable_path(path, "run")
    if (path / RUN_JSON).is_file() or not path.is_dir():
        return [path]
    inside = sorted(header.parent for header in path.glob(f"*/{RUN_JSON}"))
    return [folder for folder in inside if not folder.name.startswith("old-")] or [path]


def newest_run(root: str | Path = "runs") -> Path:
    """The run (or folder of shards) under `root` that was written last.

    Raises
    ------
    UserError
        If there is none.
    """
    times = {}
    for child in sorted(Path(root).glob("*")):
        folders = [folder for folder in find_runs(child) if (folder / RUN_JSON).is_file()]
        files = [folder / name for folder in folders for name in (RUN_JSON, ROWS)]
        if folders:
            times[child] = max(file.stat().st_mtime_ns for file in files if file.exists())
    if not times:
        raise UserError(f"There is no run under {str(root)!r}; run `forward-influence measure` first.")
    return max(times, key=times.get)
