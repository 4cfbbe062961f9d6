"""``compress``: a model whose calls and ``generate()`` run on a cache that is cut."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
from transformers.cache_utils import Cache

from infokv.allocation import layer_allocation
from infokv.budget import Budget, Schedule
from infokv.call_checks import (
    check_fresh,
    check_generation,
    check_mask,
    check_positions,
    check_rest,
    check_same_text,
    given_tokens,
)
from infokv.calls import StoreCalls
from infokv.compressed import CompressedStore, Plan
from infokv.errors import Refused
from infokv.generating import OfThread, asked_for
from infokv.identity import identity_of, refuse_foreign
from infokv.modelcheck import ensure_checked
from infokv.pieces import run_in_pieces, run_propagated
from infokv.report import Report
from infokv.scorer import SCORERS, Scorer, usable_scorer


@contextlib.contextmanager
def compress(model, scorer: Scorer | str, budget: Budget, *, prefill: bool = True,
             decode: Schedule | bool | None = None, prefill_chunk: int = 512) -> Iterator[Compression]:  # fmt: skip
    """Compress the KV cache of everything that a model does inside the block.

    ``generate()``, a text-generation pipeline, and direct calls with or without a cache of their own all run on a
    token store. The first call of a text is its prompt, the rest counts as generated. Afterwards the model is as it
    was, also after an exception.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model in evaluation mode.
    scorer : Scorer or str
        Which tokens matter, such as ``InfoKV()`` or ``"infokv:alpha=0.8"``.
    budget : Budget
        How much of the prompt stays in each layer and, on a schedule, of the generated tokens.
    prefill : bool
        Whether the prompt is cut, at its end.
    decode : Schedule, optional
        When generated tokens are cut; None takes the scorer's own (most have none: generated tokens stay), False
        cuts none.
    prefill_chunk : int
        Longer calls are split, so that no more than this many tokens' states of all layers are held at a time.

    Yields
    ------
    Compression
        Tells what was kept and what it cost, for the latest text.

    Raises
    ------
    Refused
        On entering, if the model, the scorer or a number is unfit, or the model is inside such a block already. In
        the block, for padded batches, foreign or static caches, beam search and assisted decoding.

    Notes
    -----
    Each text starts afresh: nothing of one sample reaches the next. A cut follows the call that completes the
    prompt or a period, so that this call still sees everything.
    """
    handle = Compression(model, usable_scorer(scorer), _budget(budget), prefill, decode, prefill_chunk)
    with handle._installed():
        yield handle


def _budget(budget) -> Budget:
    if not isinstance(budget, Budget):
        raise Refused(f"The budget is {budget!r}; write Budget(keep=0.4) or Budget(tokens=512).")
    return budget


class Compression(Report):
    """A block at work on a model, and its report."""

    def __init__(self, model, scorer: Scorer, budget: Budget, prefill: bool, decode: Schedule | None, chunk: int):
        if type(chunk) is not int or chunk < 1:
            raise Refused(f"prefill_chunk is {chunk!r}; it must be a whole number of at least 1 token.")
        if decode is not None and decode is not False and not isinstance(decode, Schedule):
            raise Refused(f"decode is {decode!r}; write Schedule(every=1024, recent=32), None or False.")
        if not isinstance(model, torch.nn.Module) or not hasattr(model, "get_output_embeddings"):
            raise Refused(f"The model is {type(model).__name__}; pass a causal language model of transformers.")
        if model.training:
            raise Refused(f"{type(model).__name__} is in training mode; call model.eval() first.")
        deepest = model.config.get_text_config().num_hidden_layers - 1
        if (getattr(scorer, "propagate", None) or 0) > deepest:
            raise Refused(f"propagate is {scorer.propagate}; {type(model).__name__} has layers 0 to {deepest}.")
        full = layer_allocation(budget, scorer) == "full"  # every token stays, also those that are generated
        schedule = scorer.schedule if decode is None else decode or None
        if not (prefill or schedule or full):
            raise Refused(
                f"Nothing would be cut: prefill is False, and {SCORERS.canonical(scorer)} has no schedule of its own; "
                "pass decode=Schedule(every=1024), or leave prefill on."
            )
        super().__init__()
        self.plan = Plan(scorer, budget, prefill, None if full else schedule)
        self._calls = StoreCalls(model)
        self._chunk = chunk
        if getattr(scorer, "tuned_for", None) is not None:
            refuse_foreign(scorer, identity_of(model))
        ensure_checked(model)
        self._arguments = list(inspect.signature(type(self._calls.base).forward).parameters)[1:]
        self._stores: WeakKeyDictionary = WeakKeyDictionary()  # a caller's cache, empty when it came -> our store
        self._here = OfThread()

    def __deepcopy__(self, memo):
        raise Refused(
            "A model inside compress() cannot be copied, for its copy would never leave the block; leave first."
        )

    def __reduce__(self):
        raise Refused("A model inside compress() cannot be saved by pickling; leave the block first.")

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        model, base = self._calls.model, self._calls.base
        patched = (
            (base, "forward", self._call),
            (model, "generate", self._generate),
            (model, "prepare_inputs_for_generation", self._prepare),
        )
        before = [module.__dict__.get(name) for module, name, _ in patched]
        if isinstance(getattr(before[0], "__self__", None), Compression):
            raise Refused("compress() is at work on this model already; leave that block first.")
        self._forward, self._plain_generate = base.forward, model.generate
        self._plain_prepare = model.prepare_inputs_for_generation
        hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, prepend=True),  # before logits are changed
        ]
        for module, name, ours in patched:
            setattr(module, name, ours)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for (module, name, _), usual in zip(patched, before):
                delattr(module, name)
                if usual is not None:
                    setattr(module, name, usual)

    def _generate(self, *args, **kwargs):
        """generate() may feed a prompt in pieces, and alone knows where the prompt and the whole text end."""
        settings = [kwargs.get("generation_config"), self._calls.model.generation_config]
        check_generation(kwargs, settings)
        given, lengths = asked_for(args, kwargs, settings)
        here = self._here
        outer = here.lengths, here.text  # a logits processor may generate, too
        here.text = self._known(kwargs.get("cache") or kwargs.get("past_key_values"))
        here.lengths = lengths if here.text is None else None
        if here.text is not None:
            check_same_text(here.text, given)
        here.depth += 1
        try:
            return self._plain_generate(*args, **kwargs)
        finally:
            here.depth -= 1
            here.lengths, here.text = outer

    def _prepare(self, *args, **kwargs):
        """What generate() does right before its own calls; those of a logits processor come without."""
        self._here.own = True
        return self._plain_prepare(*args, **kwargs)

    def _before(self, model, args, kwargs) -> None:
        self._here.ran = None
        if kwargs.get("labels") is not None and self.plan.propagates:
            raise Refused("FastKV(propagate=...) has logits of the prompt's last token alone, and so no loss.")
        if kwargs.get("labels") is not None and torch.is_grad_enabled():
            raise Refused("Inside compress() no gradients are computed; compute the loss under torch.no_grad().")

    def _after(self, model, args, kwargs, output) -> None:
        """The logits that the model has just computed from the states of this call serve as a signal."""
        ran, self._here.ran = self._here.ran, None
        in_order = not isinstance(kwargs.get("logits_to_keep"), torch.Tensor)
        if ran is not None and in_order and getattr(output, "logits", None) is not None:
            ran.read_logits(output.logits)

    def _call(self, *args, **kwargs):
        """The base model's forward inside the block."""
        base = self._calls.base
        given = {**dict(zip(self._arguments, args)), **kwargs}
        cache = given.pop("cache", None)
        cache = given.pop("past_key_values", None) if cache is None else cache
        wanted = base.config.use_cache if given.get("use_cache") is None else given["use_cache"]
        if cache is None and not wanted:
            return self._forward(**given)  # no cache, nothing to compress
        name, tokens = given_tokens(given)
        rows, new = tokens.shape[:2]
        own, self._here.own = self._here.own, False
        known = self._known(cache) or self._dropped(cache, rows, new, given.get("attention_mask"), own)
        if known is None:
            check_fresh(cache)
        if known is not None and cache is None:  # the model's own generate() has let go of it
            tokens, new = tokens[:, -1:], 1
            given = {key: value for key, value in given.items() if key not in ("attention_mask", "position_ids")}
        seen = 0 if known is None else known.seen
        positions = torch.arange(seen, seen + new, device=tokens.device)[None]
        check_mask(given.pop("attention_mask", None), seen + new)
        check_positions(given.pop("position_ids", None), positions)
        check_rest(given, whole=new <= self._chunk)
        store = self._started(cache, rows, new, own) if known is None else known
        self._check_going_on(store, rows, new)
        store.whole = False
        if self._here.depth < 2 and self._here.text in (
            None,
            store,
        ):  # what a logits processor runs on the side is not what was asked for
            self.store = store
        piecewise = run_propagated if self.plan.propagates and seen == 0 else run_in_pieces
        # Buffers that outlive the call are no inference tensors: a later call may be made in another mode.
        with torch.inference_mode(False), torch.no_grad():
            out = piecewise(self._calls, self._forward, store, given, name, tokens, positions, self._chunk)
        store.whole, self._here.ran = True, store
        store.history.append(tokens if name == "input_ids" else None)
        return out

    def _known(self, cache) -> CompressedStore | None:
        """The store that belongs to a cache, if this block made it."""
        if isinstance(cache, CompressedStore) and cache.maker is self:
            return cache
        return self._stores.get(cache) if isinstance(cache, Cache) else None

    def _dropped(self, cache, rows: int, new: int, mask, own: bool) -> CompressedStore | None:
        """The store of a text that generate() feeds again from the start.

        A model whose RoPE depends on the length does so where its frequencies change, because its keys would not fit
        any more; here they are those of the whole text from the first token on.
        """
        text = self._here.text
        again = own and cache is None and text is not None and text.whole and self._calls.rope_varies
        if not again or text.rows != rows:
            return None
        whole = new == text.seen + 1
        last = new == 1 and mask is not None and mask.shape[-1] == text.seen + 1  # some versions feed it alone
        return text if whole or last else None

    def _started(self, cache, rows: int, new: int, own: bool) -> CompressedStore:
        """A store for a new text; a caller's empty cache becomes a view of it."""
        announced = self._here.lengths if own else None
        if announced:
            self._here.lengths = None  # the first text of a generate() is meant
        prompt, total = announced or (new, None)
        store = CompressedStore(self._calls.model, self.plan, rows, max(prompt, new), total)
        store.maker = self
        if announced:
            self._here.text = store
        if cache is not None:
            cache.layers = store.layers  # so that its length is true, and other attention is refused
            self._stores[cache] = store
        return store

    def _check_going_on(self, store: CompressedStore, rows: int, new: int) -> None:
        if store.rows not in (0, rows):
            raise Refused(f"The cache holds {store.rows} texts and the call has {rows}; they must be the same.")
        if not store.whole:
            raise Refused("A call on this cache broke off half way, and its layers differ; start with a new cache.")
        length = store.total or store.prompt
        if store.seen + new > length and not self._calls.same_rope(length, store.seen + new):
            raise Refused(
                f"{type(self._calls.model).__name__} rotates keys by the length of the text, which was to be {length} "
                f"tokens and grew to {store.seen + new}; start anew with generate(), whose max_new_tokens says it."
            )
