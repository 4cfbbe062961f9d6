"""What a compressed run has kept and what it cost."""

from __future__ import annotations

import torch

from infokv.compressed import CompressedStore
from infokv.errors import Refused


class Report:
    """What a block has kept and what it cost, for the text that ran last.

    Attributes
    ----------
    store : CompressedStore or None
        The cache itself; None before the first call.
    """

    def __init__(self):
        self.store: CompressedStore | None = None

    @property
    def kept(self) -> list[torch.Tensor]:
        """Per layer: original positions of what is stored, int ``[batch, kv_heads, n_kept]``, ascending."""
        return [layer.slot_positions().cpu().expand(*layer.keys.shape[:2], -1) for layer in self._latest().layers]

    @property
    def seen(self) -> list[int]:
        """Per layer: tokens that have passed."""
        return [layer.seen for layer in self._latest().layers]

    @property
    def stored(self) -> list[int]:
        """Per layer: tokens that are stored, for each row and KV head."""
        return [layer.length for layer in self._latest().layers]

    @property
    def stored_bytes(self) -> int:
        """Bytes of the keys and values that are stored, all rows and layers."""
        return sum(layer.stored_bytes for layer in self._latest().layers)

    @property
    def full_bytes(self) -> int:
        """Bytes of the keys and values if every token that has passed were stored."""
        return sum(layer.stored_bytes // layer.length * layer.seen for layer in self._latest().layers)

    @property
    def peak_bytes(self) -> int:
        """The most bytes of key and value buffers and of signals for scoring that were held between calls.

        A prompt is cut when it is complete, so the peak holds all of it, except what sliding windows leave behind.
        """
        self._latest().note_peak()
        return self._latest().peak_bytes

    @property
    def scoring_seconds(self) -> float:
        """Seconds spent on signals, scores and cuts. On a GPU: until the work was handed over."""
        return self._latest().recorder.watch.seconds

    def _latest(self) -> CompressedStore:
        if self.store is None:
            raise Refused("Nothing has run inside this compress() block yet; call the model or generate() first.")
        return self.store
