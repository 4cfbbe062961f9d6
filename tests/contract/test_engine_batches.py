"""Batches, merged sets, the companion row, memory that runs out, and requests that cannot be met."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import build, random_ids

from forward_influence import engine, memory
from forward_influence.engine import MaskingEngine, compare_rows, influence, recomputed_states
from forward_influence.errors import UserError
from forward_influence.kl import kl_divergence
from forward_influence.models import LoadedModel
from forward_influence.removal import removal_flags
from forward_influence.signals import token_signals
from infokv import forward
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

    def counted(model, continuation, engine, *rest):
        seen.append(engine.rows - 1)
        return plain(model, continuation, engine, *rest)

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


def test_the_same_set_in_other_shapes_is_computed_once(model, passes):
    """Flags that are alike in all layers or heads are those of one; whether a set varies is what counts."""
    one = removal_flags([3, 4], PREFIX)
    by_head = one.repeat(1, 2, 1)
    by_head[0, 1, 9] = True
    mixed = one.repeat(3, 1, 1)
    mixed[2, 0, 9] = True
    nothing = torch.zeros(3, 2, PREFIX, dtype=torch.bool)
    sets = [one, one.repeat(3, 2, 1), one.repeat(1, 2, 1), one.repeat(3, 1, 1), [4, 3]]
    sets += [by_head, by_head.repeat(3, 1, 1), mixed, mixed.repeat(1, 2, 1), nothing, []]
    kl = influence(model, random_ids(LENGTH), sets, prefix_length=PREFIX, batch=10)
    assert passes == [5]  # [3, 4], by_head, mixed, and both empty ones
    assert all(torch.equal(kl[0], kl[place]) for place in (1, 2, 3, 4))
    assert torch.equal(kl[5], kl[6]) and torch.equal(kl[7], kl[8])
    assert not torch.equal(kl[0], kl[5]) and not torch.equal(kl[5], kl[7])
    assert (kl[9:] <= 1e-12).all()


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

    def short_of_memory(model, continuation, engine, *rest):
        sizes.append(engine.rows - 1)
        if engine.rows > 3:
            raise error
        return plain(model, continuation, engine, *rest)

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

    def short_of_memory(model, continuation, engine, *rest):
        calls.append(engine.rows - 1)
        if len(calls) == 2:
            raise MemoryError
        return plain(model, continuation, engine, *rest)

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


def test_slices_of_logits_leave_the_device_once_a_chunk(model, monkeypatch):
    """On a GPU each copy to the CPU waits for all work; slices, however small, are joined before."""
    plain, copies = torch.Tensor.cpu, []
    whole = run(model, chunk_size=10, batch=5)
    monkeypatch.setattr(forward, "_LOGITS", 1)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda one: copies.append(tuple(one.shape)) or plain(one))
    sliced = run(model, chunk_size=10, batch=5)
    assert [shape for shape in copies if len(shape) == 2] == [(5, 10)] * 3 * 2  # three tensors, two chunks
    torch.testing.assert_close(sliced.kl, whole.kl, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("removed", "sentence"),
    [
        ([[3, 30]], r"removed\[0\] holds position 30, which is outside the prefix; positions go from 0 to 29"),
        ([[1], [-1]], r"removed\[1\] holds position -1"),
        ([["a"]], "positions are whole numbers"),
        ([[False, True]], "a mask is a bool tensor"),
        ([3, 4], r"removed\[0\] is 3; each set is a collection"),
        ([[2.0]], "positions are whole numbers"),
        ([[True]], "positions are whole numbers"),
        ([torch.tensor([2.0])], "positions are whole numbers"),
        ([["3"], "34"], "positions are whole numbers"),
        (None, r"removed is None; it must be a list of sets of positions, such as \[\[3, 4\], \[10\]\]"),
        (3, "removed is 3; it must be a list of sets"),
        (torch.tensor(3), r"removed is tensor\(3\); it must be a list of sets"),
        (np.array(3), r"removed is array\(3\); it must be a list of sets"),
        ([None], r"removed\[0\] is None; each set is a collection"),
        ([torch.tensor(3)], r"removed\[0\] is tensor\(3\); each set is a collection"),
        ([np.array(3)], r"removed\[0\] is tensor\(3\); each set is a collection"),
        (torch.tensor([3, 4]), r"removed\[0\] is tensor\(3\); each set .* such as \[\[3, 4\]\]"),
        ([torch.tensor([[3, 4]])], "each set is a collection"),
        ([np.zeros(30, dtype=bool)], r"a bool tensor \[30\]; it must be \[layers or 1, KV heads or 1, 30\]"),
        ([torch.zeros(1, 1, 7, dtype=torch.bool)], r"\[layers or 1, KV heads or 1, 30\]"),
        ([torch.zeros(1, 30, dtype=torch.bool)], r"\[layers or 1, KV heads or 1, 30\]"),
    ],
)
def test_positions_that_cannot_be(model, removed, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        influence(model, random_ids(LENGTH), removed, prefix_length=PREFIX)
    assert "\n" not in str(caught.value)


MASK = [0] * 3 + [1, 1] + [0] * (PREFIX - 5)


@pytest.mark.parametrize("make", [list, tuple, torch.tensor, np.array, lambda mask: torch.tensor(mask)[None, None],
                                  lambda mask: torch.tensor(mask).short(), lambda mask: np.zeros_like(mask),
                                  lambda mask: torch.ones(PREFIX, dtype=torch.int32)])  # fmt: skip
def test_a_mask_of_numbers_is_not_read_as_positions(model, make):
    """It would say 'remove the positions 0 and 1', and nobody would see it."""
    with pytest.raises(UserError, match=r"removed\[1\] holds zeros and ones.*call .bool\(\) on it"):
        influence(model, random_ids(LENGTH), [[3], make(MASK)], prefix_length=PREFIX)


@pytest.mark.parametrize("numbers", [MASK, [3, 4], [0, 1], []])
@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_bytes_are_positions_or_a_mask_and_the_caller_says_which(model, numbers, kind):
    given = kind(numbers, dtype=torch.uint8 if kind is torch.tensor else np.uint8)
    with pytest.raises(UserError, match=r"removed\[0\] is a uint8 tensor.*call .bool\(\) on a mask .*\.long\(\)"):
        influence(model, random_ids(LENGTH), [given], prefix_length=PREFIX)


def test_texts_beyond_the_context_and_numbers_that_cannot_be(model):
    long = random_ids(300)
    with pytest.raises(UserError, match="The text has 300 tokens, and LlamaForCausalLM has a context of 256"):
        influence(model, long, [[0]], prefix_length=PREFIX)
    store, _ = prefill(model, long[:, :PREFIX], total_length=300)
    with pytest.raises(UserError, match="The text has 300 tokens, and LlamaForCausalLM has a context of 256"):
        MaskingEngine(model, store, long[:, PREFIX:], torch.zeros(1, 1, 1, PREFIX, dtype=torch.bool))
    for bad in (0, -1, 2.5, 2.0, "2", True, np.float64(2), torch.tensor([2, 3])):
        for name in ("batch", "chunk_size"):
            for removed in ([[0]], []):
                with pytest.raises(UserError, match=f"^{name} is .*; it must be a whole number of at least 1"):
                    influence(model, random_ids(LENGTH), removed, prefix_length=PREFIX, **{name: bad})
    with pytest.raises(UserError, match="chunk_size is None"):
        influence(model, random_ids(LENGTH), [[0]], prefix_length=PREFIX, chunk_size=None)


def test_integers_of_other_libraries_are_whole_numbers(model):
    ids = random_ids(LENGTH)
    expected = influence(model, ids, [[3, 4], [9]], prefix_length=PREFIX, chunk_size=7, batch=1)
    for kind in (np.int64, np.uint8, torch.tensor):
        sizes = {"prefix_length": kind(PREFIX), "chunk_size": kind(7), "batch": kind(1)}
        assert torch.equal(influence(model, ids, [[kind(3), kind(4)], [kind(9)]], **sizes), expected)


@pytest.mark.parametrize("shape", [(5, 1, PREFIX), (1, 4, PREFIX), (0, 1, PREFIX)])
def test_wrong_number_of_layers_or_heads(model, shape):
    flags = torch.zeros(shape, dtype=torch.bool)
    flags[..., 3] = True  # alike in all layers and heads: as a set of one layer it would fit
    with pytest.raises(UserError, match=r"removed\[1\] .* it must be \[3 layers or 1, 2 KV heads or 1, 30\]"):
        influence(model, random_ids(LENGTH), [[3], flags], prefix_length=PREFIX)


def test_removing_the_whole_prefix_is_an_error_not_a_number(model):
    for short in (1, 2):  # not taken for a mask either
        with pytest.raises(Refused, match="no visible key"):
            influence(model, random_ids(LENGTH), [range(short)], prefix_length=short)
    with pytest.raises(Refused, match="no visible key"):
        influence(model, random_ids(LENGTH), [range(PREFIX)], prefix_length=PREFIX)
    flags = torch.zeros(3, 2, PREFIX, dtype=torch.bool)
    flags[1, 1] = True
    with pytest.raises(Refused, match="no visible key"):
        influence(model, random_ids(LENGTH), [flags], prefix_length=PREFIX)


@pytest.mark.parametrize("prefix", [0, LENGTH, LENGTH + 1, -3, 2.0, "3", True, None])
def test_prefix_must_leave_a_future(model, prefix):
    with pytest.raises(UserError, match="prefix_length is"):
        influence(model, random_ids(LENGTH), [[0]], prefix_length=prefix)
    with pytest.raises(UserError, match="input_ids has shape"):
        influence(model, random_ids(LENGTH)[0], [[0]], prefix_length=3)


@pytest.mark.parametrize("length", [LENGTH, PREFIX + 1])
def test_kinds_of_token_ids(model, length):
    ids = random_ids(length)
    expected = influence(model, ids, [[3, 4]], prefix_length=PREFIX)
    array = ids.numpy()
    kinds = [ids.short(), ids.int(), ids.byte(), array, array.astype(np.uint16), array.astype(">i4")]
    kinds += [array[:, ::-1][:, ::-1], array.tolist(), (tuple(array[0].tolist()),), [ids[0]], list(array)]
    store, _ = prefill(model, ids[:, :PREFIX], total_length=length)
    hidden = removal_flags([3, 4], PREFIX)[None]
    for given in kinds:
        assert torch.equal(influence(model, given, [[3, 4]], prefix_length=PREFIX), expected)
        engine = MaskingEngine(model, store, [given[0][PREFIX:]], hidden)
        logits = torch.cat([part for _, part in engine.logits()], dim=1)
        torch.testing.assert_close(kl_divergence(logits[0], logits[1:]), expected)
        assert torch.equal(token_signals(model, given).input_ids, ids[0])


def bad_ids():
    ids = random_ids(LENGTH)
    low, high = ids.clone(), ids.clone()
    low[0, 31], high[0, 41] = -1, 89
    return [
        (low, r"input_ids holds -1 at position 31; LlamaForCausalLM has token ids from 0 to 88"),
        (high, r"input_ids holds 89 at position 41; .* use its own tokenizer"),
        (high.tolist(), r"input_ids holds 89 at position 41"),
        (ids.float(), "input_ids is torch.float32; token ids are whole numbers"),
        (ids > 3, "input_ids is torch.bool; token ids are whole numbers"),
        (ids.numpy().astype(float), "token ids are whole numbers"),
        ((ids > 3).tolist(), "token ids are whole numbers"),
        ([["a", "b"]], r"input_ids is \[\['a', 'b'\]\]; it must be a tensor, an array or a list"),
        ([[1, 2], [3]], r"input_ids is \[\[1, 2\], \[3\]\]; it must be"),
        ({"input_ids": ids}, "it must be a tensor, an array or a list"),
        ("text", "input_ids is 'text'; it must be"),
        (None, "input_ids is None; it must be"),
        ([], r"input_ids has shape \[0\]; it must be \[1, tokens\]"),
        ([[]], r"input_ids has shape \[1, 0\]"),
        (np.empty((1, 0), dtype=object), r"input_ids has shape \[1, 0\]"),
        (torch.tensor(3), r"input_ids has shape \[\]"),
        (ids.expand(2, -1), r"input_ids has shape \[2, 50\]"),
    ]


@pytest.mark.parametrize(("ids", "sentence"), bad_ids())
def test_ids_that_cannot_be(model, ids, sentence):
    store, _ = prefill(model, random_ids(PREFIX))
    calls = [
        lambda: influence(model, ids, [[0]], prefix_length=PREFIX),
        lambda: token_signals(model, ids),
        lambda: MaskingEngine(model, store, ids, torch.zeros(1, 1, 1, PREFIX, dtype=torch.bool)),
    ]
    for call in calls:
        with pytest.raises(UserError, match=sentence.replace("input_ids", "(input_ids|continuation)")) as caught:
            call()
        assert "\n" not in str(caught.value)


def loaded(model):
    return LoadedModel(model, None, None, "float32", "cpu", "sdpa", None)


def test_what_load_model_returns_is_a_model(model):
    ids = random_ids(LENGTH)
    store, _ = prefill(model, ids[:, :PREFIX], total_length=LENGTH)
    hidden = removal_flags([3, 4], PREFIX)[None]
    calls = [
        lambda one: influence(one, ids, [[3, 4]], prefix_length=PREFIX),
        lambda one: token_signals(one, ids).entropy,
        lambda one: torch.cat([part for _, part in MaskingEngine(one, store, ids[:, PREFIX:], hidden).logits()], dim=1),
    ]
    for call in calls:
        assert torch.equal(call(loaded(model)), call(model))
        for other in (None, "gpt2", loaded, torch.nn.Linear(2, 2), model.config):
            with pytest.raises(UserError, match="model is .*; it must be a causal language model of transformers") as e:
                call(other)
            assert "\n" not in str(e.value)
        with pytest.raises(UserError, match="LlamaModel has no head that predicts tokens"):
            call(model.base_model)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("prefix", torch.zeros(1, PREFIX)),
        ("hidden", [[3, 4]]),
        ("hidden", torch.zeros(1, 1, 1, PREFIX)),
        ("hidden", torch.zeros(1, 1, PREFIX, dtype=torch.bool)),
        ("chunk_size", 2.5),
    ],
)
def test_an_engine_of_other_things(model, name, bad):
    store, _ = prefill(model, random_ids(PREFIX))
    given = {"prefix": store, "continuation": random_ids(9), "chunk_size": 3}
    given["hidden"] = torch.zeros(1, 1, 1, PREFIX, dtype=torch.bool)
    assert MaskingEngine(model, **given).rows == 2
    with pytest.raises(UserError, match=f"^{name} is .*; it must be"):
        MaskingEngine(model, **{**given, name: bad})


def test_a_model_that_returns_tuples(model):
    ids = random_ids(LENGTH)
    expected = influence(model, ids, [[3, 4]], prefix_length=PREFIX)
    other = build("llama")
    other.config.return_dict = False
    assert torch.equal(influence(other, ids, [[3, 4]], prefix_length=PREFIX), expected)
    assert other.config.return_dict is False


@pytest.mark.parametrize(("body", "head"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_head_of_another_dtype(body, head):
    """People keep the head in float32, or load its weights apart; the states are cast for it."""
    model = build("llama").to(body)
    model.lm_head = torch.nn.Linear(48, 89, bias=False)
    model.lm_head.weight.data.normal_(std=0.5, generator=torch.Generator().manual_seed(3))
    model.lm_head.to(head)
    ids = random_ids(LENGTH)
    kl = influence(model, ids, [[3, 4], []], prefix_length=PREFIX)
    assert (kl[0] > 0).any()
    assert (kl[1] <= 1e-12).all()
    store, _ = prefill(model, ids[:, :PREFIX], total_length=LENGTH)
    engine = MaskingEngine(model, store, ids[:, PREFIX:], removal_flags([3, 4], PREFIX)[None])
    states = torch.cat([part for _, part in engine.states()], dim=1)
    logits = torch.cat([part for _, part in engine.logits()], dim=1)
    torch.testing.assert_close(logits, model.lm_head(states.to(head)).detach())
    assert token_signals(model, ids).self_information.isfinite().all()


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
