"""The command line: exit codes, one sentence for what cannot be met, and what goes to which stream."""

import os
import re
import subprocess
import sys
import time

import pytest
import torch
from tiny_runs import (
    Script,
    alike,
    changed,
    measuring,
    read_rows,
    refusal,
    write_documents,
)

from forward_influence import progress

REFUSED = {
    "unknown selector": (["--selector", "entropyy"], "no selector 'entropyy'; did you mean 'entropy'?"),
    "unknown parameter": (["--selector", "entropy:q=3"], "entropy has no parameter 'q'; it has: k"),
    "value of a parameter": (["--selector", "infokv:alpha=2"], "alpha is 2.0; it must be from 0"),
    "class that is not there": (["--selector", "nowhere:Mine"], "'nowhere:Mine' cannot be imported"),
    "position outside": (["--selector", "positions:at=60"], "positions go from 0 to 59"),
    "missing data": (["--data", "none.jsonl"], "'none.jsonl' is neither a corpus"),
    "empty data": (["--data", "{studied}/empty.jsonl"], "holds no usable document"),
    "folder without data": (["--data", "{studied}/bare"], "holds no .jsonl, .parquet or .txt file; rename or convert"),
    "data of another kind": (["--data", "{studied}/model/config.json"], "ends in '.json', not .jsonl"),
    "corpus out of reach": (["--data", "arxiv", "--offline"], "offline was asked for"),
    "out is a file": (["--out", "{studied}/docs.jsonl"], "which is a file; give a folder"),
    "out with a name too long": (["--out", "x" * 300], "cannot be looked at (File name too long); give another path"),
    "out below a file": (["--out", "{studied}/docs.jsonl/run"], "docs.jsonl' is a file; give another --out"),
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
    "model that is no model": (["--model", "{studied}/docs"], "has no config.json"),
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
def test_requests_that_cannot_be_met(case, studied, cli, tmp_path):
    """Before weights load: those of this model could not be loaded."""
    more, sentence = REFUSED[case]
    command = measuring(studied, model="hollow")
    for name, value in zip(more[::2], more[1::2]):
        value = str(value).replace("{studied}", str(studied))
        command = changed(command, name, value) if name in command else [*command, name, value]
    command += [] if len(more) % 2 == 0 else [more[-1]]
    began = time.process_time()
    assert sentence in refusal(*cli(*command))
    assert time.process_time() - began < 5  # with the imports, that is less than 10
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_needs_no_weights(studied, cli):
    code, out, err = cli(*measuring(studied, "--dry-run", model="hollow"))
    assert code == 0
    assert "12 to measure, 0 there already" in out
    assert err == "Corpus 'local': 4 documents from 1 file.\n"


def test_results_and_notices_have_their_streams(studied, cli, tmp_path):
    code, out, err = cli(*measuring(studied, "--selector", "none", "--selector", "none", "--limit", 9))
    assert code == 0
    assert out == "3 documents measured, 1 skipped, 0 failed: run\n"
    lines = err.splitlines()
    assert lines[0] == "Corpus 'local': 4 documents from 1 file."
    assert lines[1] == "9 documents were asked for; 3 of this corpus are long enough."
    assert re.fullmatch(r"Expected: about 1 s; memory 1 MiB .* free; 1 MiB on disk\.", lines[2])
    assert len(lines) == 3
    write_documents(tmp_path / "one.jsonl", [120])
    one = changed(measuring(studied, "--limit", 2, "--dry-run"), "--data", tmp_path / "one.jsonl")
    assert "2 documents were asked for; 1 of this corpus is long enough." in cli(*one)[2]
    assert {row["selector"] for row in read_rows(tmp_path / "run")} == {"none"}


def test_data_may_be_folders_and_several(studied, cli, tmp_path):
    command = changed(measuring(studied, "--selector", "none"), "--data", studied / "docs")
    code, out, err = cli(*command, "--data", studied / "docs.jsonl")
    assert code == 0
    assert out.startswith("5 documents measured, 1 skipped")
    assert "from 3 files" in err


def test_progress_is_a_plain_line_now_and_then(studied, cli, monkeypatch):
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    same = ("--selector", "attention:window=8", "--selector", "snapkv:window=8")  # one set, computed once
    _, _, err = cli(*measuring(studied, *same))
    shown = [line for line in err.splitlines() if line.startswith("document ")]
    assert re.fullmatch(r"document 1 of 3: \d+% done, \d+ s left", shown[0])
    assert "document 3 of 3: 100% done, 1 s left" in shown
    assert "\r" not in err


def test_quiet_and_resumed(studied, cli, tmp_path):
    code, out, err = cli(*measuring(studied, "--quiet"))
    assert (code, err) == (0, "")
    before = (tmp_path / "run" / "rows.jsonl").read_bytes()
    assert cli(*measuring(studied, "--quiet")) == (0, out, "")
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == before
    alike(read_rows(tmp_path / "run"), read_rows(studied / "done"))


def test_no_library_writes_on_its_own(studied):
    """The fixture's run was quiet; its streams were those of a process, not of this test."""
    assert (studied / "0.stderr").read_text() == ""
    assert (studied / "0.stdout").read_text() == f"3 documents measured, 1 skipped, 0 failed: {studied / 'done'}\n"


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
