"""Per-token influence: rows are what removing single tokens costs, files lie beside them, and a selector reads them."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass

import pytest
import torch
from tiny_runs import read_rows, save_model, token_ids, words, write_documents

from forward_influence import fidelity, influence, measure, open_runs
from forward_influence.analysis.additivity import set_table
from forward_influence.errors import UserError
from forward_influence.greedy import greedy_order
from forward_influence.influence_selector import Influence
from forward_influence.models import load_model
from forward_influence.selectors import make_selector
from forward_influence.token_files import SCORES, SETS, read_scores
from forward_influence.token_influence import token_influence
from forward_influence.token_sets import MEASURED, RANDOM, highest, random_sets, sample_positions
from infokv.errors import Refused
from infokv.prefill import prefill
from infokv.scorer import Scorer

PREFIX, HORIZON = 60, 200  # near: 0 to 128, far: 128 to 200

SIGNALS = ("attention:window=8", "knorm", "random", "self-information")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder / "model")
    write_documents(folder / "docs.jsonl", [256] * 4)
    return {
        "model": load_model(folder / "model", device="cpu", offline=True, notify=lambda sentence: None),
        "data": str(folder / "docs.jsonl"), "prefix": PREFIX, "horizon": HORIZON - 4, "sinks": 2, "recent": 8,
        "offline": True, "quiet": True,
    }  # fmt: skip


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("tokens")
    token_influence(sample=None, group=(4,), signal=SIGNALS, limit=2, out=out, **tiny)
    return out


def text_of(tiny, document: str) -> list[int]:
    with open(tiny["data"], encoding="utf-8") as file:
        entry = next(one for one in map(json.loads, file) if one["id"] == document)
    return token_ids(entry["text"])


def test_rows_are_the_influence_of_single_tokens_and_of_sets(run, tiny):
    rows = read_rows(run)
    singles = [row for row in rows if row["n_removed"] == 1]
    sets = [row for row in rows if row["n_removed"] > 1]
    assert len(singles) == 2 * 50 and len(sets) >= 2 * (12 + len(SIGNALS))
    assert {row["removed"][0] for row in singles} == set(range(2, 52))
    assert all(row["n_removed"] == 4 for row in sets)
    for document in {row["document"] for row in rows}:
        ids = torch.tensor([text_of(tiny, document)])
        own = [row for row in rows if row["document"] == document]
        expected = influence(tiny["model"], ids, [row["removed"] for row in own], prefix_length=PREFIX)
        for row, kl in zip(own, expected):
            assert row["kl"] == pytest.approx(kl.tolist(), rel=1e-4, abs=1e-9)


def test_scores_are_what_each_signal_says_of_every_position(run, tiny):
    spec_hash = json.loads((run / "run.json").read_text())["hash"]
    entries = read_scores(run, spec_hash)
    assert len(entries) == 2 * len(SIGNALS)
    for entry in entries:
        if entry["signal"] == "random":
            continue  # draws by the document's seed
        selector = make_selector(entry["signal"])
        ids = torch.tensor([text_of(tiny, entry["document"])[:PREFIX]])
        _, facts = prefill(tiny["model"].model, ids, selector.needs, candidates=range(2, PREFIX - 8))
        scores = selector.scorer.score(facts).double().mean(dim=(0, 1))
        assert entry["scores"][2:52] == pytest.approx(scores[2:52].tolist(), rel=1e-5, abs=1e-7)


def test_the_sets_are_random_ones_and_those_that_are_ranked_highest(run):
    rows = read_rows(run)
    spec_hash = json.loads((run / "run.json").read_text())["hash"]
    dealt = {tuple(sorted(one)) for one in random_sets(list(range(2, 52)), 4, 0)}
    for document in {row["document"] for row in rows}:
        own = [row for row in rows if row["document"] == document]
        rankings = {e["signal"]: dict(enumerate(e["scores"])) for e in read_scores(run, spec_hash)
                    if e["document"] == document}  # fmt: skip
        rankings["influence"] = {row["removed"][0]: sum(row["kl"]) for row in own if row["n_removed"] == 1}
        best = set()
        for ranking in rankings.values():
            left = {place: score for place, score in ranking.items() if 2 <= place < 52}
            found = []
            for _ in range(4):
                found.append(max(left, key=lambda place: (left[place], -place)))
                del left[found[-1]]
            best.add(tuple(sorted(found)))
        assert len(best) > len(SIGNALS) - 1
        assert {tuple(row["removed"]) for row in own if row["n_removed"] > 1} == dealt | best


def test_it_is_noted_who_chose_a_set_and_counted_after_a_larger_sample(tiny, tmp_path):
    given = dict(group=(4,), signal=("knorm",), limit=1, out=tmp_path) | tiny
    dealt = []
    for sample in (12, 24):
        token_influence(sample=sample, **given)
        dealt += random_sets(sample_positions(range(2, 52), sample, 0), 4, 0)
        table = set_table(open_runs(tmp_path))
        table = table[table.band == "all"]
        assert set(table[table.chosen_by == RANDOM].positions) == {tuple(sorted(one)) for one in dealt}
        for who in (MEASURED, "knorm"):
            (places,) = table[table.chosen_by == who].positions
            singles = {row["removed"][0]: row for row in read_rows(tmp_path) if row["n_removed"] == 1}
            (entry,) = read_scores(tmp_path, json.loads((tmp_path / "run.json").read_text())["hash"])
            worth = {p: sum(row["kl"]) if who == MEASURED else entry["scores"][p] for p, row in singles.items()}
            assert places == tuple(sorted(sorted(worth, key=worth.get)[-4:]))
    lines = (tmp_path / SETS).read_text()
    token_influence(sample=24, **given)  # all is there
    assert (tmp_path / SETS).read_text() == lines


OWN = """
from dataclasses import dataclass

from infokv.scorer import Scorer

@dataclass(frozen=True)
class Own(Scorer):
    def score(self, signals):
        return {sign}signals.positions[0].float()[None, None]
"""


def test_a_signal_that_is_edited_back_is_scored_as_it_is_now(tiny, tmp_path, monkeypatch):
    found = []
    for sign in ("+", "-", "+"):
        (tmp_path / "own_signal.py").write_text(OWN.format(sign=sign))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "own_signal", raising=False)
        importlib.invalidate_caches()
        given = dict(sample=12, group=(4,), signal=("own_signal:Own",), limit=1, out=tmp_path / "run") | tiny
        token_influence(**given)
        table = set_table(open_runs(tmp_path / "run"))
        (places,) = table[(table.band == "all") & (table.chosen_by == "own_signal:Own")].positions
        found.append(places)
    assert found[0] == found[2] != found[1]


def test_sets_that_fail_count_like_other_rows(tiny, tmp_path, monkeypatch):
    from forward_influence import open_study

    plain = open_study.measure_document

    def broken(model, document, selectors, *args, **more):
        if all("+" in name for name in selectors):  # those that are ranked highest come alone
            raise ArithmeticError("no luck")
        return plain(model, document, selectors, *args, **more)

    monkeypatch.setattr(open_study, "measure_document", broken)
    outcome = token_influence(sample=12, group=(4,), signal=("knorm",), limit=2, out=tmp_path, **tiny)
    assert (outcome.ok, outcome.failed_rows) == (2, 4)
    planned = json.loads((tmp_path / "run.json").read_text())["provenance"]["planned_rows"]
    assert planned == len(read_rows(tmp_path)) == 2 * (12 + 3 + 2)


def test_rankings_hold_the_mean_influence_of_each_band(run):
    rows = [row for row in read_rows(run) if row["n_removed"] == 1]
    for band, (start, stop) in {"all": (0, 196), "near": (0, 128), "far": (128, 196)}.items():
        content = json.loads((run / f"influence-{band}.json").read_text())
        assert content["band"] == [start, stop] and len(content["documents"]) == 2
        for entry in content["documents"]:
            own = {row["removed"][0]: row for row in rows if row["document"] == entry["document"]}
            assert entry["positions"] == sorted(own)
            for place, kl in zip(entry["positions"], entry["kl"]):
                assert kl == pytest.approx(sum(own[place]["kl"][start:stop]) / (stop - start), rel=1e-9)


def test_the_selector_takes_the_tokens_that_cost_most(run, tiny, tmp_path):
    measure(selector=[f"influence:{run / 'influence-far.json'}"], fraction="0.1", limit=3, out=tmp_path, **tiny)
    rows = {row["document"]: row for row in read_rows(tmp_path)}
    content = json.loads((run / "influence-far.json").read_text())
    for entry in content["documents"]:
        row = rows.pop(entry["document"])
        best = sorted(entry["positions"], key=lambda place: -entry["kl"][entry["positions"].index(place)])[:6]
        assert row["removed"] == sorted(best)
    (left,) = rows.values()  # a text in which nothing was measured
    assert left["status"] == "skipped" and "no influences of its text" in left["reason"]


def test_as_a_method_it_keeps_them_and_what_was_no_candidate(run, tiny, tmp_path):
    study = {name: value for name, value in tiny.items() if name not in ("sinks", "recent")}
    path = run / "influence-all.json"
    fidelity(method=[f"influence:{path}", "random", "entropy"], keep=["0.3"], limit=2, out=tmp_path, **study)
    rows = {(row["document"], row["selector"].partition(":")[0]): row for row in read_rows(tmp_path)}
    assert len(rows) == 6
    for entry in json.loads(path.read_text())["documents"]:
        row = rows[entry["document"], "influence"]
        assert row["status"] == "ok" and set(row["kept_counts"]) == {18}
        best = sorted(entry["positions"], key=lambda place: -entry["kl"][entry["positions"].index(place)])[:8]
        stay = {*range(2), *range(52, 60), *best}
        ids = torch.tensor([text_of(tiny, entry["document"])[: PREFIX + HORIZON - 4]])
        (kl,) = influence(tiny["model"], ids, [sorted(set(range(PREFIX)) - stay)], prefix_length=PREFIX)
        assert row["kl"] == pytest.approx(kl.tolist(), rel=1e-3, abs=1e-8)


def test_the_same_after_an_interruption(run, tiny, tmp_path, monkeypatch):
    from forward_influence import token_influence as module

    plain, calls = module.shared_scores, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plain(*args)

    monkeypatch.setattr(module, "shared_scores", interrupted)
    with pytest.raises(KeyboardInterrupt):
        token_influence(sample=None, group=(4,), signal=SIGNALS, limit=2, out=tmp_path, **tiny)
    monkeypatch.undo()
    with open(tmp_path / SCORES, "a", encoding="utf-8") as file:
        file.write('{"hash": "torn')  # as a kill in the middle of a line leaves it
    token_influence(sample=None, group=(4,), signal=SIGNALS, limit=2, out=tmp_path, **tiny)
    assert (tmp_path / SCORES).read_text() == (run / SCORES).read_text()
    for name in ("influence-all.json", "influence-near.json"):
        mine, other = (json.loads((folder / name).read_text()) for folder in (tmp_path, run))
        for one, two in zip(mine["documents"], other["documents"], strict=True):
            assert one["positions"] == two["positions"]
            assert one["kl"] == pytest.approx(two["kl"], rel=1e-4, abs=1e-9)


def test_a_sample_has_one_position_in_each_part_of_the_prefix():
    for seed in range(5):
        places = sample_positions(range(4, 1984), 128, seed)
        assert len(set(places)) == 128 and places == sorted(places)
        assert all(4 + 1980 * part // 128 <= place < 4 + 1980 * (part + 1) // 128 for part, place in enumerate(places))
        sets = random_sets(places, 8, seed)
        assert sorted(place for one in sets for place in one) == places
        assert [len(one) for one in random_sets(places, 50, seed)] == [50, 50]
    assert sample_positions(range(4, 9), None, 0) == [4, 5, 6, 7, 8]
    assert sample_positions(range(4, 1984), 128, 0) != sample_positions(range(4, 1984), 128, 1)


def test_the_highest_of_equals_are_the_first_ones_and_all_of_them_are_no_choice():
    assert highest({7: 1.0, 3: 2.0, 5: 2.0, 1: 2.0}, 2) == (1, 3)
    assert highest({7: float("inf"), 3: 2.0, 5: 0.0}, 2) == (3, 7)
    for scores in ({}, {1: 1.0, 2: 2.0}, {1: 1.0}, {1: 3.0, 2: 3.0, 3: 3.0}):
        assert highest(scores, 2) is None


@pytest.mark.parametrize(("change", "sentence"), [
    (dict(sample=51), "sample is 51; it must be from 1 to the 50 candidates"),
    (dict(sample=0), "sample is 0"),
    (dict(group=(1,)), "group is 1"),
    (dict(group=(13,)), "group is 13; it must be from 2 to the 12 positions"),
    (dict(signal=("none",)), "none chooses positions and has no scores"),
    (dict(signal=("nothing",)), "nothing"),
    (dict(skip=4), "skip is 4, and 4 documents"),
])  # fmt: skip
def test_bad_requests_end_in_a_sentence(tiny, tmp_path, change, sentence):
    given = {"sample": 12, "group": (4,), "signal": ("knorm",), "limit": 1} | tiny | change
    with pytest.raises(ValueError, match=sentence) as caught:
        token_influence(out=tmp_path / "out", **given)
    assert not (tmp_path / "out" / "rows.jsonl").exists() and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("name", "old", "new"), [
    (SCORES, '"scores": [', '"scores": ["a", '), (SETS, '"positions": [', '"positions": ["2", '),
])  # fmt: skip
def test_values_of_another_kind_are_refused(tiny, tmp_path, name, old, new):
    given = dict(sample=12, group=(4,), signal=("knorm",), limit=1, out=tmp_path) | tiny
    token_influence(**given)
    path = tmp_path / name
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=f"{name}' has '[a2]' among the .* of line 1; delete the file"):
        token_influence(**given)
    path.unlink()
    assert token_influence(**given).ok == 1


@pytest.mark.parametrize("content", ["{}", "[]", "no", '{"documents": [{"tokens": [1], "positions": [4], "kl": [1]}]}'])
def test_a_file_that_holds_no_influences_is_refused(tmp_path, content):
    path = tmp_path / "influence-all.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"influence-all\.json' is no file of influences"):
        Influence.load(str(path))
    with pytest.raises(UserError, match="cannot be read"):
        Influence.load(str(tmp_path / "absent.json"))
    with pytest.raises(UserError, match="needs a file"):
        Influence()


def test_greedy_takes_each_for_what_it_adds(run, tiny, tmp_path):
    token_influence(sample=None, group=(), greedy=3, signal=("knorm",), limit=1, out=tmp_path, **tiny)
    (entry,) = json.loads((tmp_path / "influence-greedy.json").read_text())["documents"]
    ids = torch.tensor([text_of(tiny, entry["document"])[: PREFIX + HORIZON - 4]])
    chosen: list[int] = []
    for _ in range(3):  # by trying all of them
        rest = [place for place in range(2, 52) if place not in chosen]
        kl = influence(tiny["model"], ids, [[*chosen, place] for place in rest], prefix_length=PREFIX).mean(dim=1)
        chosen.append(rest[int(kl.argmax())])
    order = sorted(entry["positions"], key=lambda place: -entry["kl"][entry["positions"].index(place)])
    assert order[:3] == chosen
    alone = json.loads((tmp_path / "influence-all.json").read_text())["documents"][0]["kl"]
    assert [kl for place, kl in zip(entry["positions"], entry["kl"]) if place not in chosen] == [
        kl for place, kl in zip(entry["positions"], alone) if place not in chosen
    ]
    rows = len(read_rows(tmp_path / "greedy"))
    token_influence(sample=None, group=(), greedy=3, signal=("knorm",), limit=1, out=tmp_path, **tiny)
    assert len(read_rows(tmp_path / "greedy")) == rows  # nothing is measured again


def test_greedy_sees_that_two_tokens_say_the_same():
    worth = {1: 5.0, 2: 4.9, 3: 2.0, 4: 0.0}

    def cost(sets):  # 2 says what 1 says; 4 doubles what 3 is worth
        return [
            sum(worth[place] for place in one) - 4.8 * ({1, 2} <= set(one)) + 2.0 * ({3, 4} <= set(one)) for one in sets
        ]

    assert greedy_order(cost, worth, 4) == [1, 3, 4, 2]
    assert greedy_order(cost, worth, 2, pool=1) == [1, 2]  # 3 was not looked at again
    assert greedy_order(cost, worth, 9) == [1, 3, 4, 2] and greedy_order(cost, {}, 2) == []


@dataclass(frozen=True)
class Broken(Scorer):
    """A signal that is not always there."""

    needs = ("entropy",)

    def score(self, signals):
        raise ArithmeticError("no luck")


def test_a_signal_that_fails_is_left_out_and_said(tiny, tmp_path, capsys):
    given = tiny | {"quiet": False}
    outcome = token_influence(sample=6, group=(), signal=("knorm", Broken), limit=1, out=tmp_path, **given)
    assert outcome.ok == 1 and "ArithmeticError: no luck" in capsys.readouterr().err
    entries = [json.loads(line) for line in (tmp_path / SCORES).read_text().splitlines()]
    assert [entry["signal"] for entry in entries] == ["knorm"]


def test_a_file_of_some_positions_alone_ranks_no_more_than_these(tiny, tmp_path):
    token_influence(sample=6, group=(), signal=(), limit=1, out=tmp_path / "some", **tiny)
    path = tmp_path / "some" / "influence-all.json"
    for fraction, status in (("0.1", "ok"), ("0.12", "skipped")):  # 6 and 7 of 60
        measure(selector=f"influence:{path}", fraction=fraction, limit=1, out=tmp_path / fraction, **tiny)
        (row,) = read_rows(tmp_path / fraction)
        assert row["status"] == status
    assert "has the influence of 6 of 50 candidates, and 7 are needed" in row["reason"]
    study = {name: value for name, value in tiny.items() if name not in ("sinks", "recent")}
    fidelity(method=f"influence:{path}", keep="0.3", limit=1, out=tmp_path / "kept", **study)
    (row,) = read_rows(tmp_path / "kept")
    assert row["status"] == "skipped" and "run forward-influence influence --every" in row["reason"]


def test_a_file_is_for_its_model_and_its_prefix(run, tiny, tmp_path):
    named = f"influence:{run / 'influence-all.json'}"
    save_model(tmp_path / "other", "qwen3")
    with pytest.raises(Refused, match="was tuned for another model"):
        measure(
            selector=named, fraction="0.1", limit=1, out=tmp_path / "a", **tiny | {"model": str(tmp_path / "other")}
        )
    measure(selector=named, fraction="0.1", limit=2, out=tmp_path / "b", **tiny | {"prefix": 40})
    assert {row["status"] for row in read_rows(tmp_path / "b")} == {"skipped"}


def test_texts_that_begin_alike_are_told_apart_by_name_or_not_at_all(tiny, tmp_path):
    beginning = words(PREFIX - 1, 1)
    texts = [{"id": name, "text": f"{beginning} {words(HORIZON, seed)}"} for name, seed in (("one", 2), ("two", 3))]
    data = tmp_path / "docs.jsonl"
    data.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
    given = tiny | {"data": str(data)}
    token_influence(sample=None, group=(), signal=(), limit=2, out=tmp_path / "tokens", **given)
    path = tmp_path / "tokens" / "influence-all.json"
    measure(selector=f"influence:{path}", fraction="0.1", limit=2, out=tmp_path / "removed", **given)
    rows = {row["document"]: row["removed"] for row in read_rows(tmp_path / "removed")}
    for entry in json.loads(path.read_text())["documents"]:
        best = sorted(entry["positions"], key=lambda place: -entry["kl"][entry["positions"].index(place)])[:6]
        assert rows[entry["document"]] == sorted(best)
    assert rows["one"] != rows["two"]
    study = {name: value for name, value in given.items() if name not in ("sinks", "recent")}
    fidelity(method=f"influence:{path}", keep="0.3", limit=2, out=tmp_path / "kept", **study)
    assert all("2 texts that begin alike" in row["reason"] for row in read_rows(tmp_path / "kept"))


@pytest.mark.parametrize(("change", "sentence"), [
    ({"kl": [1.0]}, "one number of at least 0 for each position"),
    ({"kl": [-1.0, 2.0]}, "one number of at least 0"),
    ({"kl": [True, 2.0]}, "one number of at least 0"),
    ({"positions": [-1, 3]}, "not different places"),
    ({"positions": [3, 3]}, "not different places"),
    ({"positions": [3, 60]}, "not different places"),
    ({"positions": [3, 4.5]}, "not different places"),
])  # fmt: skip
def test_an_edited_file_is_refused(run, tmp_path, change, sentence):
    content = json.loads((run / "influence-all.json").read_text())
    content["documents"][0] |= {"positions": [3, 4], "kl": [1.0, 2.0]}
    path = tmp_path / "influence-all.json"
    path.write_text(json.dumps(content))
    Influence.load(str(path))
    content["documents"][0] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=sentence):
        Influence.load(str(path))


def test_documents_that_end_early_are_named_when_they_are_left_out(tiny, tmp_path, capsys):
    write_documents(tmp_path / "docs.jsonl", [256, 200])
    given = tiny | {"data": str(tmp_path / "docs.jsonl"), "quiet": False}
    token_influence(sample=6, group=(), signal=(), limit=2, out=tmp_path / "run", **given)
    assert "1 of 2 documents were not measured to the horizon" in capsys.readouterr().err
    near, everywhere = (
        json.loads((tmp_path / "run" / f"influence-{name}.json").read_text())["documents"] for name in ("near", "all")
    )
    assert (len(near), len(everywhere)) == (2, 1)
