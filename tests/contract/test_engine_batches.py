"""Batches, merged sets, the companion row, memory that runs out, and requests that cannot be met."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import build, random_ids

from forward_influence import engine, memory
from forward_influence.engine import compare_rows, influence, recomputed_states
from forward_influence.errors import UserError
from forward_influence.inputs import removal_flags
from infokv.errors import Refused
from infokv.prefill import prefill

PREFIX, LENGTH = 30, 50
SETS = [[3, 4], [], [10], [4, 3, 3], [], [20, 21, 22]]


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture
def passes(monkeypatch):
    """Ablated rows of each pass that the engine runs."""
    seen = []
    plain = engine._one_pass

    def counted(model, prefix, continuation, flags, *rest):
        seen.append(len(flags))
        return plain(model, prefix, continuation, flags, *rest)

    monkeypatch.setattr(engine, "_one_pass", counted)
    return seen


def run(model, **options):
    ids = random_ids(LENGTH)
    store, _ = prefill(model, ids[:, :PREFIX], total_length=LENGTH)
    flags = [removal_flags(one, PREFIX) for one in SETS]
    return compare_rows(model, store, ids[:, PREFIX:], flags, **options)


def test_identical_sets_are_computed_once_and_empty_ones_are_not_merged(model, passes):
    kl = run(model, batch=10).kl
    assert passes == [5]  # six sets, of which the fourth is the first; both empty ones are run
    assert torch.equal(kl[0], kl[3])
    assert (kl[1] <= 1e-12).all()
    assert (kl[4] <= 1e-12).all()
    assert (kl[[0, 2, 5]] > 0).all(dim=1).all()


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_batches_change_nothing(model, batch):
    whole, split = run(model, batch=10), run(model, batch=batch)
    assert ((whole.kl - split.kl).abs() <= 1e-6 + 1e-4 * whole.kl).all()
    assert torch.equal(whole.top1_changed, split.top1_changed)
    torch.testing.assert_close(whole.delta_nll, split.delta_nll, equal_nan=True, atol=1e-5, rtol=0)


@pytest.mark.parametrize("batch", [1, 2, 10])
@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_the_companion_row_comes_last(model, batch, chunk):
    ids = random_ids(LENGTH)

    def companion():
        return recomputed_states(model, ids, PREFIX, chunk)

    got = run(model, batch=batch, chunk_size=chunk, companion=companion)
    assert got.kl.shape == (len(SETS) + 1, LENGTH - PREFIX)
    alone = run(model, batch=10)
    assert ((got.kl[:-1] - alone.kl).abs() <= 1e-6 + 1e-4 * alone.kl).all()
    assert (got.kl[-1] < 1e-8).all()
    assert (got.delta_nll[-1, :-1].abs() < 1e-4).all()


def test_a_companion_that_differs_is_seen(model):
    """The floor could not be trusted if it were zero whatever the companion does."""
    other = random_ids(LENGTH, seed=9)

    def companion():
        return recomputed_states(model, other, PREFIX, 7)

    assert (run(model, companion=companion).kl[-1] > 1e-3).any()


def test_companion_alone(model):
    ids = random_ids(LENGTH)
    store, _ = prefill(model, ids[:, :PREFIX], total_length=LENGTH)
    got = compare_rows(model, store, ids[:, PREFIX:], [], companion=lambda: recomputed_states(model, ids, PREFIX, 256))
    assert got.kl.shape == (1, LENGTH - PREFIX)
    assert (got.kl < 1e-8).all()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
    ],
)
def test_memory_that_runs_out_halves_the_batch_with_a_notice(model, monkeypatch, error):
    plain, sizes, notices = engine._one_pass, [], []

    def short_of_memory(model, prefix, continuation, flags, *rest):
        sizes.append(len(flags))
        if len(flags) > 2:
            raise error
        return plain(model, prefix, continuation, flags, *rest)

    whole = run(model, batch=10)
    monkeypatch.setattr(engine, "_one_pass", short_of_memory)
    ids = random_ids(LENGTH)
    got = run(model, batch=10, notify=notices.append, companion=lambda: recomputed_states(model, ids, PREFIX, 256))
    assert sizes == [5, 2, 2, 1]
    assert notices == ["Memory ran out with 5 ablated rows at once; going on with 2."]
    assert ((whole.kl - got.kl[:-1]).abs() <= 1e-6 + 1e-4 * whole.kl).all()
    assert (got.kl[-1] < 1e-8).all()


def test_memory_that_runs_out_in_a_later_pass_moves_no_row(model, monkeypatch):
    plain, calls = engine._one_pass, []

    def short_of_memory(model, prefix, continuation, flags, *rest):
        calls.append(len(flags))
        if len(calls) == 2:
            raise MemoryError
        return plain(model, prefix, continuation, flags, *rest)

    whole, ids = run(model, batch=10), random_ids(LENGTH)
    monkeypatch.setattr(engine, "_one_pass", short_of_memory)
    got = run(model, batch=3, companion=lambda: recomputed_states(model, ids, PREFIX, 256))
    assert calls == [3, 2, 1, 1]
    assert ((whole.kl - got.kl[:-1]).abs() <= 1e-6 + 1e-4 * whole.kl).all()
    assert (got.kl[-1] < 1e-8).all()


def test_memory_that_runs_out_with_one_row_and_other_errors_are_raised(model, monkeypatch):
    def fail(*args):
        raise RuntimeError(message)

    monkeypatch.setattr(engine, "_one_pass", fail)
    for message in ("out of memory", "shapes do not match"):
        with pytest.raises(RuntimeError, match=message):
            run(model, batch=1)


def test_progress_counts_every_row_token_once(model):
    counted = []
    run(model, batch=2, chunk_size=6, progress=counted.append)
    assert sum(counted) == 5 * (LENGTH - PREFIX)


@pytest.mark.parametrize(
    ("removed", "sentence"),
    [
        ([[3, 30]], r"removed\[0\] holds position 30, which is outside the prefix; positions go from 0 to 29"),
        ([[1], [-1]], r"removed\[1\] holds position -1"),
        ([["a"]], "positions are whole numbers"),
        ([[False, True]], "a mask is a bool tensor"),
        ([3, 4], r"removed\[0\] is 3; each set is a collection"),
        ([[2.0]], "positions are whole numbers"),
        ([torch.zeros(1, 1, 7, dtype=torch.bool)], r"\[layers or 1, KV heads or 1, 30\]"),
        ([torch.zeros(1, 30, dtype=torch.bool)], r"\[layers or 1, KV heads or 1, 30\]"),
    ],
)
def test_positions_that_cannot_be(model, removed, sentence):
    with pytest.raises(UserError, match=sentence):
        influence(model, random_ids(LENGTH), removed, prefix_length=PREFIX)


def test_texts_beyond_the_context_and_numbers_that_cannot_be(model):
    long = random_ids(300)
    with pytest.raises(UserError, match="The text has 300 tokens, and LlamaForCausalLM has a context of 256"):
        influence(model, long, [[0]], prefix_length=PREFIX)
    for batch in (0, -1):
        with pytest.raises(UserError, match="batch is"):
            influence(model, random_ids(LENGTH), [[0]], prefix_length=PREFIX, batch=batch)
    with pytest.raises(Refused, match="chunk_size is 0"):
        influence(model, random_ids(LENGTH), [[0]], prefix_length=PREFIX, chunk_size=0)
    with pytest.raises(UserError, match="token ids are whole numbers"):
        influence(model, random_ids(LENGTH).float(), [[0]], prefix_length=PREFIX)


@pytest.mark.parametrize("shape", [(5, 1, PREFIX), (1, 4, PREFIX)])
def test_wrong_number_of_layers_or_heads(model, shape):
    with pytest.raises(Refused, match="Hidden flags are"):
        influence(model, random_ids(LENGTH), [torch.zeros(shape, dtype=torch.bool)], prefix_length=PREFIX)


def test_removing_the_whole_prefix_is_an_error_not_a_number(model):
    with pytest.raises(Refused, match="no visible key"):
        influence(model, random_ids(LENGTH), [range(PREFIX)], prefix_length=PREFIX)
    flags = torch.zeros(3, 2, PREFIX, dtype=torch.bool)
    flags[1, 1] = True
    with pytest.raises(Refused, match="no visible key"):
        influence(model, random_ids(LENGTH), [flags], prefix_length=PREFIX)


@pytest.mark.parametrize("prefix", [0, LENGTH, LENGTH + 1, -3])
def test_prefix_must_leave_a_future(model, prefix):
    with pytest.raises(UserError, match="prefix_length is"):
        influence(model, random_ids(LENGTH), [[0]], prefix_length=prefix)
    with pytest.raises(UserError, match="input_ids has shape"):
        influence(model, random_ids(LENGTH)[0], [[0]], prefix_length=3)


def test_kinds_of_collections(model):
    ids = random_ids(LENGTH)
    flags = torch.zeros(1, 1, PREFIX, dtype=torch.bool)
    flags[..., [3, 4]] = True
    sets = [[3, 4], (4, 3), {3, 4}, np.array([3, 4, 4]), torch.tensor([3, 4]), range(3, 5), flags, iter([3, 4])]
    kl = influence(model, ids, sets, prefix_length=PREFIX)
    assert kl.dtype == torch.float64
    assert (kl == kl[0]).all()
    assert influence(model, ids, [], prefix_length=PREFIX).shape == (0, LENGTH - PREFIX)


def test_threads_that_share_a_model_take_turns(model):
    from concurrent.futures import ThreadPoolExecutor

    ids, alone = random_ids(LENGTH), run(model).kl[:1]
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(influence, model, ids, [SETS[0]], prefix_length=PREFIX, chunk_size=3) for _ in range(8)]
        for job in jobs:
            assert ((job.result() - alone).abs() <= 1e-6 + 1e-4 * alone).all()
    assert model.config._attn_implementation == "sdpa"
    model(ids)


def test_two_threads_give_what_one_gives(model):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run(model).kl
        torch.set_num_threads(2)
        two = run(model).kl
    finally:
        torch.set_num_threads(before)
    assert ((one - two).abs() <= 1e-6 + 1e-4 * one).all()


def test_need_of_memory_counts_the_cache(model):
    need = memory.memory_need(model.config, prefix=1000, horizon=500, chunk_size=64, element_size=4)
    token = 2 * 3 * 2 * 16 * 4  # keys and values, 3 layers, 2 KV heads, head_dim 16, 4 bytes
    assert need.per_row > 1500 * token
    longer = memory.memory_need(model.config, prefix=1000, horizon=1500, chunk_size=64, element_size=4)
    mask = 3 * 64 * 1000 * 5
    assert longer.per_row - need.per_row == 1000 * token + mask
    assert need.total(2) - need.total(1) == need.per_row


def test_rows_follow_the_free_memory(model, monkeypatch):
    store, _ = prefill(model, random_ids(PREFIX))
    need = memory.memory_need(model.config, prefix=PREFIX, horizon=20, chunk_size=8, element_size=4)
    for rows in (1, 3, 9):
        monkeypatch.setattr(memory, "free_memory", lambda device, n=rows: int((need.total(n) + 10) / 0.8) + 1)
        assert memory.rows_that_fit(model, store, 20, 8) == rows
    monkeypatch.setattr(memory, "free_memory", lambda device: 0)
    assert memory.rows_that_fit(model, store, 20, 8) == 1
