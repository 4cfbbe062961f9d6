"""On a task whose answer is known, tuning finds it, the influence selector ranks it first, the correlations show it.

Each check fails when the measured influence is shuffled.
"""

from __future__ import annotations

import json
import random
import shutil
from types import SimpleNamespace

import pytest
from known_answer import FACTS, HORIZON, PREFIX, WINDOW, save_known_model, write_known_texts
from tiny_runs import read_rows

from forward_influence import fidelity, measure, objectives, open_runs
from forward_influence.analysis import correlation_table
from forward_influence.models import load_model
from forward_influence.token_files import rankings_of, write_rankings
from forward_influence.token_influence import token_influence
from forward_influence.tuning import tune

SIGNALS = ("entropy", "entropy-next", f"attention:window={WINDOW},kernel=1", "self-information", "knorm", "h2o")

#: Of these 48 combinations two serve, those with alpha 0 and align self, and only if nothing is pooled over neighbours.
VARY = {"alpha": (0.0, 0.8, 0.9, 1.0), "align": ("self", "next"), "tau": (1.0, 2.0), "kernel": (1, 3, 5),
        "window": (WINDOW,)}  # fmt: skip


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("known")
    save_known_model(folder / "model")
    places = write_known_texts(folder / "docs.jsonl", 8)
    study = {
        "model": load_model(folder / "model", device="cpu", offline=True, notify=lambda sentence: None),
        "data": str(folder / "docs.jsonl"), "prefix": PREFIX, "horizon": HORIZON, "chunk": 20, "offline": True,
        "quiet": True,
    }  # fmt: skip
    return study, places


@pytest.fixture(scope="module")
def run(task, tmp_path_factory):
    out = tmp_path_factory.mktemp("tokens")
    token_influence(sample=None, group=(), signal=SIGNALS, sinks=1, recent=WINDOW, limit=8, out=out, **task[0])
    return out


@pytest.fixture(scope="module")
def shuffled(run, tmp_path_factory):
    """The same run, but what was measured of a token stands with another one of its document."""
    out = tmp_path_factory.mktemp("shuffled")
    shutil.copytree(run, out, dirs_exist_ok=True)
    rows = read_rows(run)
    for document in {row["document"] for row in rows}:
        own = [row for row in rows if row["document"] == document]
        numbers = [{name: row[name] for name in ("kl", "kl_mean", "delta_nll", "top1_changed")} for row in own]
        random.Random(document).shuffle(numbers)
        for row, found in zip(own, numbers):
            row |= found
    (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    runs = open_runs(out)
    content = json.loads((run / "influence-all.json").read_text())

    documents = [SimpleNamespace(id=one["document"], ids=one["tokens"]) for one in content["documents"]]
    plan = SimpleNamespace(spec=runs.spec, documents=documents, out=out)
    write_rankings(plan, rankings_of(plan, rows), content["model"])
    return out


def check_correlations(folder) -> None:
    table = correlation_table(open_runs(folder))
    means = table[table.band == "all"].set_index("signal").spearman
    best = means.drop("entropy").max()
    assert means["entropy"] > best + 0.05, means
    assert means["entropy"] > means[SIGNALS[2]] + 0.3, means


def check_selector(folder, task, out) -> None:
    study, places = task
    fraction = f"{FACTS / PREFIX:.4f}1"  # six tokens
    measure(selector=f"influence:{folder / 'influence-all.json'}", fraction=fraction, sinks=1, recent=WINDOW, limit=8,
            out=out, **study)  # fmt: skip
    rows = read_rows(out)
    assert len(rows) == 8
    for row in rows:
        assert row["removed"] == places[row["document"]]


def test_the_correlation_table_shows_which_signal_knew(run, shuffled):
    check_correlations(run)
    with pytest.raises(AssertionError):
        check_correlations(shuffled)


def test_the_influence_selector_ranks_the_facts_first(run, shuffled, task, tmp_path):
    check_selector(run, task, tmp_path / "true")
    with pytest.raises(AssertionError):
        check_selector(shuffled, task, tmp_path / "shuffled")


def tuned(task, out):
    return tune(method="infokv", vary=VARY, keep="0.4", trials=16, train=4, held_out=4, out=out, **task[0])


def check_tuned(found) -> None:
    assert found.parameters.get("alpha") == 0.0 and "align" not in found.parameters, found.parameters
    assert found.train_kl[found.judged["tuned"]] < 1e-6


def test_tuning_finds_the_signal_that_points_at_the_facts(task, tmp_path, monkeypatch):
    found = tuned(task, tmp_path / "true")
    check_tuned(found)
    assert found.held_out_kl["tuned"] < 1e-6 < 1e-2 < found.held_out_kl["default"]
    plain = objectives.kl_by_document

    def mixed(rows, plan, band):
        means = plain(rows, plan, band)
        values = list(means.values())
        random.Random(len(values)).shuffle(values)
        return dict(zip(means, values))

    monkeypatch.setattr(objectives, "kl_by_document", mixed)
    with pytest.raises(AssertionError):
        check_tuned(tuned(task, tmp_path / "shuffled"))


def test_what_was_measured_is_a_better_cache_than_attention(run, task, tmp_path):
    methods = [f"influence:{run / 'influence-all.json'}", f"snapkv:window={WINDOW},kernel=1"]
    fidelity(method=methods, keep="0.3", limit=8, out=tmp_path, **task[0])
    kl = {name.partition(":")[0]: [] for name in methods}
    for row in read_rows(tmp_path):
        kl[row["selector"].partition(":")[0]].append(sum(row["kl"]) / len(row["kl"]))
    assert max(kl["influence"]) < 1e-6 < 1e-2 < min(kl["snapkv"])
