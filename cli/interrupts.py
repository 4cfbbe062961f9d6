"""Ctrl-C: a second press may not cut the end of the first one short, and none may get lost."""

from __future__ import annotations

import signal
import sys
import threading
import time

#: Seconds after an interrupt in which another one is the same.
_SAME = 1.0

#: Seconds after which one that was lost comes again.
_SOON = 0.05


def interrupt_once() -> None:
    """Let a burst of interrupts count as one, and none be lost; does nothing where they are ignored (nohup, say)."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    last = -_SAME

    def interrupt(number, frame) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SAME:
            last = now
            raise KeyboardInterrupt

    def raise_again(lost) -> None:
        """An exception that is raised while an object is deleted, as anywhere in an import, reaches nobody."""
        nonlocal last
        if issubclass(lost.exc_type, KeyboardInterrupt):
            last = -_SAME
            again = (threading.main_thread().ident, signal.SIGINT)
            threading.Timer(_SOON, signal.pthread_kill, again).start()  # here it would be lost again
        else:
            sys.__unraisablehook__(lost)

    signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = raise_again


def ignore_interrupts() -> None:
    """For the rest of a process that has nothing left to do but to give its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
