"""Standard output and error that are closed, full, or read by somebody who has left."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TextIO


class OutputLost(Exception):
    """Standard output took no more text.

    Attributes
    ----------
    reader_left : bool
        Whether a reader such as ``head`` has had enough, which is no error.
    """

    def __init__(self, error: OSError):
        super().__init__(f"standard output cannot be written ({error.strerror or error}); send it to another place.")
        self.reader_left = isinstance(error, BrokenPipeError)


def guard_streams() -> None:
    """Make ``sys.stdout`` raise :class:`OutputLost` once and be silent then, and ``sys.stderr`` never fail.

    Notices must not end a measurement. A closed stream gets ``/dev/null``: a file of ours that is opened later
    could take its number, and with it what was meant for the stream.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = _Guarded(sys.stdout, fails=True)
    sys.stderr = _Guarded(sys.stderr, fails=False)


class _Guarded:
    """A text stream whose first error is the last one."""

    def __init__(self, stream: TextIO | None, *, fails: bool):
        self._stream = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, open to the end
        self._stream.reconfigure(errors="backslashreplace")  # a name may hold what the terminal cannot show
        self._fails = fails

    def write(self, text: str) -> int:
        if text == "":  # the parser tries out in this way what a stream takes, and keeps the error to itself
            return 0
        return self._attempt(self._stream.write, text) or 0

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, act: Callable, *arguments: Any) -> Any:
        try:
            return act(*arguments)
        except OSError as error:
            # What is left in the buffer goes nowhere, now and when the process ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if self._fails:
                raise OutputLost(error) from error
            return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
