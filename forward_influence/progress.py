"""Progress of long work on stderr: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time

#: Seconds between plain lines.
_EVERY = 30.0


class Messages:
    """A text stream for what is said on the way: where it cannot be written, the work goes on unseen.

    Parameters
    ----------
    stream : text file or None
        Its reader may have left, its disk may be full, it may be closed; None: there is none.
    """

    def __init__(self, stream):
        self._stream = stream

    def write(self, text: str) -> int:
        self._attempt("write", text)
        return len(text)

    def flush(self) -> None:
        self._attempt("flush")

    def isatty(self) -> bool:
        return bool(self._attempt("isatty"))

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "ascii"

    def _attempt(self, name: str, *arguments):
        try:
            return getattr(self._stream, name)(*arguments) if self._stream is not None else None
        except (OSError, ValueError):  # there is nobody to tell
            return None


class Progress:
    """Counts row-tokens and estimates the time that is left.

    Parameters
    ----------
    total : int
        Row-tokens of the whole work; 0 where there is nothing to count, only notices.
    quiet : bool
        Show nothing.
    stream : text file, optional
        By default stderr.
    """

    def __init__(self, total: int = 0, *, quiet: bool = False, stream=None):
        self._total, self._done = total, 0
        self._stream = Messages(stream or sys.stderr)
        self._quiet = quiet
        self._began = self._told = time.monotonic()
        self._label = ""
        self._bar = None
        if total and not quiet and self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total,
                unit="row-token",
                unit_scale=True,
                file=self._stream,
                dynamic_ncols=True,
                smoothing=0.05,
            )

    def label(self, text: str) -> None:
        """What is being worked on."""
        self._label = text
        if not self._done:
            self._began = time.monotonic()  # what came before, such as loading a model, says nothing about the rest
        if self._bar is not None:
            self._bar.set_description(text)

    def advance(self, row_tokens: int) -> None:
        """Row-tokens that were finished since the last call."""
        self._done += row_tokens
        if self._bar is not None:
            self._bar.update(row_tokens)
        elif not self._quiet and time.monotonic() - self._told >= _EVERY:
            self._told = time.monotonic()
            self._line()

    def reach(self, row_tokens: int) -> None:
        """Row-tokens that are finished altogether; corrects for those that needed no work or were run twice."""
        self.advance(row_tokens - self._done)

    def _line(self) -> None:
        spent = time.monotonic() - self._began
        share = min(1.0, self._done / max(1, self._total))
        left = spent * (1 - share) / share if share else float("inf")
        print(f"{self._label}: {share:.0%} done, {duration(left)} left", file=self._stream, flush=True)

    def say(self, sentence: str) -> None:
        """A notice that does not tear the bar."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.write(sentence, file=self._stream)
        else:
            print(sentence, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def duration(seconds: float) -> str:
    """Seconds as people say them: 40 s, 12 min, 3 h 20 min."""
    if seconds == float("inf"):
        return "unknown time"
    if seconds < 59.5:
        return f"{max(1, round(seconds))} s"
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
