"""Tuning: the search never sees the held-out documents, goes on after a kill, and its file names the scorer."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tiny_runs import read_rows, save_model, write_documents

from forward_influence import objectives, open_runs, tuning
from forward_influence.errors import UserError
from forward_influence.models import load_model
from forward_influence.search import Space, at_random, guided, make_space
from forward_influence.tuning import tune
from infokv import Budget, InfoKV, SnapKV, compress, get_scorer
from infokv.errors import Refused
from infokv.scorer import SCORERS

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


def means_of(rows: list[dict], documents: int, start: int = 0, stop: int | None = None) -> dict[str, float]:
    """Mean KL by selector, of those with a row for each document; by hand."""
    found: dict[str, list[float]] = {}
    for row in rows:
        assert row["status"] == "ok"
        found.setdefault(row["selector"], []).append(sum(row["kl"][start:stop]) / len(row["kl"][start:stop]))
    return {name: sum(values) / documents for name, values in found.items() if len(values) == documents}


def test_the_search_takes_the_best_of_what_it_measured(result):
    tuned, out = result
    rows = read_rows(out / "search")
    assert len({row["document"] for row in rows}) == 4
    whole = means_of(rows, 4)
    assert tuned.tried == 6 and 2 <= len(tuned.train_kl) < 6
    best = min(tuned.train_kl, key=tuned.train_kl.get)
    assert get_scorer(best.rpartition("@")[0]) == SnapKV(**tuned.parameters)
    for name, value in tuned.train_kl.items():
        assert value == pytest.approx(whole[name], rel=1e-6)
    judged = means_of(read_rows(out / "held-out"), 3)
    for who, value in tuned.held_out_kl.items():
        assert value == pytest.approx(judged[tuned.judged[who]], rel=1e-6)


def test_influence_is_made_large_in_the_band(tiny, tmp_path):
    tuned = tune(out=tmp_path, **tiny | {"objective": "influence", "fraction": "0.1", "band": "20-40", "sinks": 2,
                                         "recent": 8})  # fmt: skip
    assert {row["mode"] for row in read_rows(tmp_path / "search")} == {"remove"}
    whole = means_of(read_rows(tmp_path / "search"), 4, 20, 40)
    best = max(tuned.train_kl, key=tuned.train_kl.get)
    assert get_scorer(best) == SnapKV(**tuned.parameters) and tuned.keep is None
    assert tuned.train_kl[best] == pytest.approx(whole[best], rel=1e-6)


def test_held_out_documents_never_reach_the_search(result):
    tuned, out = result
    searched = {row["document"] for row in read_rows(out / "search")}
    judged = {row["document"] for row in read_rows(out / "held-out")}
    assert len(judged) == 3 and not searched & judged
    assert set(tuned.held_out_kl) == {"tuned", "default", "attention", "random"}
    told = json.loads((out / "tuned.json").read_text())["provenance"]
    assert (set(told["train"]), set(told["held_out"])) == (searched, judged)
    assert set(open_runs(out / "held-out").frame()["mode"]) == {"keep"}


def test_other_held_out_texts_change_nothing_in_the_search(result, tiny, tmp_path):
    lines = Path(tiny["data"]).read_text(encoding="utf-8").splitlines()
    judged = {row["document"] for row in read_rows(result[1] / "held-out")}
    entries = [json.loads(line) for line in lines]
    for entry in entries:
        if entry["id"] in judged:
            entry["text"] = " ".join(reversed(entry["text"].split()))
    other = tmp_path / "docs.jsonl"
    other.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    again = tune(out=tmp_path / "out", **tiny | {"data": str(other)})
    assert again.parameters == result[0].parameters
    assert again.train_kl == pytest.approx(result[0].train_kl, rel=1e-6)
    assert again.held_out_kl != result[0].held_out_kl


def test_the_same_again_after_an_interruption(result, tiny, tmp_path, monkeypatch):
    plain, calls = objectives.mean_kl, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(*args, **kwargs)

    monkeypatch.setattr(objectives, "mean_kl", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(out=tmp_path, **tiny)
    monkeypatch.undo()
    begun = len(read_rows(tmp_path / "search"))
    again = tune(out=tmp_path, **tiny)
    assert begun and len(read_rows(tmp_path / "search")) > begun
    assert (again.parameters, again.train_kl, again.held_out_kl) == (
        result[0].parameters, result[0].train_kl, result[0].held_out_kl,
    )  # fmt: skip
    rows = len(read_rows(tmp_path / "search"))
    tune(out=tmp_path, **tiny)  # all is there: nothing is measured again
    assert len(read_rows(tmp_path / "search")) == rows


def test_its_file_names_the_scorer(result, tmp_path):
    tuned, out = result
    assert get_scorer(f"snapkv:{tuned.path}") == SnapKV(**tuned.parameters)
    content = json.loads((out / "tuned.json").read_text())
    for change, sentence in (
        ({"method": "infokv"}, "infokv"),
        ({"parameters": {"windows": 8}}, "windows"),
        ({"parameters": {"window": 0}}, "window is 0"),
        ({"parameters": 5}, "no object"),
        ({"alpha": 0.5}, "unknown key 'alpha'"),
        ({"model": {"layers": 3}}, "must have architecture"),
        ({"model": content["model"] | {"layers": "3"}}, "must have architecture"),
    ):
        path = tmp_path / "edited.json"
        path.write_text(json.dumps(content | change))
        with pytest.raises(Refused, match=sentence):
            get_scorer(f"snapkv:{path}")


@pytest.mark.parametrize(("change", "sentence"), [
    ({"layers": 5}, "layers 5 there, 3 here"),
    ({"architecture": "gemma2"}, "'gemma2' there"),
    ({"weights": "0" * 16}, "other weights in the same sizes"),
])  # fmt: skip
def test_a_file_of_another_model_is_refused_or_accepted_with_a_notice(result, tiny, tmp_path, change, sentence):
    content = json.loads((result[1] / "tuned.json").read_text())
    content["model"] |= change
    path = tmp_path / "other.json"
    path.write_text(json.dumps(content))
    study = {name: tiny[name] for name in ("model", "data", "prefix", "horizon", "offline", "quiet")} | {"limit": 1}
    model = tiny["model"].model
    from forward_influence import fidelity, measure

    for ask in (
        lambda **more: measure(selector=f"snapkv:{path}", out=tmp_path / "removed", recent=8, **study, **more),
        lambda **more: fidelity(method=f"snapkv:{path}", keep="0.5", out=tmp_path / "kept", **study, **more),
    ):
        with pytest.raises(Refused, match=sentence):
            ask()
        outcome = ask(accept_model=True)
        run = json.loads((outcome.path / "run.json").read_text())
        notices = [*run["provenance"]["notices"], *(one for again in run["resumed"] for one in again["notices"])]
        assert any(sentence in one and "accepted" in one for one in notices)
    with pytest.raises(Refused, match=sentence), compress(model, get_scorer(f"snapkv:{path}"), Budget(keep=0.5)):
        pass
    with compress(model, SnapKV.load(str(path), accept_model=True), Budget(keep=0.5)):
        pass
    with compress(model, SnapKV.load(str(result[1] / "tuned.json")), Budget(keep=0.5)):
        pass  # its own model


def planted(setting: InfoKV) -> float:
    """A loss whose smallest value is at alpha 0.3, align "next"."""
    return abs(setting.alpha - 0.3) + (setting.align == "self") + 0.01 * abs(setting.window - 32)


def test_the_search_beats_as_many_random_settings_on_a_smooth_loss():
    space, asked = make_space("infokv", None), []

    def loss(settings, documents):
        asked.append((len(settings), documents))
        return {one: planted(one) for one in settings}

    wins = 0
    for seed in range(10):
        found, chance = (search(space, loss, 24, 16, seed) for search in (guided, at_random))
        assert found.tried == chance.tried == 24
        assert planted(found.best) == min(found.losses.values())
        wins += planted(found.best) <= planted(chance.best)
    assert wins >= 7
    assert {documents for _, documents in asked} == {4, 8, 16}
    assert max(count for count, documents in asked if documents == 8) == 12
    assert max(count for count, documents in asked if documents == 16) == 6


def test_a_setting_that_failed_is_never_chosen():
    space = make_space("snapkv", {"window": (4, 8, 16)})
    found = at_random(
        space, lambda some, _: {one: math.inf if one == SnapKV() else one.window for one in some}, 4, 8, 0
    )
    assert found.best == SnapKV(window=4)


@pytest.mark.parametrize("method", ["infokv", "mixture", "snapkv"])
def test_settings_begin_with_the_default_and_are_fixed_by_the_seed(method):
    space = make_space(method, None)

    def first(seed: int) -> list:
        return [one for one, _ in zip(space.random(seed), range(10))]

    assert first(3) == first(3) and first(3)[1:] != first(4)[1:]
    assert first(3)[0] == SCORERS.get(method)() and len(set(first(3))) == 10
    around = space.neighbours(first(3)[5], 0)
    for one in around:
        assert sum(getattr(one, name) != getattr(first(3)[5], name) for name in space.values) == 1
    assert len(around) == sum(len(values) - 1 for values in space.values.values())
    assert isinstance(space, Space)


@pytest.mark.parametrize(("change", "sentence"), [
    (dict(held_out=30), "30 held-out"),
    (dict(trials=1), "trials is 1"),
    (dict(vary={}), "Nothing is varied"),
    (dict(vary={"windows": [3, 4]}), "windows"),
    (dict(vary={"window": [3, 0]}), "window is 0"),
    (dict(keep="2"), "keep is 2"),
    (dict(band="near-far"), "band is 'near-far'"),
    (dict(band="10-90"), "band is 10-90"),
    (dict(objective="accuracy"), "objective is 'accuracy'"),
])  # fmt: skip
def test_bad_requests_end_in_a_sentence(tiny, tmp_path, change, sentence):
    with pytest.raises((UserError, Refused), match=sentence):
        tune(out=tmp_path / "out", **{**tiny, **change})


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(tiny, tmp_path, capsys):
    assert tune(out=tmp_path / "out", dry_run=True, **tiny) is None
    told = capsys.readouterr().out
    assert "at most" in told and "window: 4, 8, 16" in told and not (tmp_path / "out").exists()
    assert tuning.TUNED == "tuned.json"
