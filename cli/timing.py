"""When the tokens of a text came, and what its cache was like."""

from __future__ import annotations

from time import perf_counter


class Timed:
    """A streamer that hands everything on, and notes when the tokens came."""

    def __init__(self, streamer):
        self._streamer = streamer
        self._times: list[float] = []

    def put(self, value) -> None:
        """First the prompt, before it is run; then one token at a time."""
        self._times.append(perf_counter())
        self._streamer.put(value)

    def end(self) -> None:
        """The last words, and a line break."""
        self._streamer.end()

    @property
    def generated(self) -> int:
        """Tokens that have come."""
        return max(0, len(self._times) - 1)

    @property
    def prefill_seconds(self) -> float:
        """Until the first token."""
        return self._times[1] - self._times[0]

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return self._times[-1] - self._times[1]


def statistics(handle, timed: Timed, prompt: int) -> list[str]:
    """What was kept, what it saved and how fast it was, in a few lines."""
    least, most = min(handle.stored), max(handle.stored)
    kept = f"{least} in each layer" if least == most else f"{least}-{most} by layer"
    share = handle.stored_bytes / handle.full_bytes
    decode = "no decode"
    if timed.generated > 1:
        decode = f"decode {(timed.generated - 1) / timed.decode_seconds:.1f} tokens/s"
    whole = timed.prefill_seconds + timed.decode_seconds
    return [
        f"tokens   prompt {prompt}, generated {timed.generated}; the cache saw {max(handle.seen)} and kept {kept}",
        f"cache    {_size(handle.stored_bytes)} of {_size(handle.full_bytes)} in full ({share:.0%}); "
        f"peak {_size(handle.peak_bytes)} with signals",
        f"speed    prefill {prompt / timed.prefill_seconds:.0f} tokens/s ({timed.prefill_seconds:.2f} s), {decode}",
        f"scoring  {handle.scoring_seconds:.2f} s of {whole:.2f} s",
    ]


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
