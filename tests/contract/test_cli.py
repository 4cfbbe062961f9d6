"""The command line: exit codes, one sentence for what cannot be met, and what goes to which stream."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from tiny_runs import (
    ENVIRONMENT,
    Command,
    Script,
    alike,
    arguments,
    by_name,
    read_rows,
    refusal,
    save_hollow,
    save_model,
    words,
    write_documents,
)

from forward_influence import progress

TOKENS = [120, 100, 60, 101]  # the third is too short


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Models and documents: one model can be loaded; of ``hollow`` everything is right but the weights."""
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder / "model")
    save_hollow(folder / "hollow")
    write_documents(folder / "docs.jsonl", TOKENS)
    (folder / "empty.jsonl").touch()
    (folder / "docs").mkdir()
    (folder / "docs" / "one.jsonl").write_text(json.dumps({"id": "d0", "text": words(99, 100)}))
    (folder / "docs" / "two.txt").write_text("w5 w6 " * 50)
    (folder / "bare").mkdir()
    done = Command(arguments(folder / "model", folder / "docs.jsonl", folder / "done", "--quiet"), folder)
    assert done.wait() == 0
    return folder


def measuring(tiny, *more, model="model", out="run"):
    return arguments(tiny / model, tiny / "docs.jsonl", out, *more)


def changed(command, name, value):
    command = list(command)
    command[command.index(name) + 1] = str(value)
    return command


REFUSED = {
    "unknown selector": (["--selector", "entropyy"], "no selector 'entropyy'; did you mean 'entropy'?"),
    "unknown parameter": (["--selector", "entropy:q=3"], "entropy has no parameter 'q'; it has: k"),
    "value of a parameter": (["--selector", "infokv:alpha=2"], "alpha is 2.0; it must be from 0"),
    "class that is not there": (["--selector", "nowhere:Mine"], "'nowhere:Mine' cannot be imported"),
    "position outside": (["--selector", "positions:at=60"], "positions go from 0 to 59"),
    "missing data": (["--data", "none.jsonl"], "'none.jsonl' is neither a corpus"),
    "empty data": (["--data", "{tiny}/empty.jsonl"], "holds no usable document"),
    "folder without data": (["--data", "{tiny}/bare"], "holds no .jsonl, .parquet or .txt file; rename or convert"),
    "data of another kind": (["--data", "{tiny}/model/config.json"], "ends in '.json', not .jsonl"),
    "corpus out of reach": (["--data", "arxiv", "--offline"], "offline was asked for"),
    "out is a file": (["--out", "{tiny}/docs.jsonl"], "which is a file; give a folder"),
    "out with a name too long": (["--out", "x" * 300], "cannot be looked at (File name too long); give another path"),
    "out below a file": (["--out", "{tiny}/docs.jsonl/run"], "docs.jsonl' is a file; give another --out"),
    "absent device": (["--device", "cuda:7"], "device 'cuda:7' cannot be used"),
    "unknown dtype": (["--dtype", "float8"], "dtype 'float8' is unknown; choose auto, float32"),
    "no horizon": (["--horizon", 0], "horizon is 0; it must be a whole number of at least 1"),
    "no chunk": (["--chunk", 0], "chunk is 0"),
    "no batch": (["--batch", 0], "batch is 0"),
    "no limit": (["--limit", 0], "limit is 0; it must be a whole number of at least 1 (documents)"),
    "no number": (["--limit", "abc"], "(given: 'abc')"),
    "prefix beyond the context": (["--prefix", 256], "prefix is 256, but hollow has a context of 256 tokens"),
    "prefix without candidates": (["--prefix", 10], "but 0 are candidates after 2 sinks and 8 recent ones"),
    "unknown model": (["--model", "smollm"], "'smollm' is no existing folder or .gguf file, no alias (smollm2-135m"),
    "model that is no model": (["--model", "{tiny}/docs"], "has no config.json"),
    "tokenizer": (["--tokenizer", "nowhere"], "tokenizer 'nowhere' is neither a folder nor a hub id"),
    "no document is long enough": (["--prefix", 200], "(prefix 200), and the longest has 120; use a smaller prefix,"),
    "fraction 0": (["--fraction", 0], "fraction '0' is not a number above 0 and at most 1; try 0.01."),
    "fraction 1.5": (["--fraction", 1.5], "fraction '1.5' is not a number"),
    "fraction abc": (["--fraction", "abc"], "fraction 'abc' is not a number"),
    "everything removed": (["--fraction", 1], "60 of 60 prefix positions are to be removed"),
    "shard": (["--shard", "3"], "shard '3' is not of the form 3/16"),
    "shard without documents": (["--shard", "4/4"], "there are fewer than 4; use fewer shards"),
    "extension": (["--extend-context", "stretch"], "extend_context 'stretch' is unknown; the one method is 'yarn'"),
    "unknown option": (["--selektor", "entropy"], "No such option: --selektor"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_requests_that_cannot_be_met(case, tiny, cli, tmp_path):
    """Before weights load: those of this model could not be loaded."""
    more, sentence = REFUSED[case]
    command = measuring(tiny, model="hollow")
    for name, value in zip(more[::2], more[1::2]):
        value = str(value).replace("{tiny}", str(tiny))
        command = changed(command, name, value) if name in command else [*command, name, value]
    command += [] if len(more) % 2 == 0 else [more[-1]]
    began = time.process_time()
    assert sentence in refusal(*cli(*command))
    assert time.process_time() - began < 5  # with the imports, that is less than 10
    assert list(tmp_path.iterdir()) == []


def test_the_hollow_model_is_noticed_when_weights_load(tiny, cli):
    assert "lacks 29 weights of its own configuration" in refusal(*cli(*measuring(tiny, model="hollow")))


def test_a_dry_run_needs_no_weights(tiny, cli):
    code, out, err = cli(*measuring(tiny, "--dry-run", model="hollow"))
    assert code == 0
    assert "12 to measure, 0 there already" in out
    assert err == "Corpus 'local': 4 documents from 1 file.\n"


def test_damaged_rows_are_named_before_weights_load(tiny, cli, tmp_path, monkeypatch):
    command = measuring(tiny, "--selector", "none")
    assert cli(*command)[0] == 0
    rows = tmp_path / "run" / "rows.jsonl"
    rows.write_text("{" + rows.read_text())
    monkeypatch.setattr("forward_influence.models.load_model", None)
    for more in ([], ["--dry-run"]):
        assert "rows.jsonl' is corrupt in line 1" in refusal(*cli(*command, *more))
    (tmp_path / "run" / "run.json").write_text("{")
    assert "run.json' is corrupt" in refusal(*cli(*command))
    assert "run.json' is corrupt" in refusal(*cli("show", "run"))


def test_results_and_notices_have_their_streams(tiny, cli, tmp_path):
    code, out, err = cli(*measuring(tiny, "--selector", "none", "--selector", "none", "--limit", 9))
    assert code == 0
    assert out == "3 documents measured, 1 skipped, 0 failed: run\n"
    lines = err.splitlines()
    assert lines[0] == "Corpus 'local': 4 documents from 1 file."
    assert lines[1] == "9 documents were asked for; 3 of this corpus are long enough."
    assert re.fullmatch(r"Expected: about 1 s; memory 1 MiB .* free; 1 MiB on disk\.", lines[2])
    assert len(lines) == 3
    write_documents(tmp_path / "one.jsonl", [120])
    one = changed(measuring(tiny, "--limit", 2, "--dry-run"), "--data", tmp_path / "one.jsonl")
    assert "2 documents were asked for; 1 of this corpus is long enough." in cli(*one)[2]
    assert {row["selector"] for row in read_rows(tmp_path / "run")} == {"none"}


def test_data_may_be_folders_and_several(tiny, cli, tmp_path):
    command = changed(measuring(tiny, "--selector", "none"), "--data", tiny / "docs")
    code, out, err = cli(*command, "--data", tiny / "docs.jsonl")
    assert code == 0
    assert out.startswith("5 documents measured, 1 skipped")
    assert "from 3 files" in err


def test_progress_is_a_plain_line_now_and_then(tiny, cli, monkeypatch):
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    same = ("--selector", "attention:window=8", "--selector", "snapkv:window=8")  # one set, computed once
    _, _, err = cli(*measuring(tiny, *same))
    shown = [line for line in err.splitlines() if line.startswith("document ")]
    assert re.fullmatch(r"document 1 of 3: \d+% done, \d+ s left", shown[0])
    assert "document 3 of 3: 100% done, 1 s left" in shown
    assert "\r" not in err


def test_quiet_and_resumed(tiny, cli, tmp_path):
    code, out, err = cli(*measuring(tiny, "--quiet"))
    assert (code, err) == (0, "")
    before = (tmp_path / "run" / "rows.jsonl").read_bytes()
    assert cli(*measuring(tiny, "--quiet")) == (0, out, "")
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == before
    alike(read_rows(tmp_path / "run"), read_rows(tiny / "done"))


def test_no_library_writes_on_its_own(tiny):
    """The fixture's run was quiet; its streams were those of a process, not of this test."""
    assert (tiny / "0.stderr").read_text() == ""
    assert (tiny / "0.stdout").read_text() == f"3 documents measured, 1 skipped, 0 failed: {tiny / 'done'}\n"


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


def test_own_class_in_the_current_folder_with_the_installed_script(tiny, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    script = Script(measuring(tiny, "--selector", "own:First:start=6", "--quiet"), tmp_path)
    assert (script.wait(), script.stderr) == (0, "")
    rows = by_name(read_rows(tmp_path / "run"))
    assert rows["d0", "own:First:start=6"]["removed"] == [6, 7, 8, 9, 10]
    facts = json.loads((tmp_path / "run" / "run.json").read_text())["provenance"]
    assert facts["command"][:2] == ["forward-influence", "measure"]


def test_a_module_in_the_current_folder_hides_no_library(tiny, tmp_path):
    (tmp_path / "datasets.py").write_text("raise ImportError('hides a library')")
    running = Command([*changed(measuring(tiny), "--data", "arxiv"), "--offline"], tmp_path)
    code = running.wait()  # before stderr is whole
    assert "offline was asked for" in refusal(code, running.stdout, running.stderr)


def test_exit_code_1_when_everything_failed_and_debug_shows_where(tiny, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    command = measuring(tiny, "--selector", "own:Broken")
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


def test_a_selector_that_leaves_is_a_failure(tiny, tmp_path):
    (tmp_path / "own.py").write_text(LEAVING)
    command = measuring(tiny, "--selector", "own:Leaves")
    left = Command(command, tmp_path)
    assert left.wait() == 1
    assert "0 documents measured, 1 skipped, 3 failed" in left.stdout
    assert "Document 'd0' failed (SystemExit); going on." in left.stderr
    debug = Command([*command, "--debug"], tmp_path)
    assert debug.wait() == 1
    assert "a selector's code tried to end the program (SystemExit)" in debug.stderr


def test_edited_code_of_a_selector_is_not_mixed(tiny, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    command = measuring(tiny, "--selector", "own:First", "--quiet")
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


def test_a_study_whose_rows_are_taken_away_is_none(tiny, cli, tmp_path, monkeypatch):
    from forward_influence import document

    usual = document.compare_rows

    def measured(*arguments, **options):
        if (tmp_path / "run").exists():
            (tmp_path / "run").rename(tmp_path / "elsewhere")
        return usual(*arguments, **options)

    monkeypatch.setattr(document, "compare_rows", measured)
    assert "rows.jsonl' was removed by somebody else" in refusal(*cli(*measuring(tiny, "--selector", "none")))


@pytest.mark.parametrize(("rows", "code"), [(0, 2), (1, 0), (2, 0)])
def test_a_disk_that_fills_up(rows, code, tiny, cli, monkeypatch):
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
    found, out, err = cli(*measuring(tiny, "--selector", "none"))
    assert found == code
    assert err.endswith("error: the disk is full; make room.\n")
    noun = "document" if rows == 1 else "documents"
    sentence = f"{rows} {noun} measured, 1 skipped, 0 failed, {3 - rows} not reached: run\n"
    assert out == (sentence if rows else "")


def test_a_disk_that_fills_up_when_all_has_failed(tiny, cli, tmp_path, monkeypatch):
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
    code, out, err = cli(*measuring(tiny, "--selector", "own:Broken"))
    sys.modules.pop("own")
    assert (code, out) == (
        1, "0 documents measured, 1 skipped, 1 failed (1 rows; forward-influence show says why), 2 not reached: run\n"
    )  # fmt: skip
    assert err.endswith("error: the disk is full; make room.\n")


def test_a_study_that_measured_nothing_is_none(tiny, cli, tmp_path):
    (tmp_path / "chosen.json").write_text('{"d0": [5]}')
    command = measuring(tiny, "--selector", f"positions:{tmp_path / 'chosen.json'}", "--quiet")
    results = [cli(*changed(command, "--out", f"run{part}"), "--shard", f"{part}/3") for part in (1, 2, 3)]
    assert sorted(code for code, _, _ in results) == [0, 2, 2]
    for result in results:
        if result[0]:
            assert "No document was measured (0 documents measured, " in refusal(*result)


def test_messages_that_cannot_be_shown_end_nothing(tiny, tmp_path):
    """Standard error is closed, or on a full disk."""
    for number, redirection in enumerate(("2>&-", "2>/dev/full")):
        command = [Script.path(), *measuring(tiny, "--selector", "none", out=f"run{number}")]
        line = f"{shlex.join(map(str, command))} {redirection}"
        done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE)
        assert (done.returncode, done.stdout.decode()) == (
            0, f"3 documents measured, 1 skipped, 0 failed: run{number}\n"
        )  # fmt: skip


def test_a_folder_whose_name_is_not_utf8(tiny, tmp_path):
    name = os.fsdecode(b"run\xff")
    (tmp_path / os.fsdecode(b"docs\xff")).mkdir()
    write_documents(tmp_path / os.fsdecode(b"docs\xff") / "docs.jsonl", [100])
    command = changed(measuring(tiny, "--selector", "none", out=name), "--data", os.fsdecode(b"docs\xff"))
    for line in (command, ["show", name], ["plot", name, "--format", "png"]):
        running = Command(line, tmp_path)
        assert running.wait() == 0, running.stderr
        assert "run" in running.stdout
    facts = json.loads((tmp_path / name / "run.json").read_text(encoding="utf-8"))["provenance"]
    assert name in facts["command"]


def test_interrupt_keeps_rows_and_the_same_command_goes_on(tiny, tmp_path):
    write_documents(tmp_path / "many.jsonl", [100] * 100)
    command = [*changed(measuring(tiny), "--data", tmp_path / "many.jsonl"), "--selector", "random"]
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


def test_interrupt_while_documents_are_tokenised(tiny, cli, monkeypatch):
    def interrupted(*anything):
        raise KeyboardInterrupt

    monkeypatch.setattr("forward_influence.plan.choose_documents", interrupted)
    code, out, err = cli(*measuring(tiny))
    assert (code, out) == (130, "")
    assert err.endswith("Interrupted; finished rows are kept, and the same command goes on from there.\n")


def test_hub_out_of_reach_within_seconds(tiny, tmp_path):
    """A real process, because sockets are closed to this one."""
    began = time.monotonic()
    away = Command(changed(measuring(tiny), "--model", "some-org/some-model"), tmp_path)
    assert away.wait() == 2
    assert time.monotonic() - began < 10
    assert "'some-org/some-model' is not in the local hub cache, and http://127.0.0.1:9 cannot be reached" in (
        refusal(2, away.stdout, away.stderr)
    )


def test_a_refusal_by_the_installed_script_within_seconds(tiny, tmp_path):
    script = Script(measuring(tiny, "--selector", "entropyy", model="hollow"), tmp_path)
    assert "no selector 'entropyy'" in refusal(script.wait(), script.stdout, script.stderr)
    assert script.cpu_seconds < 10


def test_unforeseen_errors_are_one_line_and_debug_shows_where(tiny, cli, monkeypatch):
    def broken(*anything, **more):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("forward_influence.plan.choose_documents", broken)
    code, out, err = cli(*measuring(tiny))
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == (
        "error: something unforeseen happened (RuntimeError: two lines); run again with --debug to see where."
    )
    with pytest.raises(RuntimeError, match="two"):
        cli(*measuring(tiny), "--debug")


# The other commands


def test_show(tiny, cli, tmp_path):
    code, out, err = cli("show", tiny / "done")
    assert (code, err) == (0, "")
    assert "12 measured, 4 skipped, 0 failed of 16 planned" in out
    assert "prefix 60, horizon 40, fraction 0.09, candidates 2 to 51, chunk 16, seed 0" in out
    for name in ("attention", "entropy", "random", "none"):
        assert re.search(rf"^ *{name} ", out, re.MULTILINE)
    code, out, _ = cli("show", tiny / "done", "--export", tmp_path / "table.csv")
    assert code == 0
    assert (tmp_path / "table.csv").read_text().startswith("document,selector,")


def test_show_doubts_intervals_from_few_documents(tiny, cli):
    _, out, _ = cli("show", tiny / "done")
    assert out.rstrip().endswith(
        "\nIntervals from 3 documents are not to be trusted, narrow or not: measure 10 or more."
    )


@pytest.mark.parametrize(
    ("count", "words"), [(1, "One document gives no interval"), (9, "from 9 documents"), (10, None)]
)
def test_how_few_documents_are_few(count, words):
    from forward_influence.analysis.stats import few_documents

    told = few_documents(count)
    assert told is None if words is None else words in told


def test_show_lists_different_runs_in_a_folder(tiny, cli, tmp_path):
    runs = tmp_path / "runs"
    shutil.copytree(tiny / "done", runs / "first")
    shutil.copytree(tiny / "done", runs / "shards" / "one")
    assert "12 measured" in cli("show", runs / "shards")[1]
    code, out, _ = cli("show", runs)  # one run in parts
    assert (code, "12 measured" in out) == (0, True)
    assert cli(*changed(measuring(tiny, "--selector", "none", out="runs/second"), "--horizon", 30))[0] == 0
    (runs / "broken").mkdir()
    (runs / "broken" / "run.json").write_text("{")
    (runs / "notes").mkdir()
    code, out, _ = cli("show", runs)
    lines = out.splitlines()
    assert code == 0
    assert len(lines) == 6
    for name, told in (("first", "model, 12 of 16 rows measured"), ("shards", "model, 12 of 16 rows measured"),
                       ("second", "model, 3 of 4 rows measured"), ("broken", "cannot be read: ")):  # fmt: skip
        (line,) = (line for line in lines if line.startswith(f"{runs / name}  "))
        assert told in line
        assert re.search(r", \d{4}-\d\d-\d\d \d\d:\d\d$", line)
    assert "cannot be joined" in refusal(*cli("plot", runs / "first", runs / "second"))


def test_show_has_each_band_once(tiny, cli):
    _, out, _ = cli("show", tiny / "done")  # a horizon of 40: near and far are the same offsets
    (header,) = (line.split() for line in out.splitlines() if "n_removed" in line)
    assert len(header) == len(set(header))
    assert re.findall(r"kl \d+-\d+", out) == ["kl 0-40"]


def test_show_has_the_near_and_the_far_band(tiny, cli, tmp_path):
    write_documents(tmp_path / "long.jsonl", [256])
    command = changed(
        changed(measuring(tiny, "--selector", "none"), "--data", tmp_path / "long.jsonl"), "--horizon", 196
    )
    assert cli(*command)[0] == 0
    _, out, _ = cli("show", "run")
    assert re.findall(r"kl \d+-\d+", out) == ["kl 0-128", "kl 128-196"]


def test_show_follow_ends_with_a_whole_run(tiny, cli):
    code, out, _ = cli("show", tiny / "done", "--follow")
    assert code == 0
    assert len(re.findall(r"^d\d  \w+  mean KL \S+ nats$", out, re.MULTILINE)) == 12
    assert len(re.findall(r"^d2  \w+  skipped: shorter than 76 tokens$", out, re.MULTILINE)) == 4


def test_show_follow_tells_rows_once_as_they_come(tiny, cli, tmp_path, monkeypatch):
    source, target = tiny / "done", tmp_path / "growing"
    lines = (source / "rows.jsonl").read_text().splitlines(keepends=True)
    target.mkdir()
    (target / "run.json").write_text((source / "run.json").read_text())
    (target / "rows.jsonl").write_text("".join(lines[:5]))
    waits = []

    def wait(seconds):
        waits.append(seconds)
        (target / "rows.jsonl").write_text("".join(lines[: 5 + 6 * len(waits)]))

    monkeypatch.setattr("forward_influence.cli.show.time.sleep", wait)
    code, out, _ = cli("show", target, "--follow")
    assert code == 0
    assert len(waits) == 2
    assert len(re.findall(r"^d\d  \w+  (mean KL|skipped)", out, re.MULTILINE)) == 16


def test_plot(tiny, cli, tmp_path):
    code, out, err = cli("plot", tiny / "done", "--out", tmp_path / "mine", "--selector", "entropy")
    assert (code, err) == (0, "Intervals from 3 documents are not to be trusted, narrow or not: measure 10 or more.\n")
    names = {"mine.png", "mine.pdf", "mine.svg", "mine.csv"}
    assert {path.name for path in tmp_path.iterdir()} == {line.rpartition("/")[2] for line in out.splitlines()}
    assert {path.name for path in tmp_path.iterdir()} >= names
    assert "no run folder" in refusal(*cli("plot", tmp_path / "elsewhere"))
    assert "There is no run under 'runs'" in refusal(*cli("plot"))
    for line in (["plot", "x" * 300], ["show", "x" * 300], ["plot", tiny / "done", "--out", "x" * 300]):
        assert "cannot be looked at (File name too long); give another path" in refusal(*cli(*line))


def test_selectors(cli):
    code, out, err = cli("selectors")
    assert (code, err) == (0, "")
    for name in ("attention", "entropy", "infokv", "snapkv", "random", "positions", "none", "recompute"):
        assert re.search(rf"^{name} +\S.+\.$", out, re.MULTILINE), name
    assert "parameters: alpha=0.9, tau=1.0, k=256" in out
    assert "by_document" not in out


def test_selectors_of_one_name_explains_its_parameters(cli, tmp_path, monkeypatch):
    code, out, _ = cli("selectors", "infokv:alpha=0.5")
    assert code == 0
    assert re.search(r"^  alpha=0\.9 +Weight of attention, 0 to 1\.", out, re.MULTILINE)
    assert "heads=none" in out
    assert "by_document" not in cli("selectors", "positions")[1]
    assert "It has no parameters." in cli("selectors", "none")[1]
    module = '''
from dataclasses import dataclass
from forward_influence import Selector

@dataclass(frozen=True)
class Base(Selector):
    """Base.

    Parameters
    ----------
    first, second : int
        Both
        lines.

        Paragraphs, too.
    third : {"a", "b"}

    Notes
    -----
    fourth : no parameter
        None.
    """
    first: int = 1
    second: int = 2
    third: str = "a"
    fourth: int = 4

@dataclass(frozen=True)
class Mine(Base):
    """Mine."""
'''
    (tmp_path / "explained.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    assert cli("selectors", "explained:Mine")[1].splitlines() == [
        "explained:Mine  Mine.",
        "  first=1   Both lines. Paragraphs, too.",
        "  second=2  Both lines. Paragraphs, too.",
        '  third=a   {"a", "b"}',
        "  fourth=4",
    ]
    for name in ("attenton", "explained"):
        assert "or write module.path:Class." in refusal(*cli("selectors", name))


def test_every_parameter_of_a_selector_is_explained():
    from forward_influence.cli.selectors import _defaults, parameter_meanings
    from forward_influence.selectors import SELECTORS
    from infokv.scorer import SCORERS

    for name, cls in [*SELECTORS, *SCORERS]:
        assert not [one for one in _defaults(cls) if not parameter_meanings(cls).get(one)], name


def test_doctor(cli):
    code, out, err = cli("doctor")
    assert (code, err) == (0, "")
    for what in (
        "python",
        "packages",
        "memory",
        "model       smollm2-135m",
        "data        builtin",
        "data        arxiv",
    ):
        assert what in out
    assert f"torch {torch.__version__}" in out


def test_version_and_help(cli):
    code, out, _ = cli("--version")
    assert code == 0 and re.fullmatch(r"forward-influence \d+\.\d+\.\d+\S*\n", out)
    code, out, err = cli()
    assert (code, err) == (0, "")
    for name in ("measure", "plot", "show", "selectors", "doctor"):
        assert f"  {name} " in out
    assert "No such command 'mesure'" in refusal(*cli("mesure"))


LIGHT = """
import contextlib, io, sys
from forward_influence.cli import run
for name in ("measure", "plot", "show", "selectors", "doctor"):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run([name, "--help"]) == 0
    assert "--help" in out.getvalue() and name in out.getvalue()
import forward_influence, infokv, forward_influence.analysis, forward_influence.data
forward_influence.open_runs, forward_influence.RunSpec, forward_influence.analysis.summary_table
heavy = {"torch", "transformers", "datasets", "seaborn"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_and_analysis_load_nothing_heavy(tmp_path):
    done = subprocess.run([sys.executable, "-c", LIGHT], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_appears_in_under_a_second(tmp_path):
    times = []
    for _ in range(3):
        script = Script(["measure", "--help"], tmp_path)
        assert script.wait() == 0
        times.append(script.cpu_seconds)
    flags = """--model --tokenizer --data --selector --fraction --prefix --horizon --full-horizon --chunk --limit --seed
        --batch --dtype --device --offline --extend-context --shard --out --fresh --dry-run --quiet --debug"""
    assert set(flags.split()) <= set(script.stdout.split())
    assert min(times) < 1.0


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_is_no_error(unbuffered, tmp_path):
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    process = subprocess.Popen(
        [Script.path(), "--version"],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0
