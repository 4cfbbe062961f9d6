"""The token store: keys and values of cached tokens, with the original position of every slot.

The one mechanism under measuring and compressing. Ablating a token sets its hidden flag; evicting it
gathers the other slots. What a query may see follows from slot positions, never from slot numbers, so
positions stay right in both uses.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from infokv.errors import Refused


class StoreLayer(CacheLayerMixin):
    """Keys and values of one layer, in buffers that are allocated once.

    Attributes
    ----------
    keys, values : Tensor ``[rows, kv_heads, capacity, head_dim]``
        Keys are post-RoPE, as the model handed them over. Slots from ``length`` on are unused.
    length : int
        Slots in use.
    seen : int
        Tokens that have passed; the position of the next one.
    positions : Tensor ``[rows or 1, kv_heads or 1, length]`` or None
        Original position of each slot, ascending. None: slot i holds position i.
    """

    is_sliding = False

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity
        self.length = 0
        self.seen = 0
        self.positions: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, heads = key_states.shape[:2]
        self.keys = key_states.new_empty(rows, heads, self.capacity, key_states.shape[-1])
        self.values = value_states.new_empty(rows, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Write new tokens behind the stored ones; returns all stored keys and values.

        Raises
        ------
        Refused
            If the buffers are full.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[-2]
        if self.length + new > self.capacity:
            raise Refused(
                f"The token store holds {self.capacity} tokens and {self.length + new} were to be stored; "
                "make it with the length of the whole text."
            )
        self.keys[:, :, self.length : self.length + new] = key_states
        self.values[:, :, self.length : self.length + new] = value_states
        if self.positions is not None:
            fresh = torch.arange(self.seen, self.seen + new, device=self.positions.device)
            self.positions = torch.cat([self.positions, fresh.expand(*self.positions.shape[:2], new)], dim=-1)
        self.length += new
        self.seen += new
        return self.stored_keys, self.stored_values

    @property
    def stored_keys(self) -> torch.Tensor:
        """``[rows, kv_heads, length, head_dim]``, a view."""
        return self.keys[:, :, : self.length]

    @property
    def stored_values(self) -> torch.Tensor:
        """``[rows, kv_heads, length, head_dim]``, a view."""
        return self.values[:, :, : self.length]

    def slot_positions(self, device) -> torch.Tensor:
        """Original position of each slot, ``[rows or 1, kv_heads or 1, length]``."""
        if self.positions is None:
            return torch.arange(self.length, device=device)[None, None]
        return self.positions

    def fork(self, rows: int, capacity: int) -> StoreLayer:
        """A layer of ``rows`` copies of this one-row layer, with room for ``capacity`` tokens."""
        twin = StoreLayer(capacity)
        twin.length, twin.seen, twin.positions = self.length, self.seen, self.positions
        like_keys = self.keys[:, :, :0].expand(rows, -1, -1, -1)
        twin.lazy_initialization(like_keys, self.values[:, :, :0].expand(rows, -1, -1, -1))
        twin.keys[:, :, : self.length] = self.stored_keys
        twin.values[:, :, : self.length] = self.stored_values
        return twin

    # What transformers asks of a cache layer. Its names for the last one differ within the supported range.

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + int(query_length), 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


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
    """

    def __init__(self, layers: int | list[StoreLayer], capacity: int):
        if isinstance(layers, int):
            layers = [StoreLayer(capacity) for _ in range(layers)]
        super().__init__(layers=layers)
        self.capacity = capacity
        self.hidden: torch.Tensor | None = None

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
        if any(layer.positions is not None for layer in self.layers):
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
