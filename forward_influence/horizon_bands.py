"""Bands of offsets in which near and far influence are judged apart. No torch."""

from __future__ import annotations

#: Edges of the default bands, offsets; the last band goes on to the measured horizon.
BAND_EDGES = (0, 128, 1024, 4096)


#: A rest that is shorter than this share of the band before it is no band of its own: few offsets are noisy.
_LEAST_SHARE = 1 / 8


def default_bands(horizon: int) -> list[tuple[int, int]]:
    """The default bands, cut at a horizon: offsets from the first up to but without the second number."""
    stops = (*BAND_EDGES[1:], horizon)
    bands = [(start, min(stop, horizon)) for start, stop in zip(BAND_EDGES, stops) if start < horizon]
    if len(bands) > 1 and horizon - bands[-1][0] < _LEAST_SHARE * (bands[-2][1] - bands[-2][0]):
        bands[-2:] = [(bands[-2][0], horizon)]
    return bands


def named_bands(horizon: int) -> dict[str, tuple[int, int]]:
    """``all`` offsets, and the first band as ``near`` and the last as ``far`` where there are several."""
    parts = default_bands(horizon)
    return {"all": (0, horizon)} | ({"near": parts[0], "far": parts[-1]} if len(parts) > 1 else {})
