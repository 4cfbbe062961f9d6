"""Where numbers come from: what is stored beside a run so that it can be repeated and doubted."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("forward-influence", "torch", "transformers", "tokenizers", "datasets", "gguf", "numpy")


def provenance(**facts) -> dict:
    """Command, time, versions, machine and commit, and the given facts."""
    import torch

    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": versions(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "commit": commit(),
        **facts,
    }


def versions() -> dict[str, str | None]:
    """Installed versions of the packages that numbers depend on."""
    out = {}
    for name in _PACKAGES:
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            out[name] = None
    return out


def commit() -> str | None:
    """Commit of the checkout that this code runs from, with ``+dirty`` where it was changed; else None."""
    folder = Path(__file__).resolve().parent
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=5,
            env=environment,
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != folder.parent:
            return None  # the package lies inside somebody else's repository
        dirty = "+dirty" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "HEAD") + dirty
    except (OSError, subprocess.SubprocessError):
        return None
