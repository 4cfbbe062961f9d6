"""Paths as a user types them: ``~`` is the home folder, and what the system refuses to look at is a sentence."""

from __future__ import annotations

import os
from pathlib import Path

from forward_influence.errors import UserError


def reachable_path(given: str | Path, what: str) -> Path:
    """`given` with ``~`` replaced; it need not exist.

    Parameters
    ----------
    given : str or Path
    what : str
        What it is, for the sentence: "model".

    Raises
    ------
    UserError
        If the system cannot say whether it exists: a name too long, a folder without permission, no such home.
    """
    text = str(given)
    shown = repr(text if len(text) <= 80 else f"{text[:77]}...")
    try:
        path = Path(given).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: characters that no path has
        pass
    except OSError as error:
        raise UserError(f"{what} {shown} cannot be looked at ({error.strerror}); give another path.") from error
    except RuntimeError as error:
        raise UserError(f"{what} {shown} is below a home folder that is not known; give the whole path.") from error
    return path


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one, never a part.

    Raises
    ------
    UserError
        If it cannot be written.
    """
    draft = path.with_name(f"{path.name}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be written ({error.strerror}); make room and run again.") from error
