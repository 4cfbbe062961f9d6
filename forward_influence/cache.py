"""The cache folder: things that are made once, appear whole or not at all, and outlive a kill."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from forward_influence.errors import UserError

#: From this size on, a file's hash is remembered: hashing runs at about 0.5 GB/s.
REMEMBER_HASH_FROM = 256 * 1024**2


def cache_root() -> Path:
    """``$FORWARD_INFLUENCE_CACHE``, else ``forward-influence`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Raises
    ------
    UserError
        If none of the variables is set and the user has no home folder.
    """
    own, base = os.environ.get("FORWARD_INFLUENCE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        if own:
            return Path(own).expanduser()
        return (Path(base) if base else Path.home() / ".cache") / "forward-influence"
    except RuntimeError as error:
        raise UserError(
            f"the cache folder {own or '~/.cache'!r} cannot be found, because HOME is not set and the system knows no "
            "home folder; name a folder by its whole path in FORWARD_INFLUENCE_CACHE."
        ) from error


def publish(target: Path, build: Callable[[Path], None]) -> Path:
    """The folder `target`, made by ``build(temporary_folder)`` if it is not there yet.

    The folder is built beside its place and renamed into it, under a lock that dies with its process.
    So a kill leaves at most a temporary folder, which the next call removes, and of two processes
    one builds while the other waits and takes the result.

    Raises
    ------
    UserError
        If the cache cannot be written.
    """
    if target.is_dir():
        return target
    from filelock import FileLock

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f".{target.name}.lock"):
            if target.is_dir():
                return target
            for stale in target.parent.glob(f".{target.name}.tmp-*"):
                shutil.rmtree(stale)
            temporary = target.parent / f".{target.name}.tmp-{os.getpid()}"
            temporary.mkdir()
            try:
                build(temporary)
                for file in temporary.iterdir():  # some libraries write 0600; a cache may be shared
                    file.chmod(0o644)
                os.replace(temporary, target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"cache folder {str(target.parent)!r} cannot be written ({error.strerror or error}); free "
            "some space or name another folder in FORWARD_INFLUENCE_CACHE."
        ) from error
    return target


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes; for big files remembered by path, size and time of change."""
    path = path.resolve()
    if path.stat().st_size < REMEMBER_HASH_FROM:
        return _sha256(path)
    stat = path.stat()
    facts = {
        "path": str(path),
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "ctime_ns": stat.st_ctime_ns,
        "inode": stat.st_ino,
    }
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    record = cache_root() / "hashes" / name

    def write(folder: Path) -> None:
        (folder / "sha256").write_text(_sha256(path), encoding="ascii")

    return (publish(record, write) / "sha256").read_text(encoding="ascii")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
