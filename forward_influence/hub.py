"""The model hub: is it there, and which local folder holds a repository."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

from forward_influence.data.errors import DataError
from forward_influence.data.hub import hub_answers, offline_by_environment
from forward_influence.errors import UserError
from forward_influence.quiet import print_notice

#: Seconds that the reachability check may take, name resolution included.
REACH_TIMEOUT = 3.0

_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]
_SUBFOLDERS = ["*/*"]  # other formats and training leftovers


def offline_requested(offline: bool = False) -> bool:
    """Whether no network attempt may be made: by argument, or by a variable such as ``HF_HUB_OFFLINE``."""
    return offline or offline_by_environment()


def hub_reachable(timeout: float = REACH_TIMEOUT) -> bool:
    """Whether the hub answers within `timeout` seconds.

    Asked before any hub library is called, because those retry for half a minute. The answer holds for the
    process. False without an attempt when the environment asks for offline work.

    Raises
    ------
    UserError
        If ``HF_ENDPOINT`` or a proxy variable holds something that is no address.
    """
    try:
        return not offline_requested() and _answers(_endpoint(), timeout)
    except DataError as error:
        raise UserError(str(error)) from error


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


@cache
def _answers(endpoint: str, timeout: float) -> bool:
    return hub_answers(timeout)


def is_repo_id(text: str) -> bool:
    """Whether `text` has the form ``org/name`` of a repository on the hub."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text) is not None


def repo_of_snapshot(folder: Path) -> tuple[str, str] | None:
    """``(repository id, commit)`` of a folder inside a hub cache, or None for any other folder."""
    parts = folder.resolve().parts
    if len(parts) < 3 or parts[-2] != "snapshots" or not parts[-3].startswith("models--"):
        return None
    if not re.fullmatch(r"[0-9a-f]{40}", parts[-1]):
        return None
    return parts[-3].removeprefix("models--").replace("--", "/"), parts[-1]


def cached_snapshot(repo_id: str) -> Path | None:
    """The newest snapshot of a repository in the local hub cache; looks at the disk only."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo_id, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return folder if (folder / "config.json").is_file() or (folder / "tokenizer.json").is_file() else None


def snapshot(repo_id: str, *, offline: bool, notify=print_notice) -> Path:
    """Folder with the configuration and tokenizer files of a repository; weights come later.

    Raises
    ------
    UserError
        If the hub is out of reach or not to be asked, and the local cache does not have it; or if the
        hub refuses.
    """
    quiet = offline_requested(offline)
    if not quiet and hub_reachable():
        return _download(repo_id, allow_patterns=_SMALL_FILES)
    if folder := cached_snapshot(repo_id):
        if not quiet:
            notify(f"The hub cannot be reached: {repo_id} is taken from the local cache ({folder.name[:12]}).")
        return folder
    why = "is not in the local hub cache, and offline work was asked for"
    if not quiet:
        why = f"is not in the local hub cache, and {_endpoint()} cannot be reached within {REACH_TIMEOUT:g} s"
    raise UserError(f"{repo_id!r} {why}; give a local folder or GGUF file, or try again with a network.")


def fetch_weights(repo_id: str, folder: Path, *, offline: bool) -> Path:
    """`folder` (from :func:`snapshot`) with the weights of the same commit: safetensors, else ``.bin``.

    Raises
    ------
    UserError
        If they are not in the local cache and cannot be fetched.
    """
    fetch = not offline_requested(offline) and hub_reachable()
    for pattern in ("*.safetensors", "*.bin"):
        if fetch:
            _download(repo_id, revision=folder.name, allow_patterns=[pattern, f"{pattern}.index.json"])
        if any(folder.glob(pattern)):
            return folder
    where = "on the hub" if fetch else "in the local hub cache"
    raise UserError(
        f"{repo_id!r} has no *.safetensors or *.bin weights {where}; "
        "try again with a network, or give a local folder or GGUF file."
    )


def _download(repo_id: str, **selection) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, ignore_patterns=_SUBFOLDERS, **selection))
    except Exception as error:  # any failure of the hub client is one sentence to the user
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"{repo_id!r} could not be fetched from {_endpoint()} ({reason[0].rstrip('.')}); check the name "
            "and your access to it, or give a local folder or GGUF file."
        ) from error
