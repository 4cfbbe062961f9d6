"""Tuning: the search never sees the held-out documents, goes on after a kill, and its file names the scorer."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_runs import read_rows, save_model, write_documents

from forward_influence import objectives, open_runs
from forward_influence.errors import UserError
from forward_influence.models import load_model
from forward_influence.search import make_space, search
from forward_influence.tuning import tune
from infokv import Budget, InfoKV, SnapKV, compress, get_scorer
from infokv.errors import Refused
from infokv.scorer import SCORERS, Scorer

VARY = {"window": (4, 8, 16), "kernel": (1, 3, 5)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder / "model")
    write_documents(folder / "docs.jsonl", [100] * 7)
    return {
        "model": load_model(folder / "model", device="cpu", offline=True, notify=lambda sentence: None),
        "data": str(folder / "docs.jsonl"), "prefix": 60, "horizon": 40, "chunk": 20, "offline": True, "quiet": True,
        "method": "snapkv", "vary": VARY, "keep": "0.5", "trials": 6, "train": 4, "held_out": 3,
    }  # fmt: skip


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
    assert tuned.tried == 6 and 2 <= len(tuned.train_kl) < 6 and "snapkv@0.5" in tuned.train_kl
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
    assert set(tuned.held_out_kl) == {"tuned", "default", "attention", "random", "paper"}
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
    plain, calls = objectives.kl_by_document, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(*args, **kwargs)

    monkeypatch.setattr(objectives, "kl_by_document", interrupted)
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
    """A loss that each parameter makes larger or smaller by itself; the best has alpha 0.3 and align "next"."""
    return (
        abs(setting.alpha - 0.3) + 0.3 * (setting.align == "self") + 0.01 * abs(setting.window - 32)
        + 0.1 * abs(setting.tau - 0.5) + 0.05 * setting.sinks + 0.02 * abs(setting.kernel - 5)
    )  # fmt: skip


def test_seeking_beats_drawing_on_a_smooth_loss():
    space, asked = make_space("infokv", None), []

    def loss(settings, documents):
        asked.append((len(settings), documents))
        return {one: planted(one) for one in settings}

    better = worse = 0
    for seed in range(40):
        sought, drawn = search(space, loss, 24, 16, seed)
        assert sought.tried == drawn.tried == 24
        for found in (sought, drawn):
            assert planted(found.best) == min(found.losses.values()) and InfoKV() in found.losses
            assert len(found.losses) in (6, 7, 8)  # a quarter of them, and the default
        better += planted(sought.best) < planted(drawn.best)
        worse += planted(sought.best) > planted(drawn.best)
    assert better > 3 * worse, (better, worse)
    assert [documents for _, documents in asked[:5]] == [4, 4, 4, 8, 16]
    assert asked[0][0] == 24  # what is drawn is measured at once


def test_a_setting_that_failed_is_never_chosen():
    space = make_space("snapkv", {"window": (4, 8, 16)})

    def loss(some, _):
        return {one: math.inf if one == SnapKV() else one.window for one in some}

    assert [found.best for found in search(space, loss, 4, 8, 0)] == [SnapKV(window=4)] * 2


@dataclass(frozen=True)
class Moody(Scorer):
    """Fails at one of its settings."""

    weight: int = 1
    needs = ("keys",)

    def score(self, signals):
        if self.weight == 2:
            raise ArithmeticError("no luck")
        return self.weight * signals.keys[0][None, :, :, 0].float()


@pytest.mark.parametrize("objective", ["fidelity", "influence"])
def test_settings_and_documents_that_fail_do_not_end_the_search(tiny, tmp_path, monkeypatch, objective):
    from forward_influence import open_study

    plain = open_study.measure_document

    def one_document_fails(model, document, *args, **kwargs):
        if document.id == unlucky[0]:
            raise MemoryError("none left")
        return plain(model, document, *args, **kwargs)

    unlucky = [None]
    study = tiny | {"method": f"{__name__}:Moody", "vary": {"weight": ("2", "3", "-1")}, "trials": 4, "sinks": 2,
                    "recent": 8, "objective": objective}  # fmt: skip
    whole = tune(out=tmp_path / "whole", **study)
    assert len(whole.train_kl) >= 2 and whole.parameters.get("weight") != 2
    unlucky[0] = json.loads((tmp_path / "whole" / "tuned.json").read_text())["provenance"]["train"][1]
    monkeypatch.setattr(open_study, "measure_document", one_document_fails)
    found = tune(out=tmp_path / "part", **study)
    assert found.parameters.get("weight") != 2
    rows = [row for row in read_rows(tmp_path / "part" / "search") if row["status"] == "ok"]
    documents = {row["document"] for row in rows}
    assert len(documents) == 3 and unlucky[0] not in documents
    for name, kl in found.train_kl.items():
        own = [sum(row["kl"]) / len(row["kl"]) for row in rows if row["selector"] == name]
        assert kl == pytest.approx(sum(own) / 3, rel=1e-6)


def test_only_documents_that_reach_the_horizon_count(tiny, tmp_path):
    short = tmp_path / "docs.jsonl"
    write_documents(short, [100, 85, 100, 90, 100, 100, 100, 100, 100])
    out = tmp_path / "out"
    tune(out=out, **tiny | {"data": str(short), "band": "30-40"})
    rows = read_rows(out / "search") + read_rows(out / "held-out")
    assert len({row["document"] for row in rows}) == 7 and {row["n_tokens"] for row in rows} == {100}


def test_another_request_does_not_overwrite_the_outcome_of_the_first(result, tiny, tmp_path, monkeypatch):
    before = (result[1] / "tuned.json").read_text()
    for change in ({"keep": "0.4"}, {"trials": 8}, {"train": 3}, {"vary": {"window": (4, 8)}}, {"band": "0-20"}):
        with pytest.raises(UserError, match="is the outcome of another tuning"):
            tune(out=result[1], **tiny | change)
    assert (result[1] / "tuned.json").read_text() == before
    monkeypatch.chdir(tmp_path)
    homes = {tune(**tiny | {"keep": keep, "trials": 2}).path for keep in ("0.4", "0.3")}
    assert len(homes) == 2


def test_rows_of_other_documents_in_the_folder_are_not_judged(result, tiny, tmp_path):
    from forward_influence.analysis import open_tuning, tuning_table

    out = tmp_path / "out"
    tune(out=out, **tiny | {"train": 2, "held_out": 5})
    (out / "tuned.json").rename(tmp_path / "old.json")
    tuned = tune(out=out, **tiny)
    tuning = open_tuning(out)
    judged = {row["document"] for row in tuning.runs.rows}
    assert judged == set(tuning.facts["held_out"]) and not judged & set(tuning.facts["train"])
    table = tuning_table(tuning)
    assert set(table.n_documents) == {3}
    kl = table[(table.band == "tuned") & (table.metric == "kl") & (table.one == "tuned")].set_index("other")
    for who in ("default", "attention", "random"):
        assert kl.one_mean[who] == pytest.approx(tuned.held_out_kl["tuned"])
        assert kl.other_mean[who] == pytest.approx(tuned.held_out_kl[who])


@dataclass(frozen=True)
class Odd(Scorer):
    """Parameters that no file can hold, or that exclude each other."""

    a: int = 1
    b: int = 9
    pair: tuple = (1, 2)
    needs = ("keys",)

    def __post_init__(self):
        if self.a == 7:
            raise ValueError("seven is not for me")
        if self.a > self.b:
            raise ValueError("a above b")

    def score(self, signals):
        return signals.keys[0][None, :, :, 0].float()


def test_parameters_of_other_peoples_scorers():
    name = f"{__name__}:Odd"
    for vary, sentence in (
        ({"a": [3, 7]}, "seven is not for me"),
        ({"pair": [(3, 4)]}, "pair of .*Odd is a tuple, which a tuned file cannot hold"),
        ({"c": [1]}, "no parameter 'c'"),
    ):
        with pytest.raises((UserError, Refused), match=sentence):
            make_space(name, vary)
    space = make_space(name, {"a": [1, 3, 5], "b": [9, 6, 4]})  # a=5, b=4 is no setting
    every = list(space.random(0))
    assert len(every) == 8 and all(one.a <= one.b for one in every)
    assert all(one.a <= one.b for one in space.neighbours(Odd(a=5, b=6), 0))


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


def test_few_documents_are_compared_by_logarithms_and_all_of_them_by_the_mean():
    aim = objectives.Objective("fidelity", "0.4")
    usual, lucky = [0.01, 0.02, 0.01, 1.0], [0.02, 0.04, 0.02, 0.9]
    assert aim.loss(lucky) < aim.loss(usual) and aim.typical_loss(usual) < aim.typical_loss(lucky)
    assert aim.loss(usual) == pytest.approx(0.26)
    assert math.exp(aim.typical_loss(usual)) == pytest.approx((0.01 * 0.02 * 0.01 * 1.0) ** 0.25)
    other = objectives.Objective("influence", None)
    assert other.loss(usual) == -aim.loss(usual) and other.typical_loss(usual) == -aim.typical_loss(usual)
    assert aim.loss(None) == aim.typical_loss(None) == other.loss(None) == math.inf
    assert math.isfinite(aim.typical_loss([0.0, 0.0]))
