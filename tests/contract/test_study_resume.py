"""What a study may go on from, and what it must not mix."""

import hashlib
import json

import pytest
from tiny_runs import (
    ALL,
    LONG_ENOUGH,
    alike,
    by_name,
    read_rows,
    write_documents,
)

from forward_influence import open_runs
from forward_influence.errors import UserError
from forward_influence.runs import RunFolder


def test_same_numbers_whatever_the_batch(study, whole):
    for batch in (1, 2, 100):
        alike(read_rows(study(f"batch{batch}", selector=ALL, batch=batch).path), read_rows(whole.path))


def test_resume_adds_only_what_is_missing_in_any_order(study, whole):
    study(selector=["none", "entropy"], limit=2)
    first = (study(selector=["entropy"], limit=2).path / "rows.jsonl").read_bytes()
    again = study(selector=["entropy", "none"], limit=2)
    assert (again.path / "rows.jsonl").read_bytes() == first  # nothing to do, nothing done
    header = json.loads((again.path / "run.json").read_text())
    assert [one["planned_rows"] for one in header["resumed"]] == [len(read_rows(again.path))] * 2
    study(selector=["positions:at=9+5", "recompute"], limit=4, batch=1)
    last = study(selector=list(reversed(ALL)))
    assert (last.path / "rows.jsonl").read_bytes().startswith(first)
    assert (last.ok, last.skipped) == (6, 2)
    alike(read_rows(last.path), read_rows(whole.path))
    header = json.loads((last.path / "run.json").read_text())
    assert len(header["resumed"]) == 4
    assert header["resumed"][-1]["planned_rows"] == 48


def test_nothing_to_do_loads_no_weights(study, monkeypatch):
    study(selector="none", limit=2)
    monkeypatch.setattr("forward_influence.models.load_model", None)
    assert study(selector="none", limit=2).ok == 2


def test_seed_changes_order_and_choices(study, whole):
    other = study("other", selector=["random"], seed=1)
    one, two = read_rows(whole.path), read_rows(other.path)

    def order(rows):
        return [row["document"] for row in rows if row["selector"] == "random" and row["status"] == "ok"]

    assert order(one) == sorted(
        (f"d{index}" for index in LONG_ENOUGH), key=lambda name: hashlib.sha256(f"0\n{name}".encode()).digest()
    )
    assert order(one) != order(two)
    assert by_name(one)["d0", "random"]["removed"] != by_name(two)["d0", "random"]["removed"]
    assert (
        by_name(read_rows(study(selector=["random"], limit=6).path))["d0", "random"]["removed"]
        == (by_name(one)["d0", "random"]["removed"])
    )


def test_shards_make_the_whole(study, whole):
    parts = [study(f"all/{number}", selector=ALL, shard=f"{number}/3") for number in (1, 2, 3)]
    assert [part.ok for part in parts] == [2, 2, 2]
    assert sorted(part.skipped for part in parts) == [0, 1, 1]
    alike(open_runs("all").rows, read_rows(whole.path))
    limited = [study(f"limited/{number}", selector="none", shard=f"{number}/2", limit=3) for number in (1, 2)]
    assert [part.ok for part in limited] == [2, 1]
    alike(open_runs("limited").rows, read_rows(study("three", selector="none", limit=3).path))
    with pytest.raises(UserError, match="shard 7/7 has no document: there are fewer than 7; use fewer shards"):
        study("more", selector="none", shard="7/7")


def test_default_folder(study, tmp_path):
    one = study(out=None, selector="none", limit=2)
    assert one.path.parts[0] == "runs" and one.path.name.startswith("model-")
    assert study(out=None, selector="random", limit=2, fraction=0.0900).path == one.path
    assert study(out=None, selector="random", limit=2, fraction="0.10").path != one.path
    assert study(out=None, selector="none", limit=2, shard="1/2").path.name == f"{one.path.name}-shard-1-of-2"
    assert len(open_runs(one.path).rows) == 4 + 2 * one.skipped


def test_fresh_keeps_old_rows_aside(study):
    before = (study(selector="random", limit=2).path / "rows.jsonl").read_bytes()
    outcome = study(selector="none", limit=2, fresh=True)
    assert {row["selector"] for row in read_rows(outcome.path)} == {"none"}
    assert (outcome.path / "old-1" / "rows.jsonl").read_bytes() == before


def test_another_study_in_the_same_folder_is_refused(study):
    study(selector="none", limit=1)
    with pytest.raises(
        UserError, match=r"holds another run \(chunk 16 there, 8 here\); give another --out, or --fresh"
    ):
        study(selector="none", limit=1, chunk=8)
    with pytest.raises(UserError, match=r"holds another run \(chunk 16 there, 8 here\)"):
        study(selector="none", limit=1, chunk=8, dry_run=True)
    assert study(selector="none", limit=1, chunk=8, fresh=True).ok == 1


def test_two_at_once_in_one_folder_are_refused(study):
    path = study(selector="none", limit=1).path
    with (
        RunFolder.open(path, open_runs(path).spec, {}),
        pytest.raises(UserError, match="in use by another process; wait for it, or give another --out"),
    ):
        study(selector="random", limit=1)
    assert study(selector="random", limit=1).ok == 1


def test_changed_documents_are_not_mixed(study, tmp_path):
    data = write_documents(tmp_path / "mine.jsonl", [100, 100])
    study(selector="none", data=data)
    data.write_text(data.read_text().replace("w", "w1", 1))
    for more in ({"selector": "random"}, {"selector": "none"}, {"selector": "none", "dry_run": True}):
        with pytest.raises(UserError, match=r"Document 'd0' has other tokens than in earlier rows .*--out, or --fresh"):
            study(data=data, **more)
    assert study(selector="none", data=data, fresh=True).ok == 2


def test_a_document_that_became_long_enough_is_not_mixed(study, tmp_path):
    data = write_documents(tmp_path / "mine.jsonl", [60, 100])
    study(selector="none", data=data)
    write_documents(data, [100, 100])
    with pytest.raises(UserError, match="Document 'd0' has other tokens"):
        study(selector="none", data=data)
