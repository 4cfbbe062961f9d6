"""Studies in which something fails: a selector, a document, memory, the disk."""

import errno
import math
from pathlib import Path

import pytest
from tiny_runs import (
    ALL,
    alike,
    by_name,
    read_rows,
    save_model,
    write_documents,
)

from forward_influence import open_runs
from forward_influence.errors import UserError
from forward_influence.models import load_model
from forward_influence.selectors import Selector
from forward_influence.study import Incomplete


class Raises(Selector):
    """Fails on one document."""

    needs = ("entropy",)

    def select(self, signals, count, document):
        if document == "d1":
            raise ZeroDivisionError("no luck")
        return range(4, 4 + count)


def test_a_selector_that_raises_fails_alone(study, whole, capsys):
    outcome = study(selector=["random", Raises, "none"], quiet=False)
    told = capsys.readouterr().err
    name = f"{Raises.__module__}:Raises"
    assert f"Document 'd1' failed with {name} (ZeroDivisionError: no luck); going on." in told
    rows = by_name(read_rows(outcome.path))
    assert rows["d1", name]["status"] == "failed"
    assert rows["d1", name]["reason"] == "ZeroDivisionError: no luck"
    assert rows["d1", name]["removed"] is None
    assert rows["d0", name]["removed"] == [4, 5, 6, 7, 8]
    assert (outcome.ok, outcome.failed, outcome.failed_rows) == (6, 0, 1)
    assert "0 failed (1 rows; forward-influence show says why)" in outcome.sentence()
    others = [row for key, row in rows.items() if key[1] != name]
    alike(others, [row for row in read_rows(whole.path) if row["selector"] in ("random", "none")])
    with pytest.raises(ZeroDivisionError):
        study(selector=[Raises], debug=True)


def test_failed_rows_are_tried_again(study, monkeypatch):
    assert study(selector=[Raises]).failed_rows == 1
    monkeypatch.setattr(Raises, "select", lambda self, signals, count, document: range(4, 4 + count))
    outcome = study(selector=[Raises])
    assert (outcome.ok, outcome.failed_rows) == (6, 0)
    rows = by_name(read_rows(outcome.path))
    assert rows["d1", f"{Raises.__module__}:Raises"]["status"] == "ok"


def test_a_document_without_a_distribution_fails_alone(study, tmp_path, capsys):
    """The embedding of one word is NaN."""
    network = save_model(tmp_path / "model")
    network.get_input_embeddings().weight.data[88] = math.nan
    network.save_pretrained(tmp_path / "model")
    loaded = load_model(tmp_path / "model", check=False, notify=lambda sentence: None)
    data = write_documents(tmp_path / "docs.jsonl", [100, 100, 100])
    data.write_text(data.read_text().replace('"d1", "text": "', '"d1", "text": "w88 '))
    outcome = study(model=loaded, data=data, selector=["random", "none"], quiet=False)
    rows = by_name(read_rows(outcome.path))
    assert {row["status"] for (document, _), row in rows.items() if document == "d1"} == {"failed"}
    assert {row["status"] for (document, _), row in rows.items() if document != "d1"} == {"ok"}
    assert "Document 'd1' failed (" in capsys.readouterr().err
    assert rows["d1", "none"]["reason"].startswith("The reference logits hold NaN")
    assert (outcome.ok, outcome.failed, outcome.failed_rows) == (2, 1, 2)


class Leaves(Selector):
    """Ends the program, or tries to."""

    error: BaseException = SystemExit(0)

    def select(self, signals, count, document):
        raise self.error


class Unlisted(BaseException):
    """No Exception."""


@pytest.mark.parametrize(
    ("error", "reason"),
    [(SystemExit(0), "SystemExit: 0"), (SystemExit(), "SystemExit"), (Unlisted("x"), "Unlisted: x")],
)
def test_a_selector_that_ends_the_program_fails_alone(study, monkeypatch, error, reason):
    monkeypatch.setattr(Leaves, "error", error)
    outcome = study(selector=[Leaves, "none"], limit=2)
    assert (outcome.ok, outcome.failed_rows) == (2, 2)
    failed = {row["reason"] for row in read_rows(outcome.path) if row["status"] == "failed"}
    assert failed == {reason}
    with pytest.raises(RuntimeError, match=f"a selector's code tried to end the program .{reason}") as caught:
        study("debug", selector=[Leaves], limit=1, debug=True)
    assert caught.value.__cause__ is error


def test_a_document_that_ends_the_program_fails_alone(study, monkeypatch):
    from forward_influence import document

    monkeypatch.setattr(document, "prefill", lambda *a, **k: (_ for _ in ()).throw(SystemExit(3)))
    outcome = study(selector="random", limit=2)
    assert (outcome.ok, outcome.failed) == (0, 2)
    with pytest.raises(RuntimeError, match="tried to end the program"):
        study(selector="random", limit=2, debug=True)


def test_memory_that_runs_out_fails_a_document(study, monkeypatch):
    from forward_influence import document

    monkeypatch.setattr(document, "prefill", lambda *a, **k: (_ for _ in ()).throw(MemoryError))
    outcome = study(selector="random", limit=2)
    assert (outcome.ok, outcome.failed) == (0, 2)
    assert {row["reason"] for row in read_rows(outcome.path) if row["status"] == "failed"} == {
        "memory ran out with a single ablated row; use a smaller horizon or prefix"
    }


def test_a_full_disk_stops_with_a_sentence_and_loses_nothing(study, whole, monkeypatch):
    import os

    from forward_influence import runs

    usual, calls = os.fsync, []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) == 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        return usual(descriptor)

    monkeypatch.setattr(runs.os, "fsync", fsync)
    with pytest.raises(Incomplete, match=r"No space left on device.*make room and run the same command again") as early:
        study(selector=ALL)
    ended = early.value.outcome
    assert ended.ok > 0 and ended.missing > 0
    assert ended.ok + ended.skipped + ended.failed + ended.missing == 8
    assert f", 0 failed, {ended.missing} not reached: run" in ended.sentence()
    assert 0 < len(read_rows(open_runs("run").runs[0].path)) < 48
    alike(read_rows(study(selector=ALL).path), read_rows(whole.path))


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_disk_that_is_full_before_a_row_is_no_study(study, monkeypatch, call):
    """The header, the note of what is planned, and the skipped rows are written before anything is measured."""
    from forward_influence import runs

    usual, calls = runs.os.fsync, []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) >= call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return usual(descriptor)

    monkeypatch.setattr(runs.os, "fsync", fsync)
    with pytest.raises(UserError, match=r"(cannot|could not) be written .No space left on device.") as caught:
        study(selector="none")
    assert not isinstance(caught.value, Incomplete)


def test_rows_that_are_taken_away_end_the_study(study, whole, monkeypatch):
    from forward_influence import document

    usual, seen = document.compare_rows, []

    def measured(*arguments, **options):
        seen.append(1)
        if len(seen) == 3:
            Path("run").rename("elsewhere")
        return usual(*arguments, **options)

    monkeypatch.setattr(document, "compare_rows", measured)
    with pytest.raises(UserError, match="rows.jsonl' was removed by somebody else while this study was writing it"):
        study(selector=ALL)
    Path("elsewhere").rename("run")
    alike(read_rows(study(selector=ALL).path), read_rows(whole.path))
