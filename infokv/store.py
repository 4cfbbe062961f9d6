"""The token store: keys and values of cached tokens, with the original position of every slot.

The one mechanism under measuring and compressing. Ablating a token sets its hidden flag; evicting it
gathers the other slots. What a query may see follows from slot positions, never from slot numbers, so
positions stay right in both uses.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache

from infokv.errors import Refused
from infokv.store_layer import StoreLayer


class TokenStore(Cache):
    """A KV cache for any transformers causal model, one row per variant of the same text.

    Parameters
    ----------
    layers : int or list of StoreLayer
        Number of attention layers, or the layers themselves.
    capacity : int
        Tokens for which room is made, per row and layer.

    Attributes
    ----------
    hidden : bool Tensor ``[rows, layers or 1, kv_heads or 1, prefix]`` or None
        True where a prefix position is invisible to every later query of that row, layer and head.
    gate : list of one bool
        True while a model runs on it through :func:`infokv.attention.attached`. Any other attention would read
        slots as if they were positions.
    """

    def __init__(self, layers: int | list[StoreLayer], capacity: int):
        if isinstance(layers, int):
            layers = [StoreLayer(capacity) for _ in range(layers)]
        super().__init__(layers=layers)
        self.capacity = capacity
        self.hidden: torch.Tensor | None = None
        self.gate = [False]
        for layer in layers:
            layer.gate = self.gate

    reorder_cache = crop = reset = batch_repeat_interleave = batch_select_indices = StoreLayer._refuse_change
    activate_past_recording = StoreLayer._refuse_change

    @property
    def seen(self) -> int:
        """Tokens that have passed through; the position of the next one."""
        return self.layers[0].seen

    @property
    def rows(self) -> int:
        """Rows of the batch; 0 before the first token."""
        return self.layers[0].keys.shape[0] if self.layers[0].is_initialized else 0

    def fork(self, rows: int, capacity: int) -> TokenStore:
        """``rows`` independent copies of a one-row store, with room for ``capacity`` tokens each.

        Raises
        ------
        Refused
            If this store has more than one row.
        """
        if self.rows != 1:
            raise Refused(f"Only a store of one row can be forked; this one has {self.rows}.")
        return TokenStore([layer.fork(rows, capacity) for layer in self.layers], capacity)

    def hide(self, flags: torch.Tensor) -> None:
        """Hide positions from every query that comes after this call.

        Parameters
        ----------
        flags : bool Tensor ``[rows, layers or 1, kv_heads or 1, prefix]``

        Raises
        ------
        Refused
            If the shape does not fit, or if some row, layer and head would keep nothing of the prefix:
            there is no prediction without context that could be called an influence.
        """
        if any(layer.length != layer.seen for layer in self.layers):
            raise Refused("Positions can be hidden only in a store from which nothing was evicted.")
        heads = self.layers[0].keys.shape[1]
        allowed = ((self.rows,), (1, len(self.layers)), (1, heads), (self.seen,))
        if (
            flags.dtype != torch.bool
            or flags.dim() != 4
            or any(size not in sizes for size, sizes in zip(flags.shape, allowed))
        ):
            raise Refused(
                f"Hidden flags are {flags.dtype} {list(flags.shape)}; they must be bool "
                f"[{self.rows} rows, {len(self.layers)} layers or 1, {heads} KV heads or 1, {self.seen} positions]."
            )
        if flags.all(dim=-1).any():
            raise Refused(
                f"Removing all {self.seen} positions of the prefix leaves a query no visible key there; "
                "keep at least one."
            )
        self.hidden = flags
