"""compress(): the bytes told are those of what is stored, and what is over is let go."""

from __future__ import annotations

import gc
import weakref

import pytest
from compress_runs import PROMPT, SCORERS, run
from tiny_models import build, random_ids

from infokv import Budget, FastKV, FullCache, InfoKV, KNorm, Schedule, compress
from infokv.calls import cache_argument


@pytest.mark.parametrize("scorer", [SCORERS["per head"], SCORERS["uneven"], KNorm(), FastKV(window=6)], ids=repr)
def test_bytes_are_those_of_what_is_kept(scorer):
    model, ids = build("llama"), random_ids(PROMPT)
    config = model.config
    with compress(model, scorer, Budget(keep=0.4)) as handle:
        run(model, ids, ())
        a_token = 2 * config.num_key_value_heads * config.head_dim * 4
        assert handle.stored_bytes == sum(handle.stored) * a_token
        assert handle.full_bytes == PROMPT * config.num_hidden_layers * a_token
        assert handle.peak_bytes >= handle.full_bytes
        assert [one.shape for one in handle.kept] == [(1, 2, count) for count in handle.stored]


def test_a_window_never_stores_what_it_left_behind():
    model, ids = build("gemma3"), random_ids(240)
    with compress(model, FullCache(), Budget(keep=1), prefill_chunk=5) as handle:
        out = model(ids[:, :225])
        for step in range(225, 240):
            out = model(ids[:, step : step + 1], **{cache_argument(model): out[cache_argument(model)]})
            assert handle.stored == [7, 7, step + 1, 7]
        # A layer with a window never has room for the whole text, only for its window, a chunk and some tokens ahead.
        token = handle.full_bytes // (240 * 4)
        assert handle.peak_bytes <= token * (240 + 64 + 3 * (8 + 5 + 64))


def test_a_long_prompt_never_holds_all_states():
    """InfoKV needs every layer's states, of one chunk at a time: 16,000 tokens hold no more than a few chunks."""
    model, ids = build("granite"), random_ids(16000)
    alive, most = weakref.WeakSet(), [0]

    def note(module, args, output):
        states = output[0] if isinstance(output, tuple) else output
        alive.add(states)
        most[0] = max(most[0], sum(one.shape[1] for one in alive))

    hooks = [block.register_forward_hook(note) for block in model.model.layers]
    model.config.max_position_embeddings = 20000
    with compress(model, InfoKV(), Budget(keep=0.1), prefill_chunk=512) as handle:
        model.generate(ids, max_new_tokens=2, do_sample=False)
        signals = handle.peak_bytes - 16000 * handle.full_bytes // handle.seen[0]
    for hook in hooks:
        hook.remove()
    gc.collect()
    layers, hidden = model.config.num_hidden_layers, model.config.hidden_size
    assert most[0] <= 3 * layers * 512
    assert signals < 0.5 * 16000 * layers * hidden * 4


def test_texts_that_are_over_are_let_go():
    model, stores = build("llama"), weakref.WeakSet()
    with compress(model, SCORERS["mixed"], Budget(keep=0.4), decode=Schedule(every=4, recent=2)) as handle:
        for seed in range(6):
            model.generate(random_ids(PROMPT, seed), max_new_tokens=8, do_sample=False)
            stores.add(handle.store)
        gc.collect()
        assert len(stores) == 1
