"""Paths to a corpus: which files are taken, what is said about the rest."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from forward_influence.data.documents import RecordCorpus
from forward_influence.data.errors import DataError
from forward_influence.data.names import named_records
from forward_influence.data.records import SCANNERS, Record, scan_file

ENDINGS = tuple(SCANNERS)
_ALLOWED = f"{', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}"
_PROBLEMS_PER_FILE = 20


def load_local(paths: Sequence[str | os.PathLike], seed: int) -> RecordCorpus:
    """The documents of files and folders. Every path named has to give at least one.

    Raises
    ------
    DataError
        If a path is missing, of another kind, or without a usable document.
    """
    records: list[Record] = []
    problems: list[str] = []
    n_files = 0
    for path in paths:
        before, first_problem = len(records), len(problems)
        left_out: list[str] = []
        files = find_files(Path(path).expanduser(), left_out.append)
        n_files += len(files)
        for file in files:
            records.extend(_scan(file, problems))
        problems += left_out  # last: why nothing could be read is told by what was tried
        if len(records) == before:
            raise DataError(
                f"{str(path)!r} holds no usable document: {problems[first_problem].rstrip('.')}; "
                f"give a {_ALLOWED} file or folder with text in UTF-8."
            )
    named, dropped = named_records(records)
    notices = [f"Corpus 'local': {_count(len(named), 'document')} from {_count(n_files, 'file')}."]
    if dropped:
        notices.append(f"{_count(dropped, 'duplicate document')} dropped.")
    return RecordCorpus(
        name="local",
        identity="local",
        seed=seed,
        notices=tuple(notices),
        problems=tuple(problems),
        entries=[(name, record.read) for name, record in named.items()],
    )


def find_files(path: Path, report: Callable[[str], None]) -> list[Path]:
    """The file itself, or the usable files below a folder, sorted; hidden ones are not looked at.

    Links to files and folders are followed. A pipe or a device is not read: that could wait forever.

    Parameters
    ----------
    path : Path
    report : callable
        Takes a sentence about each file that is passed over.

    Raises
    ------
    DataError
        If there is none, or the file is of another kind.
    """
    if path.is_dir():
        files, others, unread = [], [], []
        for file in sorted(_walk(path)):
            if file.suffix.lower() not in ENDINGS:
                unread.append(file)
                continue
            (others if (kind := _odd_kind(file)) else files).append((file, kind))
        sentences = [f"{file} is {kind}, no regular file; it is left out." for file, kind in others]
        if not files:
            why = f" ({sentences[0].rstrip('.')})" if sentences else ""
            raise DataError(
                f"Folder {str(path)!r} holds no {_ALLOWED} file{why}; rename or convert its texts, or name another."
            )
        for sentence in sentences:
            report(sentence)
        if unread:
            report(f"{path}: {_count(len(unread), 'file')} left out, such as {unread[0].name}: no {_ALLOWED}.")
        return [file for file, _ in files]
    if path.suffix.lower() not in ENDINGS:
        raise DataError(f"File {str(path)!r} ends in {path.suffix!r}, not {_ALLOWED}; convert or rename it.")
    if kind := _odd_kind(path):
        raise DataError(f"{str(path)!r} is {kind}, which cannot be read twice; write it to a regular file first.")
    return [path]


def _odd_kind(path: Path) -> str | None:
    """What something is that is no regular file; None for one that is."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return f"a link that leads nowhere ({error.strerror})"
    kinds = {
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return None if stat.S_ISREG(mode) else kinds.get(stat.S_IFMT(mode), "something else")


def _walk(folder: Path) -> Iterator[Path]:
    def stop(error: OSError) -> None:
        raise DataError(
            f"Folder {error.filename!r} cannot be listed ({error.strerror}); change its permissions or name "
            "another folder."
        ) from error

    seen = set()
    for parent, folders, files in os.walk(folder, onerror=stop, followlinks=True):
        place = os.stat(parent)
        if (here := (place.st_dev, place.st_ino)) in seen:  # links can lead back to where they are
            folders.clear()
            continue
        seen.add(here)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            if not name.startswith("."):
                yield Path(parent, name)


def _scan(file: Path, problems: list[str]) -> Iterator[Record]:
    seen = 0

    def report(sentence: str) -> None:
        nonlocal seen
        seen += 1
        if seen <= _PROBLEMS_PER_FILE:  # a file of another format has one a line
            problems.append(sentence)

    yield from scan_file(file, report)
    if seen > _PROBLEMS_PER_FILE:
        problems.append(f"{file}: {seen - _PROBLEMS_PER_FILE} more problems of this kind are not listed.")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
