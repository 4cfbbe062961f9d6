"""A token store that is cut as its text grows: the prompt once, the generated part on a schedule."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infokv.allocation import budget_needs, generated_count, layer_allocation
from infokv.budget import Budget, Schedule
from infokv.cuts import chosen_slots, evict, prompt_slots
from infokv.recorder import Recorder
from infokv.scorer import Scorer
from infokv.store import TokenStore


@dataclass(frozen=True)
class Plan:
    """What is cut, when, and by whom.

    Parameters
    ----------
    scorer : Scorer
        Scores the prompt; its ``for_decoding()`` scores what was generated.
    budget : Budget
    prefill : bool
        Whether the prompt is cut at its end.
    schedule : Schedule or None
        When the generated part is cut; None: never.
    """

    scorer: Scorer
    budget: Budget
    prefill: bool
    schedule: Schedule | None

    @property
    def propagates(self) -> bool:
        """Whether only some tokens of the prompt go on behind a layer."""
        return self.prefill and getattr(self.scorer, "propagate", None) is not None

    def cuts_prompt(self, prompt: int) -> bool:
        """Whether a prompt of this length is cut at all."""
        full = layer_allocation(self.budget, self.scorer) == "full"
        return self.prefill and not full and self.budget.resolve(prompt) < prompt

    def needs(self, prompt: int) -> tuple[str, ...]:
        """Signals to record for a prompt of this length."""
        asked = self.cuts_prompt(prompt) or self.propagates
        return (budget_needs(self.scorer, self.budget) if asked else ()) + self.decode_needs

    @property
    def decode_needs(self) -> tuple[str, ...]:
        """Signals to record for the cuts of what is generated."""
        return () if self.schedule is None else tuple(self.scorer.for_decoding().needs)


class CompressedStore(TokenStore):
    """The cache of one batch of texts of equal length.

    Parameters
    ----------
    model : PreTrainedModel
    plan : Plan
    rows : int
    prompt : int
        Length of the prompt, which may come in several calls.
    total : int or None
        Length of the whole text if it is known before.
    """

    def __init__(self, model, plan: Plan, rows: int, prompt: int, total: int | None = None):
        self.recorder = Recorder(model, plan.needs(prompt), rows)
        super().__init__(self.recorder.layers, 0)
        self.plan = plan
        self.prompt = prompt
        self.total = total
        self.cuts = 0
        self.maker: object | None = None
        self.history: list[torch.Tensor | None] = []  # ids that have passed; None where embeddings were passed
        self.whole = True  # no call broke off half way
        self.peak_bytes = 0
        self._records = plan.schedule is not None or plan.propagates or plan.cuts_prompt(prompt)
        self._due = prompt
        self._prompt_kept: list[int] = []  # per layer, after the prompt was cut
        self._unread: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # states whose logits may still come

    @property
    def boundary(self) -> int | None:
        """Number of tokens after which something is cut next; None: never again."""
        if self.seen < self.prompt:
            return self.prompt
        schedule = self.plan.schedule
        return None if schedule is None else self.prompt + (self.cuts + 1) * schedule.every + schedule.recent

    @property
    def attention_listeners(self) -> tuple:
        """Who listens to the next call."""
        return self.recorder.attention_listeners if self._records or self.seen == 0 else ()

    @property
    def block_listeners(self) -> tuple:
        """Who listens to the next call."""
        return self.recorder.block_listeners if self._records else ()

    def comes(self, rows: int, new: int, ids: torch.Tensor | None) -> None:
        """Tokens are about to pass; their ids ``[rows, new]``, or None where embeddings were passed (ids of -1)."""
        self.read_logits(None)  # those that are still missing will not come any more
        if self._records:
            self.recorder.on_ids(torch.full((rows, new), -1) if ids is None else ids.cpu())

    def took(self, states: torch.Tensor, new: int, ids: torch.Tensor | None) -> None:
        """Tokens have passed, at the latest up to where :attr:`boundary` says.

        Parameters
        ----------
        states : Tensor ``[rows, new, hidden]``
            Final states; fewer where tokens were left out on the way.
        new : int
        ids : int Tensor ``[rows, new]`` or None
            None where embeddings were passed.
        """
        if self._records and self.recorder.wants_logits:
            self._unread.append((states, ids))
            if self.seen <= self.prompt:
                self.read_logits(None)
        if self.seen == new:  # windows are known from the first call on
            whole = self.prompt if self.plan.cuts_prompt(self.prompt) else max(self.prompt, self.total or 0)
            self._reserve(whole - new, new)
        due = self.seen == self._due
        if due or self.seen <= self.prompt:
            self.note_peak()
        self._expire()
        if due:
            self._cut_prompt() if self.seen == self.prompt else self._cut_generated()
            self._due = self.boundary

    def read_logits(self, logits: torch.Tensor | None) -> None:
        """Logits ``[rows, new, vocabulary]`` that the model has computed itself, or None to compute them here.

        The model's own are those of its last tokens; they save the head's work while generating.
        """
        unread, self._unread = self._unread, []  # computing logits comes by here again
        waiting = sum(states.shape[1] for states, _ in unread)
        known = logits is not None and logits.shape[1] >= waiting
        start = 0
        for states, ids in unread:
            count = states.shape[1]
            if known:
                first = logits.shape[1] - waiting + start
                self.recorder.on_logits(logits[:, first : first + count], ids)
            else:
                self.recorder.read(states, ids)
            start += count

    def _reserve(self, more: int, call: int) -> None:
        for layer, facts in zip(self.layers, self.recorder.facts):
            room = more if facts.window is None else min(more, facts.window + call)
            if room > 0:
                layer.reserve(room)

    def _expire(self) -> None:
        for index, (layer, facts) in enumerate(zip(self.layers, self.recorder.facts)):
            if facts.window is None:
                continue
            gone = layer.expire(facts.window)
            if gone and self._records:
                left = torch.arange(gone, gone + layer.length)[None, None]
                self.recorder.on_evict(index, left)

    def _cut_prompt(self) -> None:
        plan = self.plan
        if plan.cuts_prompt(self.prompt):
            with self.recorder.watch:
                chosen = prompt_slots(self.layers, self.recorder, plan.scorer, plan.budget, self.prompt)
                for index, slots in enumerate(chosen):
                    evict(self.layers[index], self.recorder, index, slots)
        self._prompt_kept = [layer.length for layer in self.layers]
        if plan.schedule is None:  # nobody will ask again
            self._records = False
        self.recorder.keep(plan.decode_needs)

    def _cut_generated(self) -> None:
        plan, schedule = self.plan, self.plan.schedule
        scorer = plan.scorer.for_decoding()
        self.cuts += 1
        self.read_logits(None)  # the newest token may be asked about
        with self.recorder.watch:
            for index, layer in enumerate(self.layers):
                protected = schedule.protect_prompt  # a window may have left some of its slots behind
                prompt = self._slots_before(layer, self.prompt) if protected else self._prompt_kept[index]
                sinks = prompt if schedule.protect_prompt else self._slots_before(layer, scorer.sinks)
                if plan.budget.tokens is not None and schedule.keep is None:
                    count = max(plan.budget.tokens, sinks + schedule.recent)
                else:
                    left = generated_count(self.cuts, schedule, plan.budget, scorer)
                    count = max(1, prompt + left + schedule.recent)
                slots = chosen_slots(
                    layer, self.recorder, scorer, index, count, sinks=sinks, recent=schedule.recent,
                    seed=index + len(self.layers) * self.cuts,
                )  # fmt: skip
                evict(layer, self.recorder, index, slots)

    @staticmethod
    def _slots_before(layer, position: int) -> int:
        """Slots that hold earlier tokens than this; the most of any row and head."""
        return int((layer.slot_positions() < position).sum(dim=-1).max())

    def note_peak(self) -> None:
        """Remember the bytes that are held now, if they are the most so far."""
        held = sum(layer.buffer_bytes for layer in self.layers)
        self.peak_bytes = max(self.peak_bytes, held + self.recorder.held_bytes)
