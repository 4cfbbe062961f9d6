"""Tuning: the search never sees the held-out documents, goes on after a kill, and its file names the scorer."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_runs import read_rows, save_model, write_documents

from forward_influence import open_runs, tuning
from forward_influence.errors import UserError
from forward_influence.models import load_model
from forward_influence.tuning import settings, tune
from infokv import SnapKV, get_scorer
from infokv.errors import Refused

VARY = {"window": (4, 8, 16), "kernel": (1, 3, 5)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder / "model")
    write_documents(folder / "docs.jsonl", [100] * 7)
    yield {
        "model": load_model(folder / "model", device="cpu", offline=True, notify=lambda sentence: None),
        "data": str(folder / "docs.jsonl"), "prefix": 60, "horizon": 40, "chunk": 20, "offline": True, "quiet": True,
        "method": "snapkv", "vary": VARY, "keep": "0.5", "trials": 6, "train": 4, "held_out": 3,
    }  # fmt: skip
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def result(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("tuned")
    return tune(out=out, **tiny), out


def test_the_search_takes_the_best_of_what_it_measured(result):
    tuned, out = result
    rows = [row for row in read_rows(out / "search") if row["status"] == "ok"]
    documents = {row["document"] for row in rows}
    assert len(documents) == 4
    means = {}
    for row in rows:
        means.setdefault(row["selector"], []).append(sum(row["kl"]) / len(row["kl"]))
    whole = {name: sum(values) / 4 for name, values in means.items() if len(values) == 4}
    assert tuned.settings == 6 and len(means) == 6 and 2 <= len(whole) < 6
    best = min(whole, key=whole.get)
    assert get_scorer(best.rpartition("@")[0]) == SnapKV(**tuned.parameters)
    for name, value in tuned.search.items():
        assert value == pytest.approx(whole[name], rel=1e-6)


def test_held_out_documents_never_reach_the_search(result):
    tuned, out = result
    searched = {row["document"] for row in read_rows(out / "search")}
    judged = {row["document"] for row in read_rows(out / "held-out")}
    assert len(judged) == 3 and not searched & judged
    assert set(tuned.held_out) == {"tuned", "default", "attention", "chance"}
    frame = open_runs(out / "held-out").frame()
    assert set(frame["mode"]) == {"keep"}


def test_the_same_again_after_an_interruption(result, tiny, tmp_path, monkeypatch):
    plain, calls = tuning.measured, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plain(*args, **kwargs)

    monkeypatch.setattr(tuning, "measured", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(out=tmp_path, **tiny)
    monkeypatch.undo()
    begun = len(read_rows(tmp_path / "search"))
    again = tune(out=tmp_path, **tiny)
    assert begun and len(read_rows(tmp_path / "search")) > begun
    assert (again.parameters, again.search, again.held_out) == (
        result[0].parameters, result[0].search, result[0].held_out,
    )  # fmt: skip


def test_its_file_names_the_scorer(result, tmp_path):
    tuned, out = result
    assert get_scorer(f"snapkv:{tuned.path}") == SnapKV(**tuned.parameters)
    content = json.loads((out / "tuned.json").read_text())
    for change, sentence in (
        ({"method": "infokv"}, "infokv"),
        ({"parameters": {"windows": 8}}, "windows"),
        ({"parameters": {"window": 0}}, "window is 0"),
        ({"parameters": 5}, "no object"),
    ):
        path = tmp_path / "edited.json"
        path.write_text(json.dumps(content | change))
        with pytest.raises(Refused, match=sentence):
            get_scorer(f"snapkv:{path}")


def test_settings_begin_with_the_default_and_are_fixed_by_the_seed():
    some = settings("infokv", None, "0.4", 10, seed=3)
    assert [one.canonical() for one in some] == [one.canonical() for one in settings("infokv", None, "0.4", 10, seed=3)]
    assert some[0].canonical() == "infokv@0.4" and len({one.canonical() for one in some}) == 10
    assert some[1:] != settings("infokv", None, "0.4", 10, seed=4)[1:]


@pytest.mark.parametrize(("change", "sentence"), [
    (dict(held_out=30), "30 held-out"),
    (dict(trials=1), "trials is 1"),
    (dict(vary={}), "Nothing is varied"),
    (dict(vary={"windows": [3, 4]}), "windows"),
    (dict(keep="2"), "keep is 2"),
])  # fmt: skip
def test_bad_requests_end_in_a_sentence(tiny, tmp_path, change, sentence):
    with pytest.raises((UserError, Refused), match=sentence):
        tune(out=tmp_path / "out", **{**tiny, **change})
