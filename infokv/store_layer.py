"""One layer of the token store: keys and values in buffers, with the original position of every slot."""

from __future__ import annotations

import torch
from transformers.cache_utils import CacheLayerMixin

from infokv.errors import Refused

#: Slots by which a full buffer grows at least.
_ROOM = 64


class StoreLayer(CacheLayerMixin):
    """Keys and values of one layer, in buffers that are allocated ahead.

    Attributes
    ----------
    keys, values : Tensor ``[rows, kv_heads, capacity, head_dim]``
        Keys are post-RoPE, as the model handed them over. In use are ``length`` slots from ``first`` on.
    first, length : int
    seen : int
        Tokens that have passed; the position of the next one.
    survivors : Tensor ``[rows or 1, kv_heads or 1, n]`` or None
        Original positions of the first n slots in use, ascending, where something was evicted. All other slots hold
        the last tokens seen.
    gate : list of one bool
        Shared by the layers of a store: True while a model runs on it.
    """

    is_sliding = False

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity
        self.first = 0
        self.length = 0
        self.seen = 0
        self.survivors: torch.Tensor | None = None
        self.gate = [False]
        self._latest: list[int] = []  # of each survivor slot, the last position that a row or head has there
        self._expected: tuple[torch.Tensor, int] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = self._buffers(key_states, value_states, self.capacity)
        self.is_initialized = True

    @staticmethod
    def _buffers(keys: torch.Tensor, values: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(one.new_empty(*one.shape[:2], capacity, one.shape[-1]) for one in (keys, values))

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Write new tokens behind the stored ones; returns all stored keys and values. Full buffers grow.

        Raises
        ------
        Refused
            If a model runs on it with an attention that knows nothing of slot positions.
        """
        if not self.gate[0]:
            raise Refused(
                "This cache belongs to infokv and may hold some tokens only; use it inside the block that made it, or "
                "start without a cache."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[-2]
        stop = self.first + self.length
        if stop + new > self.capacity:
            self.reserve(new + max(_ROOM, self.length // 8))
            stop = self.length
        self.keys[:, :, stop : stop + new] = key_states
        self.values[:, :, stop : stop + new] = value_states
        if self._expected is not None:
            (places, self.seen), self._expected = self._expected, None
            self._survive(places.to(self.keys.device)[None, None])
        else:
            self.seen += new
        self.length += new
        return self.stored_keys, self.stored_values

    def expect(self, positions: torch.Tensor, seen: int) -> None:
        """The first tokens of this empty layer will be some of a text alone.

        Parameters
        ----------
        positions : int Tensor ``[tokens]``
            Where they are, ascending.
        seen : int
            Length of the text.
        """
        self._expected = positions, seen

    def reserve(self, room: int) -> None:
        """Make room for this many more tokens, in buffers of their own."""
        old = self.stored_keys, self.stored_values
        self.capacity = self.length + room
        self.keys, self.values = self._buffers(*old, self.capacity)
        self.first = 0
        self.stored_keys.copy_(old[0])
        self.stored_values.copy_(old[1])

    def keep(self, slots: torch.Tensor) -> None:
        """Evict all slots but these; survivors keep their positions and rotations.

        Parameters
        ----------
        slots : int Tensor ``[rows or 1, kv_heads or 1, n_kept]``
            Ascending, counted among the slots in use.

        Raises
        ------
        Refused
            If none would be left.
        """
        left = self.selected(slots, max(_ROOM, self.length // 8))
        self.first, self.length, self.capacity = 0, left.length, left.capacity
        self.keys, self.values = left.keys, left.values
        self.survivors, self._latest = left.survivors, left._latest

    def selected(self, slots: torch.Tensor, room: int) -> StoreLayer:
        """A layer with these slots alone, as in :meth:`keep`, in as many rows as ``slots`` or this layer has."""
        if slots.shape[-1] < 1:
            raise Refused("Nothing of a layer would be kept; a cache keeps at least 1 token.")
        keys, values = self.stored_keys, self.stored_values
        rows, heads = max(len(keys), len(slots)), keys.shape[1]
        places = self.slot_positions()
        shape = torch.broadcast_shapes(places.shape[:2], slots.shape[:2])
        slots = slots.to(keys.device)
        left = StoreLayer(slots.shape[-1] + room)
        left.lazy_initialization(keys[:, :, :0].expand(rows, -1, -1, -1), values[:, :, :0].expand(rows, -1, -1, -1))
        left.length, left.seen = slots.shape[-1], self.seen
        left._survive(places.expand(*shape, -1).gather(-1, slots.expand(*shape, -1)))
        index = slots.expand(rows, heads, -1)[..., None]
        for own, given in ((left.stored_keys, keys), (left.stored_values, values)):
            width = given.shape[-1]
            own.copy_(given.expand(rows, -1, -1, -1).gather(2, index.expand(-1, -1, -1, width)))
        return left

    def expire(self, window: int) -> int:
        """Let go of slots that a sliding window has left behind in every row and head; their number."""
        oldest = self.seen - window + 1  # what the next token sees
        survivors = len(self._latest)
        gone = 0
        while gone < survivors and self._latest[gone] < oldest:
            gone += 1
        if gone:
            self.survivors, self._latest = self.survivors[..., gone:], self._latest[gone:]
        if gone == survivors:  # none is left, and the other slots are consecutive
            gone += max(0, oldest - (self.seen - (self.length - gone)))
        self.first += gone
        self.length -= gone
        return gone

    @property
    def stored_keys(self) -> torch.Tensor:
        """``[rows, kv_heads, length, head_dim]``, a view."""
        return self.keys[:, :, self.first : self.first + self.length]

    @property
    def stored_values(self) -> torch.Tensor:
        """``[rows, kv_heads, length, head_dim]``, a view."""
        return self.values[:, :, self.first : self.first + self.length]

    def _survive(self, positions: torch.Tensor) -> None:
        """These are the positions of the slots in use."""
        self.survivors = positions
        self._latest = positions.amax(dim=(0, 1)).tolist()  # asked for once, not at every token

    @property
    def consecutive(self) -> bool:
        """Whether the slots in use hold the last tokens seen."""
        return not self._latest

    def slot_positions(self) -> torch.Tensor:
        """Original position of each slot in use, ``[rows or 1, kv_heads or 1, length]``."""
        tail = self.length - len(self._latest)
        recent = torch.arange(self.seen - tail, self.seen, device=self.keys.device)[None, None]
        if self.consecutive:
            return recent
        return torch.cat([self.survivors, recent.expand(*self.survivors.shape[:2], -1)], dim=-1)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers, the room for tokens to come included."""
        return sum(one.numel() * one.element_size() for one in (self.keys, self.values))

    @property
    def stored_bytes(self) -> int:
        """Bytes of the slots in use."""
        return sum(one.numel() * one.element_size() for one in (self.stored_keys, self.stored_values))

    def fork(self, rows: int, capacity: int) -> StoreLayer:
        """A layer of ``rows`` copies of this one-row layer, with room for ``capacity`` tokens."""
        twin = StoreLayer(capacity)
        twin.length, twin.seen, twin.survivors, twin._latest = self.length, self.seen, self.survivors, self._latest
        like_keys = self.keys[:, :, :0].expand(rows, -1, -1, -1)
        twin.lazy_initialization(like_keys, self.values[:, :, :0].expand(rows, -1, -1, -1))
        twin.stored_keys.copy_(self.stored_keys.expand(rows, -1, -1, -1))
        twin.stored_values.copy_(self.stored_values.expand(rows, -1, -1, -1))
        return twin

    def part(self, row: int, heads: slice = slice(None)) -> StoreLayer:
        """One row, and some of its KV heads, as views: to look at, not to write."""
        view = StoreLayer(self.capacity)
        view.first, view.length, view.seen = self.first, self.length, self.seen
        view.keys, view.values = self.keys[row : row + 1, heads], self.values[row : row + 1, heads]
        view.is_initialized = True
        if not self.consecutive:
            rows, kv_heads = self.survivors.shape[:2]
            places = self.survivors[row : row + 1] if rows > 1 else self.survivors
            view.survivors, view._latest = places[:, heads] if kv_heads > 1 else places, self._latest
        return view

    def _refuse_change(self, *args, **kwargs):
        raise Refused(
            "The rows of this cache cannot be reordered, repeated, taken back or emptied, as beam search and assisted "
            "decoding do; use sampling or greedy decoding, and a new cache for a new text."
        )

    reorder_cache = crop = reset = batch_repeat_interleave = batch_select_indices = _refuse_change
    activate_past_recording = _refuse_change

    # What transformers asks of a cache layer. Its names for the last one differ within the supported range.

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + int(query_length), 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1
