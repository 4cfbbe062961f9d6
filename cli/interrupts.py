"""Ctrl-C pressed twice: the second press may not cut the end of the first one short."""

from __future__ import annotations

import signal
import time

#: Seconds after an interrupt in which another one is the same.
_SAME = 1.0


def interrupt_once() -> None:
    """Let a burst of interrupts count as one; does nothing where interrupts are ignored (nohup, say)."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    last = -_SAME

    def interrupt(number, frame) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SAME:
            last = now
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)


def ignore_interrupts() -> None:
    """For the rest of a process that has nothing left to do but to give its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
