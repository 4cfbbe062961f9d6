"""Where the prompt of ``forward-influence generate`` comes from."""

from __future__ import annotations

import sys
from pathlib import Path

from forward_influence.errors import UserError


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt: as it was typed, from a file, or from standard input.

    Parameters
    ----------
    prompt : str or None
        ``-`` or None: standard input, unless there is a file.
    file : str or None
        Path of a UTF-8 text.

    Raises
    ------
    UserError
        If there is none, it is empty, or it is no UTF-8 text.
    """
    if prompt is not None and file is not None:
        raise UserError(f"A prompt and --file {file} were given; give one of both.")
    if file is not None:
        where = f"file {file!r}"
        text = _decoded(_content(file, where), where)
    elif prompt is not None and prompt != "-":
        where, text = "the prompt", prompt
    else:
        where = "standard input"
        if sys.stdin is None or (prompt is None and sys.stdin.isatty()):
            raise UserError("There is no prompt; give it as an argument, with --file PATH, or on standard input.")
        text = _decoded(sys.stdin.buffer.read(), where)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes of an argument that are no text
        raise UserError(f"{where} is no UTF-8 text ({error.reason}); give it in UTF-8.") from error
    if not text.strip():
        raise UserError(f"{where} is empty; a prompt needs at least one word.")
    return text


def _content(file: str, where: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{where} cannot be read ({reason}); give the path of a UTF-8 text.") from error


def _decoded(content: bytes, where: str) -> str:
    """Without a byte order mark, and without the line break that ends a text file."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is no UTF-8 text (byte {error.start}: {error.reason}); convert it first.") from error
    return text.removesuffix("\n").removesuffix("\r")
