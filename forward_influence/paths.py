"""Paths as a user types them: ``~`` is the home folder, and what the system refuses to look at is a sentence."""

from __future__ import annotations

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
