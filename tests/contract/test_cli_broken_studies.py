"""Studies from the command line that fail, are interrupted or cannot be written."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
from tiny_runs import (
    ENVIRONMENT,
    Command,
    Script,
    by_name,
    changed,
    measuring,
    read_rows,
    refusal,
    write_documents,
)


def test_the_hollow_model_is_noticed_when_weights_load(studied, cli):
    assert "lacks 29 weights of its own configuration" in refusal(*cli(*measuring(studied, model="hollow")))


def test_damaged_rows_are_named_before_weights_load(studied, cli, tmp_path, monkeypatch):
    command = measuring(studied, "--selector", "none")
    assert cli(*command)[0] == 0
    rows = tmp_path / "run" / "rows.jsonl"
    rows.write_text("{" + rows.read_text())
    monkeypatch.setattr("forward_influence.models.load_model", None)
    for more in ([], ["--dry-run"]):
        assert "rows.jsonl' is corrupt in line 1" in refusal(*cli(*command, *more))
    (tmp_path / "run" / "run.json").write_text("{")
    assert "run.json' is corrupt" in refusal(*cli(*command))
    assert "run.json' is corrupt" in refusal(*cli("show", "run"))


OWN = """
from dataclasses import dataclass
from forward_influence import Selector

@dataclass(frozen=True)
class First(Selector):
    start: int = 4

    def select(self, signals, count, document):
        return range(self.start, self.start + count)

class Broken(Selector):
    def select(self, signals, count, document):
        raise RuntimeError("always\\n  so")
"""


def test_own_class_in_the_current_folder_with_the_installed_script(studied, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    script = Script(measuring(studied, "--selector", "own:First:start=6", "--quiet"), tmp_path)
    assert (script.wait(), script.stderr) == (0, "")
    rows = by_name(read_rows(tmp_path / "run"))
    assert rows["d0", "own:First:start=6"]["removed"] == [6, 7, 8, 9, 10]
    facts = json.loads((tmp_path / "run" / "run.json").read_text())["provenance"]
    assert facts["command"][:2] == ["forward-influence", "measure"]


def test_a_module_in_the_current_folder_hides_no_library(studied, tmp_path):
    (tmp_path / "datasets.py").write_text("raise ImportError('hides a library')")
    running = Command([*changed(measuring(studied), "--data", "arxiv"), "--offline"], tmp_path)
    code = running.wait()  # before stderr is whole
    assert "offline was asked for" in refusal(code, running.stdout, running.stderr)


def test_exit_code_1_when_everything_failed_and_debug_shows_where(studied, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    command = measuring(studied, "--selector", "own:Broken")
    failed = Command(command, tmp_path)
    assert failed.wait() == 1
    assert failed.stdout == "0 documents measured, 1 skipped, 3 failed (3 rows; forward-influence show says why): run\n"
    assert "Document 'd0' failed (RuntimeError: always so); going on." in failed.stderr
    assert "Traceback" not in failed.stderr
    told = Command(["show", "run"], tmp_path)
    assert told.wait() == 0
    assert "0 measured, 1 skipped, 3 failed of 4 planned" in told.stdout
    assert "failed     RuntimeError: always so" in told.stdout
    assert "skipped    shorter than 76 tokens" in told.stdout
    plotted = Command(["plot", "run"], tmp_path)
    assert plotted.wait() == 2
    assert "(1 skipped, 3 failed); `forward-influence show` says why." in plotted.stderr
    debug = Command([*command, "--debug"], tmp_path)
    assert debug.wait() == 1
    assert "Traceback" in debug.stderr and 'raise RuntimeError("always' in debug.stderr


LEAVING = """
import sys
from forward_influence import Selector

class Leaves(Selector):
    def select(self, signals, count, document):
        sys.exit()
"""


def test_a_selector_that_leaves_is_a_failure(studied, tmp_path):
    (tmp_path / "own.py").write_text(LEAVING)
    command = measuring(studied, "--selector", "own:Leaves")
    left = Command(command, tmp_path)
    assert left.wait() == 1
    assert "0 documents measured, 1 skipped, 3 failed" in left.stdout
    assert "Document 'd0' failed (SystemExit); going on." in left.stderr
    debug = Command([*command, "--debug"], tmp_path)
    assert debug.wait() == 1
    assert "a selector's code tried to end the program (SystemExit)" in debug.stderr


def test_edited_code_of_a_selector_is_not_mixed(studied, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    command = measuring(studied, "--selector", "own:First", "--quiet")
    assert Command(command, tmp_path).wait() == 0
    again = Command(command, tmp_path)
    assert again.wait() == 0
    before = (tmp_path / "run" / "rows.jsonl").read_bytes()
    (tmp_path / "own.py").write_text(OWN.replace("range(self.start, self.start + count)", "[20]"))
    for more in ([], ["--dry-run"], ["--limit", "1"]):
        edited = Command([*command, *more], tmp_path)
        code = edited.wait()
        assert "The code of selector 'own:First' is not that of its rows in 'run'" in (
            refusal(code, edited.stdout, edited.stderr)
        )
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == before
    other = Command([*command, "--fresh"], tmp_path)
    assert other.wait() == 0
    assert by_name(read_rows(tmp_path / "run"))["d0", "own:First"]["removed"] == [20]
    joined = Command(["show", "run", "run/old-1"], tmp_path)
    code = joined.wait()
    assert "The code of selector 'own:First'" in refusal(code, joined.stdout, joined.stderr)


def test_a_study_whose_rows_are_taken_away_is_none(studied, cli, tmp_path, monkeypatch):
    from forward_influence import document

    usual = document.compare_rows

    def measured(*arguments, **options):
        if (tmp_path / "run").exists():
            (tmp_path / "run").rename(tmp_path / "elsewhere")
        return usual(*arguments, **options)

    monkeypatch.setattr(document, "compare_rows", measured)
    assert "rows.jsonl' was removed by somebody else" in refusal(*cli(*measuring(studied, "--selector", "none")))


@pytest.mark.parametrize(("rows", "code"), [(0, 2), (1, 0), (2, 0)])
def test_a_disk_that_fills_up(rows, code, studied, cli, monkeypatch):
    """The exit code is that of a run with the rows that were written."""
    from forward_influence.runs import CannotWrite, RunFolder

    usual, left = RunFolder.append, [rows]

    def append(folder, given):
        given = list(given)
        if given and given[0]["status"] == "ok":
            if not left[0]:
                raise CannotWrite("the disk is full; make room.")
            left[0] -= 1
        usual(folder, given)

    monkeypatch.setattr(RunFolder, "append", append)
    found, out, err = cli(*measuring(studied, "--selector", "none"))
    assert found == code
    assert err.endswith("error: the disk is full; make room.\n")
    noun = "document" if rows == 1 else "documents"
    sentence = f"{rows} {noun} measured, 1 skipped, 0 failed, {3 - rows} not reached: run\n"
    assert out == (sentence if rows else "")


def test_a_disk_that_fills_up_when_all_has_failed(studied, cli, tmp_path, monkeypatch):
    from forward_influence.runs import CannotWrite, RunFolder

    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    usual = RunFolder.append

    def append(folder, given):
        given = list(given)
        if "failed" in {row["status"] for row in folder.rows()}:
            raise CannotWrite("the disk is full; make room.")
        usual(folder, given)

    monkeypatch.setattr(RunFolder, "append", append)
    code, out, err = cli(*measuring(studied, "--selector", "own:Broken"))
    sys.modules.pop("own")
    assert (code, out) == (
        1, "0 documents measured, 1 skipped, 1 failed (1 rows; forward-influence show says why), 2 not reached: run\n"
    )  # fmt: skip
    assert err.endswith("error: the disk is full; make room.\n")


def test_a_study_that_measured_nothing_is_none(studied, cli, tmp_path):
    (tmp_path / "chosen.json").write_text('{"d0": [5]}')
    command = measuring(studied, "--selector", f"positions:{tmp_path / 'chosen.json'}", "--quiet")
    results = [cli(*changed(command, "--out", f"run{part}"), "--shard", f"{part}/3") for part in (1, 2, 3)]
    assert sorted(code for code, _, _ in results) == [0, 2, 2]
    for result in results:
        if result[0]:
            assert "No document was measured (0 documents measured, " in refusal(*result)


def test_messages_that_cannot_be_shown_end_nothing(studied, tmp_path):
    """Standard error is closed, or on a full disk."""
    for number, redirection in enumerate(("2>&-", "2>/dev/full")):
        command = [Script.path(), *measuring(studied, "--selector", "none", out=f"run{number}")]
        line = f"{shlex.join(map(str, command))} {redirection}"
        done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE)
        assert (done.returncode, done.stdout.decode()) == (
            0, f"3 documents measured, 1 skipped, 0 failed: run{number}\n"
        )  # fmt: skip


def test_a_folder_whose_name_is_not_utf8(studied, tmp_path):
    name = os.fsdecode(b"run\xff")
    (tmp_path / os.fsdecode(b"docs\xff")).mkdir()
    write_documents(tmp_path / os.fsdecode(b"docs\xff") / "docs.jsonl", [100])
    command = changed(measuring(studied, "--selector", "none", out=name), "--data", os.fsdecode(b"docs\xff"))
    for line in (command, ["show", name], ["plot", name, "--format", "png"]):
        running = Command(line, tmp_path)
        assert running.wait() == 0, running.stderr
        assert "run" in running.stdout
    facts = json.loads((tmp_path / name / "run.json").read_text(encoding="utf-8"))["provenance"]
    assert name in facts["command"]


def test_interrupt_keeps_rows_and_the_same_command_goes_on(studied, tmp_path):
    write_documents(tmp_path / "many.jsonl", [100] * 100)
    command = [*changed(measuring(studied), "--data", tmp_path / "many.jsonl"), "--selector", "random"]
    running, rows = Command(command, tmp_path), tmp_path / "run" / "rows.jsonl"
    assert running.wait_for(lambda: rows.exists() and rows.read_bytes().count(b"\n") > 3)
    running.send(signal.SIGINT)
    assert running.wait() == 130
    assert running.stderr.endswith("Interrupted; finished rows are kept, and the same command goes on from there.\n")
    assert "Traceback" not in running.stderr
    assert running.stdout == ""
    before = rows.read_bytes()
    assert 3 <= len(read_rows(tmp_path / "run")) < 100
    again = Command(command, tmp_path)
    assert again.wait() == 0
    assert rows.read_bytes().startswith(before)
    assert len(by_name(read_rows(tmp_path / "run"))) == 100


def test_interrupt_while_documents_are_tokenised(studied, cli, monkeypatch):
    def interrupted(*anything):
        raise KeyboardInterrupt

    monkeypatch.setattr("forward_influence.plan.choose_documents", interrupted)
    code, out, err = cli(*measuring(studied))
    assert (code, out) == (130, "")
    assert err.endswith("Interrupted; finished rows are kept, and the same command goes on from there.\n")


def test_hub_out_of_reach_within_seconds(studied, tmp_path):
    """A real process, because sockets are closed to this one."""
    began = time.monotonic()
    away = Command(changed(measuring(studied), "--model", "some-org/some-model"), tmp_path)
    assert away.wait() == 2
    assert time.monotonic() - began < 10
    assert "'some-org/some-model' is not in the local hub cache, and http://127.0.0.1:9 cannot be reached" in (
        refusal(2, away.stdout, away.stderr)
    )


def test_a_refusal_by_the_installed_script_within_seconds(studied, tmp_path):
    script = Script(measuring(studied, "--selector", "entropyy", model="hollow"), tmp_path)
    assert "no selector 'entropyy'" in refusal(script.wait(), script.stdout, script.stderr)
    assert script.cpu_seconds < 10


def test_unforeseen_errors_are_one_line_and_debug_shows_where(studied, cli, monkeypatch):
    def broken(*anything, **more):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("forward_influence.plan.choose_documents", broken)
    code, out, err = cli(*measuring(studied))
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == (
        "error: something unforeseen happened (RuntimeError: two lines); run again with --debug to see where."
    )
    with pytest.raises(RuntimeError, match="two"):
        cli(*measuring(studied), "--debug")
