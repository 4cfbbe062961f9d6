"""Fidelity: rows are what real compression keeps and loses, whatever the method, budget, batch or interruption."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_models import build, masked_logits, random_ids
from tiny_runs import by_name, read_rows, save_model, write_documents

from forward_influence import fidelity, measure, open_runs
from forward_influence.errors import UserError
from forward_influence.evicting import EvictingEngine, compare_kept
from forward_influence.kl import kl_divergence
from forward_influence.methods import Method, make_methods
from infokv import Budget, compress
from infokv.calls import cache_argument
from infokv.errors import Refused
from infokv.forward import Head
from infokv.prefill import record
from infokv.scorer import SCORERS

PREFIX, HORIZON = 90, 30

NAMES = [name for name in SCORERS.names() if getattr(SCORERS.get(name)(), "heads", "kv") != "query"]

#: Windows that leave something to choose in a short prefix.
SMALL = {name: f"{name}:window=8" for name in ("infokv", "snapkv", "pyramidkv", "fastkv", "rpc", "rkv")}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2", "mistral"])
def test_rows_equal_a_compressed_continuation(arch, name):
    model, ids = build(arch), random_ids(PREFIX + HORIZON)
    methods = make_methods(SMALL.get(name, name), keep=["0.4", "0.2"], tokens=[30])
    needs = [need for one in methods for need in one.needs]
    store, recorder = record(model, ids[:, :PREFIX], needs, chunk_size=512)
    kept = [one.kept(store, recorder) for one in methods]
    engine = EvictingEngine(model, store, ids[:, PREFIX:], kept, chunk_size=7)
    logits = torch.cat([Head(model)(states) for _, states in engine.states()], dim=1)
    for method, sets, got in zip(methods, kept, logits[1:]):
        with compress(model, method.scorer, method.budget) as handle, torch.no_grad():
            out = model(ids[:, :PREFIX])
            assert all(torch.equal(one[0], other.expand_as(one[0])) for one, other in zip(handle.kept, sets))
            cache = cache_argument(model)
            expected = model(ids[:, PREFIX:], **{cache: out[cache]}).logits[0]
        assert (got - expected).abs().max() < 2e-5 * expected.abs().max().clamp_min(1)
    whole = masked_logits(model, ids, [])[PREFIX:]
    assert (logits[0] - whole).abs().max() < 2e-5 * whole.abs().max().clamp_min(1)


def test_the_numbers_are_those_of_the_logits_whatever_the_batch():
    model, ids = build("llama"), random_ids(PREFIX + HORIZON)
    methods = make_methods(["snapkv:window=8", "tova", "pyramidkv:window=8"], keep=["0.5", "0.2"])
    store, recorder = record(model, ids[:, :PREFIX], [need for one in methods for need in one.needs])
    kept = [one.kept(store, recorder) for one in methods]
    kept.append(kept[0])  # equal ones are run once, and stand twice
    together = compare_kept(model, store, ids[:, PREFIX:], kept)
    one_by_one = compare_kept(model, store, ids[:, PREFIX:], kept, batch=1, chunk_size=11)
    assert torch.equal(together.kl[0], together.kl[-1])
    torch.testing.assert_close(together.kl, one_by_one.kl, rtol=1e-4, atol=1e-6)
    engine = EvictingEngine(model, store, ids[:, PREFIX:], kept, chunk_size=256)
    logits = torch.cat([Head(model)(states) for _, states in engine.states()], dim=1)
    for row, numbers in zip(logits[1:], together.kl):
        torch.testing.assert_close(kl_divergence(logits[0], row), numbers, rtol=1e-6, atol=1e-12)


def test_equal_sets_are_run_once(monkeypatch):
    model, ids = build("llama"), random_ids(PREFIX + HORIZON)
    methods = make_methods(["snapkv:window=8", "snapkv:window=8,norm=mean"], keep=["0.5"])
    store, recorder = record(model, ids[:, :PREFIX], methods[0].needs)
    rows = []
    plain = EvictingEngine.states
    monkeypatch.setattr(EvictingEngine, "states", lambda self: rows.append(len(self._kept)) or plain(self))
    compare_kept(model, store, ids[:, PREFIX:], [one.kept(store, recorder) for one in methods])
    assert rows == [1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder / "model")
    write_documents(folder / "docs.jsonl", [120, 130, 70])
    return folder


def options(tiny, tmp_path):
    return dict(
        model=tiny / "model", data=str(tiny / "docs.jsonl"), prefix=60, horizon=40, chunk=16, offline=True, quiet=True,
        out=tmp_path / "run",
    )  # fmt: skip


def test_a_study_of_methods(tiny, tmp_path):
    given = options(tiny, tmp_path)
    outcome = fidelity(method=["snapkv:window=8", "random"], keep=["0.5"], **given)
    assert (outcome.ok, outcome.skipped) == (2, 1)
    first = read_rows(tmp_path / "run")
    rows = by_name([row for row in first if row["status"] == "ok"])
    assert {name for _, name in rows} == {"snapkv:window=8@0.5", "random@0.5"}
    for row in rows.values():
        assert row["mode"] == "keep" and row["removed"] is None
        assert row["kept_counts"] == [30, 30, 30] and row["kept_fraction"] == 0.5
        assert max(row["kl"]) > 1e-6
    # More budgets extend the run; what is there is not measured again.
    fidelity(method=["snapkv:window=8", "random"], keep=["0.5", "0.25"], tokens=20, **given)
    more = read_rows(tmp_path / "run")
    assert more[: len(first)] == first
    table = open_runs(tmp_path / "run").frame()
    assert set(table["mode"]) == {"keep"}
    assert "random@20 tokens" in set(table["selector"])
    assert json.loads((tmp_path / "run" / "run.json").read_text())["spec"]["mode"] == "keep"


def test_selectors_and_methods_are_two_studies(tiny, tmp_path):
    given = options(tiny, tmp_path)
    with pytest.raises(UserError, match="two studies"):
        measure(selector=["random", *make_methods("snapkv:window=8", keep=["0.5"])], **given)
    fidelity(method="random", keep=0.5, **given)
    with pytest.raises(UserError, match="another run"):
        measure(selector="random", sinks=2, recent=8, **given)


@pytest.mark.parametrize(("given", "sentence"), [
    (dict(method="nothing"), "nothing"),
    (dict(method="snapkv", keep=1.5), "keep is 1.5"),
    (dict(method="snapkv", tokens=0), "tokens is 0"),
    (dict(method=()), "No method"),
    (dict(method="snapkv-official"), "KV head"),
    (dict(method="fastkv:propagate=1"), "without propagate"),
    (dict(method="snapkv", layers="steep"), "layers is 'steep'"),
])  # fmt: skip
def test_bad_requests_end_in_a_sentence(tiny, tmp_path, given, sentence):
    with pytest.raises((UserError, Refused), match=sentence):
        fidelity(**given, **options(tiny, tmp_path))
    assert not (tmp_path / "run").exists()


def test_names_tell_budgets_apart():
    names = [one.canonical() for one in make_methods("knorm", keep=["0.40", 1], tokens=[1])]
    assert names == ["knorm@0.4", "knorm@1", "knorm@1 tokens"]
    assert Method(SCORERS.get("knorm")(), Budget(keep="0.40")).canonical() == "knorm@0.4"
    assert make_methods("knorm", keep=["0.4"], layers="pyramid")[0].canonical() == "knorm@0.4,pyramid"
