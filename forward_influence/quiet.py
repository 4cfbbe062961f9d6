"""Silence of the libraries while they load: our own notices say what happens."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep transformers' warnings and progress bars off the terminal; the state comes back on exit."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def bars_on_terminals_only() -> Iterator[None]:
    """Drop what is written to stderr unless it is a terminal: a progress bar would fill a log file."""
    if sys.stderr.isatty():
        yield
        return
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def print_notice(message: str) -> None:
    """The default way to tell the user: one line on stderr."""
    print(message, file=sys.stderr, flush=True)
