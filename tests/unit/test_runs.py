"""The run folder: nothing is lost, doubled or mixed, whatever happens in between."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from forward_influence import run_files
from forward_influence.contents import Inputs
from forward_influence.errors import UserError
from forward_influence.rows import ROW_FIELDS, RunSpec, dumps_row, row_key
from forward_influence.runs import CannotWrite, RunFolder, find_runs, newest_run, read_run

SPEC = RunSpec(model="m", dtype="float32", tokenizer="t", data="local", prefix=100, horizon=4, chunk=2)


def make_row(document: str, selector: str = "entropy", status: str = "ok", **change) -> dict:
    row = dict.fromkeys(ROW_FIELDS) | {"key": row_key(SPEC.hash(), document, selector), "mode": "remove"}
    row |= {"document": document, "document_sha": f"sha-{document}", "selector": selector, "status": status}
    row |= {"removed_fraction": 0.01, "kept_fraction": 0.99}
    row |= {"removed": [5], "n_removed": 1, "n_tokens": 104, "kl": [0.1, 0.3, 0.5, math.inf]}
    row |= {"chunk_start": [0, 2], "chunk_count": [2, 2], "kl_mean": [0.2, math.inf], "seconds": 0.5}
    row |= {"delta_nll": [0.0, 0.1], "nll_count": [2, 1], "top1_changed": [0.0, 0.5]}
    return row | change


def open_folder(path, spec=SPEC, provenance=None, **options) -> RunFolder:
    return RunFolder.open(path, spec, provenance or {"command": "measure"}, **options)


def names(rows) -> list[str]:
    return [row["document"] for row in rows]


def test_rows_come_back_as_written(tmp_path):
    path = tmp_path / "not" / "there" / "yet"
    with open_folder(path) as folder:
        assert (path / "run.json").exists()
        assert folder.done() == set()
        folder.append([make_row("a"), make_row("a", "random")])
        folder.append(row for row in [make_row("b", status="skipped", reason="short")])
        assert folder.done() == {row["key"] for row in folder.rows()}
        assert list(folder.rows()) == [
            make_row("a"),
            make_row("a", "random"),
            make_row("b", status="skipped", reason="short"),
        ]
    run = read_run(path)
    assert (run.path, run.spec, run.hash) == (path, SPEC, SPEC.hash())
    assert run.rows[0]["kl"][-1] == math.inf


def test_every_invocation_keeps_its_provenance(tmp_path):
    for command in ("first", "second", "third"):
        open_folder(tmp_path, provenance={"command": command, "out": Path("x")}).close()
    run = read_run(tmp_path)
    assert run.provenance["command"] == "first"
    assert [later["command"] for later in run.resumed] == ["second", "third"]


def test_another_spec_is_refused_by_name_and_value(tmp_path):
    open_folder(tmp_path).close()
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(UserError) as caught:
        open_folder(tmp_path, replace(SPEC, prefix=200, dtype="bfloat16"))
    message = str(caught.value)
    for part in ("prefix 100 there, 200 here", "'float32' there, 'bfloat16' here", "--fresh", "--out"):
        assert part in message
    assert "horizon" not in message
    assert (tmp_path / "run.json").read_bytes() == before
    open_folder(tmp_path).close()  # the refusal released the lock


def measured_folder(path):
    """A folder with rows of two selectors in two documents, a third document that failed, and a fourth too short."""
    inputs = Inputs(texts={name: f"sha-{name}" for name in "abcd"}, code={"own:Mine": "one"})
    with open_folder(path, inputs=inputs) as folder:
        folder.append([make_row(name, selector) for name in "ab" for selector in ("entropy", "own:Mine")])
        folder.append([make_row("c", status="failed", reason="x"), make_row("d", status="skipped", reason="short")])
    return {name: (path / name).read_bytes() for name in ("run.json", "rows.jsonl")}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (Inputs(texts={"b": "edited"}), "Document 'b' has other tokens than in earlier rows .*--out, or --fresh"),
        (Inputs(texts={"d": "longer"}), "Document 'd' has other tokens"),
        (Inputs(texts={"twin": "sha-a"}), "Document 'twin' has the text that .* holds as document 'a' .*--fresh"),
        (Inputs(code={"own:Mine": "two"}), "The code of selector 'own:Mine' .* new name, or another --out, or --fresh"),
    ],
)
def test_something_else_under_an_old_name_is_refused(tmp_path, inputs, message):
    before = measured_folder(tmp_path)
    with pytest.raises(UserError, match=message):
        open_folder(tmp_path, inputs=inputs)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    with open_folder(tmp_path, inputs=inputs, fresh=True) as folder:
        assert list(folder.rows()) == []


@pytest.mark.parametrize(
    "inputs",
    [
        Inputs(),
        Inputs(texts={"a": "sha-a", "b": "sha-b", "new": "sha-new"}, code={"own:Mine": "one"}),
        Inputs(texts={"c": "edited"}),  # it failed and is measured again
        Inputs(texts={"new": "sha-d"}),  # of d there are no numbers
        Inputs(code={"own:Other": "two"}),
    ],
)
def test_what_is_the_same_or_new_goes_on(tmp_path, inputs):
    measured_folder(tmp_path)
    with open_folder(tmp_path, inputs=inputs) as folder:
        assert len(folder.done()) == 5
    assert read_run(tmp_path).code == {"own:Mine": "one"} | inputs.code


def test_code_that_has_only_failed_may_be_corrected(tmp_path):
    with open_folder(tmp_path, inputs=Inputs(code={"own:Mine": "one"})) as folder:
        folder.append([make_row("a", "own:Mine", status="failed", reason="a mistake")])
    with open_folder(tmp_path, inputs=Inputs(code={"own:Mine": "two"})) as folder:
        folder.append([make_row("a", "own:Mine")])
    assert read_run(tmp_path).code == {"own:Mine": "two"}
    with pytest.raises(UserError, match="The code of selector"):
        open_folder(tmp_path, inputs=Inputs(code={"own:Mine": "one"}))


def test_runs_from_before_code_was_stored_are_read(tmp_path):
    measured_folder(tmp_path)
    header = json.loads((tmp_path / "run.json").read_text())
    del header["code"]
    (tmp_path / "run.json").write_text(json.dumps(header))
    assert read_run(tmp_path).code == {}
    open_folder(tmp_path, inputs=Inputs(code={"own:Mine": "two"})).close()


def replaced(path):
    (path / "new").write_bytes((path / "rows.jsonl").read_bytes())
    os.replace(path / "new", path / "rows.jsonl")


def lengthened(path):
    with open(path / "rows.jsonl", "a") as file:
        file.write(dumps_row(make_row("z")) + "\n")


@pytest.mark.parametrize(
    ("harm", "word"),
    [
        (replaced, "changed"),
        (lengthened, "changed"),
        (lambda path: (path / "rows.jsonl").write_text(""), "changed"),
        (lambda path: (path / "rows.jsonl").unlink(), "removed"),
        (lambda path: path.rename(path.with_name("moved")), "removed"),
    ],
)
def test_rows_that_somebody_touches_meanwhile_end_the_study(tmp_path, harm, word):
    path = tmp_path / "run"
    with open_folder(path) as folder:
        folder.append([make_row("a")])
        harm(path)
        for use in (lambda: folder.append([make_row("b")]), folder.rows):
            with pytest.raises(UserError, match=rf"rows\.jsonl' was {word} by somebody else .*run the same command"):
                use()


def test_paths_that_are_not_utf8_survive(tmp_path):
    odd = os.fsdecode(b"m\xff\xe9")
    with open_folder(tmp_path, provenance={"path": odd, "name": "Zo\u00eb"}) as folder:
        folder.append([make_row(odd)])
        folder.note({"more": [odd]})
    run = read_run(tmp_path)
    assert run.provenance == {"path": odd, "name": "Zo\u00eb", "more": [odd]}
    assert names(run.rows) == [odd]
    assert "Zo\u00eb" in (tmp_path / "run.json").read_text(encoding="utf-8")
    open_folder(tmp_path, inputs=Inputs(texts={odd: f"sha-{odd}"})).close()


def test_fresh_moves_aside_and_deletes_nothing(tmp_path):
    with open_folder(tmp_path) as folder:
        folder.append([make_row("a")])
    (tmp_path / "figure2.png").write_bytes(b"png")
    (tmp_path / "notes.txt").write_text("mine")
    for number, spec in enumerate([replace(SPEC, seed=1), replace(SPEC, seed=2)], start=1):
        with open_folder(tmp_path, spec, fresh=True) as folder:
            assert list(folder.rows()) == []
        assert (tmp_path / f"old-{number}" / "run.json").exists()
    assert names(read_run(tmp_path / "old-1").rows) == ["a"]
    assert (tmp_path / "old-1" / "figure2.png").exists()
    assert (tmp_path / "notes.txt").exists()
    assert read_run(tmp_path).spec.seed == 2


def test_fresh_in_a_folder_without_a_run_moves_nothing(tmp_path):
    (tmp_path / "mine.csv").write_text("x")
    open_folder(tmp_path, fresh=True).close()
    assert (tmp_path / "mine.csv").exists()
    assert not (tmp_path / "old-1").exists()


@pytest.mark.parametrize("torn", [b'{"key": "ab', b"\x00\x00\x00\n", b'{"key": "\xc3', b"{}"])
def test_a_torn_last_line_is_cut_off_and_nothing_is_glued(tmp_path, torn):
    with open_folder(tmp_path) as folder:
        folder.append([make_row("a")])
    with open(tmp_path / "rows.jsonl", "ab") as file:
        file.write(torn)
    assert names(read_run(tmp_path).rows) == ["a"]
    assert (tmp_path / "rows.jsonl").read_bytes().endswith(torn)  # reading repairs nothing
    with open_folder(tmp_path) as folder:
        folder.append([make_row("b")])
    assert names(read_run(tmp_path).rows) == ["a", "b"]


ODD = [b"[" * 200_000 + b"\n", b'{"kl":' + b"[" * 200_000 + b"]" * 200_000 + b"}\n", b"9" * 5000 + b"\n", b"null\n"]


@pytest.mark.parametrize("bad", [b"not json\n", b'{"kl": [NaN]}\n', b"\n", b"\xff\n", *ODD])
def test_a_corrupt_line_in_the_middle_is_named(tmp_path, bad):
    with open_folder(tmp_path) as folder:
        folder.append([make_row("a"), make_row("b")])
    lines = (tmp_path / "rows.jsonl").read_bytes().splitlines(keepends=True)
    broken = lines[0] + bad + lines[1]
    (tmp_path / "rows.jsonl").write_bytes(broken)
    for read in (read_run, open_folder):
        with pytest.raises(UserError, match=r"rows\.jsonl.* line 2"):
            read(tmp_path)
    assert (tmp_path / "rows.jsonl").read_bytes() == broken


def test_a_row_of_another_run_is_named(tmp_path):
    with open_folder(tmp_path) as folder:
        folder.append([make_row("a")])
    with open(tmp_path / "rows.jsonl", "a") as file:
        file.write(dumps_row(make_row("b", key=row_key("another", "b", "entropy"))) + "\n")
    with pytest.raises(UserError, match=r"line 2.*another run"):
        read_run(tmp_path)


WRONG = [
    *({name: value} for name in ROW_FIELDS if name != "reason" for value in ({}, {"a": 1}, [[]], [{}], [None], True)),
    *({name: None} for name in ROW_FIELDS if name not in ("reason", "kept_counts")),  # null in mode "remove"
    *({name: 5} for name in ("key", "document", "document_sha", "selector", "mode", "status", "removed", "kl_mean")),
    *({name: "5"} for name in ("n_tokens", "n_removed", "seconds", "kept_fraction", "removed_fraction")),
]


@pytest.mark.parametrize("change", WRONG, ids=str)
def test_a_line_edited_by_hand_is_named(tmp_path, change):
    with open_folder(tmp_path) as folder:
        folder.append([make_row("a"), make_row("b")])
    first, second = (tmp_path / "rows.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text(first + "\n" + json.dumps(json.loads(second) | change) + "\n" + first + "\n")
    for read in (read_run, open_folder):
        with pytest.raises(UserError, match=r"rows\.jsonl', line 2, is no row of this run"):
            read(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "[" * 200_000, '{"hash": 1, "spec": {}, "provenance": {}, "resumed": []}']
)
def test_a_corrupt_header_is_named(tmp_path, text):
    open_folder(tmp_path).close()
    (tmp_path / "run.json").write_text(text)
    for read in (read_run, open_folder):
        with pytest.raises(UserError, match=r"run\.json.*corrupt"):
            read(tmp_path)
    open_folder(tmp_path, fresh=True).close()
    assert read_run(tmp_path).spec == SPEC


def test_rows_without_a_header_are_not_adopted(tmp_path):
    with open_folder(tmp_path) as folder:
        folder.append([make_row("a")])
    (tmp_path / "run.json").unlink()
    with pytest.raises(UserError, match=r"no run\.json"):
        open_folder(tmp_path)
    open_folder(tmp_path, fresh=True).close()
    assert (tmp_path / "old-1" / "rows.jsonl").exists()


def test_failed_rows_are_kept_aside_and_tried_again(tmp_path):
    for number in (1, 2):
        with open_folder(tmp_path) as folder:
            assert len(folder.done()) == number - 1
            good = make_row(f"good-{number}")
            folder.append([make_row("bad", status="failed", reason=f"try {number}"), good])
            assert good["key"] in folder.done()
            assert make_row("bad")["key"] not in folder.done()
            with pytest.raises(ValueError, match="already"):  # the file never has a key twice
                folder.append([make_row("bad")])
    with open_folder(tmp_path) as folder:
        folder.append([make_row("bad")])
        assert names(folder.rows()) == ["good-1", "good-2", "bad"]
    for number in (1, 2):
        (line,) = (tmp_path / f"failed-{number}.jsonl").read_text().splitlines()
        assert json.loads(line)["reason"] == f"try {number}"


def test_a_repeated_line_is_moved_aside(tmp_path):
    with open_folder(tmp_path) as folder:
        folder.append([make_row("a"), make_row("b")])
    text = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(text + text.splitlines()[0] + "\n")
    with open_folder(tmp_path) as folder:
        assert names(folder.rows()) == ["a", "b"]
    assert len((tmp_path / "failed-1.jsonl").read_text().splitlines()) == 1


def test_append_refuses_what_breaks_the_file(tmp_path):
    with open_folder(tmp_path) as folder:
        folder.append([make_row("a")])
        bad = [
            [make_row("a")],  # a duplicate of the file
            [make_row("b"), make_row("b")],  # a duplicate within one call
            [{"key": "x"}],
            [make_row("b", kl=[math.nan] * 4)],
            [make_row("b"), make_row("c", key="0" * 32)],
        ]
        for rows in bad:
            with pytest.raises(ValueError):
                folder.append(rows)
        with pytest.raises(UserError, match="other tokens"):
            folder.append([make_row("a", "random", document_sha="edited")])
        folder.append([make_row("b")])  # nothing of the refused calls was remembered
    assert names(read_run(tmp_path).rows) == ["a", "b"]


def test_the_rows_of_one_call_are_one_write(tmp_path, monkeypatch):
    with open_folder(tmp_path) as folder:
        sizes = []
        real = os.fsync
        monkeypatch.setattr(os, "fsync", lambda fd: (sizes.append(os.fstat(fd).st_size), real(fd)))
        folder.append([make_row(str(i)) for i in range(5)])
        assert sizes == [(tmp_path / "rows.jsonl").stat().st_size]


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    with open_folder(tmp_path) as folder:
        folder.append([make_row("a")])
        good = (tmp_path / "rows.jsonl").read_bytes()

        def full(fd):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(CannotWrite, match=r"rows.jsonl' could not be written \(No space left.*make room"):
                folder.append([make_row("b")])
            with pytest.raises(CannotWrite, match=r"run.json' could not be written \(No space left.*make room"):
                folder.note({"late": 1})
        assert (tmp_path / "rows.jsonl").read_bytes() == good
        folder.append([make_row("b")])
    assert names(read_run(tmp_path).rows) == ["a", "b"]


def test_a_disk_that_is_full_from_the_start(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"cannot be written \(No space left on device\); give another --out"):
            open_folder(tmp_path)
    with open_folder(tmp_path) as folder:
        folder.append([make_row("a")])


def test_one_folder_has_one_writer_and_any_readers(tmp_path):
    with open_folder(tmp_path) as folder:
        with pytest.raises(UserError, match="in use") as caught:
            open_folder(tmp_path)
        assert str(tmp_path) in str(caught.value)
        folder.append([make_row("a")])
        assert names(read_run(tmp_path).rows) == ["a"]
    open_folder(tmp_path).close()


def test_a_system_without_locks_warns_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "fcntl", None)
    with pytest.warns(UserWarning, match="one process only"), open_folder(tmp_path) as folder:
        folder.append([make_row("a")])
    assert names(read_run(tmp_path).rows) == ["a"]


def test_a_folder_that_cannot_be_is_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(UserError, match="is a file"):
        open_folder(file)
    with pytest.raises(UserError, match="cannot be written"):
        open_folder(file / "below")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot be written"):
        open_folder(tmp_path)
    tmp_path.chmod(0o700)


def test_reading_what_is_no_run(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match="no run folder"):
            read_run(path)
    open_folder(tmp_path).close()
    assert read_run(tmp_path).rows == []
    (tmp_path / "rows.jsonl").unlink()
    assert read_run(tmp_path / "run.json").rows == []


def test_the_newest_run_is_the_one_written_last(tmp_path):
    with pytest.raises(UserError, match="measure"):
        newest_run(tmp_path / "runs")
    for name in ("b", "a", "shards/1-of-2", "shards/2-of-2", "c"):
        with open_folder(tmp_path / "runs" / name) as folder:
            folder.append([make_row(name)])
    (tmp_path / "runs" / "empty").mkdir()

    def written_at(name: str, seconds: int):
        for file in (tmp_path / "runs" / name).glob("r*"):
            os.utime(file, (seconds, seconds))

    for seconds, name in enumerate(("b", "a", "shards/1-of-2", "shards/2-of-2", "c"), start=1000):
        written_at(name, seconds)
    assert newest_run(tmp_path / "runs").name == "c"
    written_at("shards/1-of-2", 3000)
    assert newest_run(tmp_path / "runs").name == "shards"
    os.utime(tmp_path / "runs" / "a" / "rows.jsonl", (4000, 4000))
    assert newest_run(tmp_path / "runs").name == "a"


def test_shards_are_found_and_old_runs_are_not(tmp_path):
    for name in ("2-of-2", "1-of-2"):
        open_folder(tmp_path / name).close()
    open_folder(tmp_path / "1-of-2", fresh=True).close()
    open_folder(tmp_path / "old-7").close()
    assert [path.name for path in find_runs(tmp_path)] == ["1-of-2", "2-of-2"]
    assert find_runs(tmp_path / "1-of-2") == [tmp_path / "1-of-2"]
    assert find_runs(tmp_path / "absent") == [tmp_path / "absent"]


WRITER = """
import sys, time
sys.path.insert(0, sys.argv[2])
from test_runs import SPEC, make_row, open_folder
print("started", flush=True)
with open_folder(sys.argv[1]) as folder:
    for number in range(60):
        rows = [make_row(str(number), s) for s in ("attention", "entropy", "none")]
        if number % 20 == 7:
            rows[0] = make_row(str(number), "attention", status="skipped", reason="short")
        missing = [row for row in rows if row["key"] not in folder.done()]
        time.sleep(0.0015)
        folder.append(missing)
"""


def test_kill_at_any_moment_and_start_again(tmp_path):
    """Twelve kills; the rows are then those of an undisturbed run, in its order."""

    def start(folder):
        command = [sys.executable, "-c", WRITER, str(tmp_path / folder), str(Path(__file__).parent)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        process.stdout.readline()
        return process

    assert start("undisturbed").wait(timeout=60) == 0
    moments = random.Random(0)
    kills = 0
    for _ in range(12):
        process = start("killed")
        time.sleep(moments.uniform(0, 0.06))
        process.send_signal(signal.SIGKILL)
        kills += process.wait(timeout=60) == -signal.SIGKILL
        process.stdout.close()
    assert kills >= 6
    assert start("killed").wait(timeout=60) == 0
    expected = read_run(tmp_path / "undisturbed").rows
    assert len(expected) == 180
    assert read_run(tmp_path / "killed").rows == expected


def test_a_spec_edited_by_hand_is_corrupt(tmp_path):
    spec = RunSpec(model="m", dtype="float32", tokenizer="t", data="local")
    with RunFolder.open(tmp_path / "run", spec, {}):
        pass
    file = tmp_path / "run" / "run.json"
    file.write_text(file.read_text().replace('"fraction": "0.01"', '"fraction": "0.5"'))
    with pytest.raises(UserError, match="is corrupt"):
        read_run(tmp_path / "run")
