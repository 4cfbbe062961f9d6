"""Memory limits of Linux control groups: in a container or a batch job the machine's free memory is not ours.

A process that goes past its group's limit is killed, without an exception that could be caught. Files are those
of https://docs.kernel.org/admin-guide/cgroup-v2.html and https://docs.kernel.org/admin-guide/cgroup-v1/memory.html.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

#: Limit, usage, and the line of memory.stat that counts file pages which the kernel drops when it needs to.
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_in_groups(root: Path = Path("/")) -> int | None:
    """Bytes that this process can still use before a limit of its control groups is reached.

    Parameters
    ----------
    root : Path
        Folder that holds ``proc`` and ``sys``.

    Returns
    -------
    int or None
        The smallest rest of all groups that the process is in, at least 0; None where no group has a limit.
    """
    rests = [rest for folder, files in _groups(root) if (rest := _rest(folder, *files)) is not None]
    return max(0, min(rests)) if rests else None


def _groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Folders of the groups with a memory controller, from the process's own up to the outermost one."""
    top = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mounts, files = (top, top / "unified"), _V2
        elif "memory" in controllers.split(","):
            mounts, files = (top / "memory",), _V1
        else:
            continue
        for mount in mounts:
            # Inside a container the path may be the host's, which is not there; the mount is then the group itself.
            own = mount / path.lstrip("/")
            for folder in (own, *own.parents):
                yield folder, files
                if folder == mount:
                    break


def _rest(folder: Path, limit: str, usage: str, droppable: str) -> int | None:
    most, used = _read(folder / limit).strip(), _read(folder / usage)
    if not most or not used or most == "max":  # the outermost group of a machine has no limit and no such files
        return None
    facts = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
    return int(most) - int(used) + int(facts.get(droppable, 0))


def _read(file: Path) -> str:
    """The file's text; empty where the kernel offers no such file."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
