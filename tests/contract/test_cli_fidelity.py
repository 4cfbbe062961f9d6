"""The command fidelity: flags, exit codes, and what plot and show make of its runs."""

import inspect
import json
import re

import pandas
import pytest
from tiny_runs import (
    CHUNK,
    HORIZON,
    PREFIX,
    Command,
    alike,
    command_line,
    read_rows,
    refusal,
    save_hollow,
    save_model,
    write_documents,
)

import forward_influence
from forward_influence.analysis import open_runs, rate_differences, rate_table
from forward_influence.cli import run as run_command

STUDY = {"prefix": PREFIX, "horizon": HORIZON, "chunk": CHUNK}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model, one with weights that cannot be loaded, and documents of which the third is too short."""
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder / "model")
    save_hollow(folder / "hollow")
    write_documents(folder / "docs.jsonl", [120, 100, 60, 101])
    return folder


def asking(tiny, *more, model="model", data="docs.jsonl", out="run"):
    return command_line("fidelity", tiny / model, tiny / data, out, STUDY, *more)


METHODS = ("--method", "snapkv:window=8", "--method", "random", "--keep", "0.5", "--keep", "0.25")


def test_the_flags_are_the_keywords_of_the_function():
    from forward_influence.cli.fidelity import command

    flags = inspect.signature(command).parameters
    own = set(inspect.signature(forward_influence.fidelity).parameters) - {"options"}
    shared = set(inspect.signature(forward_influence.measure).parameters)
    assert set(flags) == own | shared - {"selector", "fraction", "sinks", "recent"}  # a method has its own rules
    defaults = inspect.signature(forward_influence.measure).parameters
    assert flags["horizon"].default == inspect.signature(forward_influence.fidelity).parameters["horizon"].default
    for name in shared & set(flags) - {"horizon"}:
        assert flags[name].default == defaults[name].default, name


def test_a_run_is_that_of_the_function_and_goes_on(tiny, cli, tmp_path):
    code, out, err = cli(*asking(tiny, *METHODS, "--quiet"))
    assert (code, out, err) == (0, "3 documents measured, 1 skipped, 0 failed: run\n", "")
    rows = (tmp_path / "run" / "rows.jsonl").read_bytes()
    assert cli(*asking(tiny, *METHODS, "--quiet"))[0] == 0
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == rows
    outcome = forward_influence.fidelity(
        method=["snapkv:window=8", "random"], keep=["0.5", "0.25"], model=tiny / "model", quiet=True, chunk=CHUNK,
        data=str(tiny / "docs.jsonl"), prefix=PREFIX, horizon=HORIZON, out=tmp_path / "other",
    )  # fmt: skip
    alike(read_rows(tmp_path / "run"), read_rows(outcome.path))
    assert cli(*asking(tiny, "--method", "random", "--tokens", 20, "--layers", "pyramid", "--quiet"))[0] == 0
    added = read_rows(tmp_path / "run")[len(rows.splitlines()) :]
    assert {row["selector"] for row in added} == {"random@20 tokens,pyramid"}


def test_defaults_are_four_methods_at_two_budgets(tiny, cli):
    code, out, _ = cli(*asking(tiny, "--dry-run", model="hollow"))
    assert code == 0
    names = [f"{name}@{keep}" for name in ("snapkv", "infokv", "streaming-llm", "random") for keep in ("0.4", "0.2")]
    assert f"selectors  {', '.join(names)}\n" in out
    assert "24 to measure, 0 there already" in out


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--method", "snapkw"], "'snapkw'; did you mean 'snapkv'?"),
        (["--keep", "1.5"], "keep is 1.5"),
        (["--keep", "abc"], "abc"),
        (["--tokens", "0"], "tokens is 0"),
        (["--layers", "steep"], "layers is 'steep'"),
        (["--method", "fastkv:propagate=1"], "without propagate"),
        (["--horizon", "0"], "horizon is 0"),
        (["--fraction", "0.01"], "No such option: --fraction"),
        (["--shard", "3"], "shard '3' is not of the form 3/16"),
    ],
)
def test_requests_that_cannot_be_met(tiny, cli, tmp_path, more, sentence):
    """Before weights load: those of this model could not be loaded."""
    assert sentence in refusal(*cli(*asking(tiny, *more, model="hollow")))
    assert not (tmp_path / "run").exists()


BROKEN = """
from dataclasses import dataclass
from infokv import Scorer

@dataclass(frozen=True)
class Broken(Scorer):
    def score(self, signals):
        raise RuntimeError("always")
"""


def test_exit_code_1_when_everything_failed(tiny, tmp_path):
    (tmp_path / "own.py").write_text(BROKEN)
    failed = Command(asking(tiny, "--method", "own:Broken", "--keep", "0.5"), tmp_path)
    assert failed.wait() == 1
    assert failed.stdout == "0 documents measured, 1 skipped, 3 failed (3 rows; forward-influence show says why): run\n"
    assert "RuntimeError: always" in failed.stderr and "Traceback" not in failed.stderr


def test_an_interrupt_has_its_code_and_sentence(tiny, cli, monkeypatch):
    def interrupted(**options):
        raise KeyboardInterrupt

    monkeypatch.setattr("forward_influence.keep_study.measure", interrupted)
    code, out, err = cli(*asking(tiny))
    assert (code, out) == (130, "")
    assert err == "\nInterrupted; finished rows are kept, and the same command goes on from there.\n"


@pytest.fixture(scope="module")
def measured(tiny):
    folder = tiny / "measured"
    assert run_command([*asking(tiny, *METHODS, "--quiet", out=str(folder))]) == 0
    return folder


def test_show_gives_the_rates_of_each_budget_the_least_first(measured, cli):
    code, out, _ = cli("show", measured)
    assert code == 0
    assert "compressed caches" in out
    runs = open_runs(measured)
    table, differences = rate_table(runs), rate_differences(runs)
    for asked in ("0.5", "0.25"):
        head, *lines = out.split(f"At budget {asked} (")[1].split("\n\n")[0].splitlines()[1:]
        assert head.split() == ["0-40", "more", "delta_nll", "top1_changed", "documents", "method"]
        expected = table[table.asked == asked].sort_values("kl")
        assert [line.split()[-1] for line in lines] == list(expected.method)
        for line, one in zip(lines, expected.itertuples(), strict=True):
            numbers = [float(text) for text in re.findall(r"[-\d.e]+(?=[\s,\]])", line)]
            assert numbers[:3] == pytest.approx([one.kl, one.kl_low, one.kl_high], rel=0.01)
            assert numbers[-3:] == pytest.approx([one.delta_nll, one.top1_changed, 3], rel=0.01)
        (pair,) = differences[differences.asked == asked].itertuples()
        sign = 1 if pair.b == expected.method.iloc[0] else -1
        bounds = sorted([sign * pair.kl_low, sign * pair.kl_high])
        assert numbers[3:-3] == pytest.approx([sign * pair.kl, *bounds], rel=0.01)


def test_show_compares_with_one_that_has_all_documents_and_has_no_minus_zero(tiny, cli):
    common = ("--keep", "0.5", "--quiet")
    both = ("--method", "fastkv:window=8", "--method", "snapkv:window=8")  # one set: fastkv changes later layers alone
    assert cli(*asking(tiny, *both, *common, out="alike"))[0] == 0
    assert cli(*asking(tiny, "--method", "full", "--limit", "1", *common, out="alike"))[0] == 0  # loses nothing
    _, out, _ = cli("show", "alike")
    lines = out.split("At budget 0.5")[1].split("\n\n")[0].splitlines()[2:]
    lines = {line.split()[-1]: line for line in lines}
    assert list(lines) == ["full", "fastkv:window=8", "snapkv:window=8"]
    interval = r"[-\d.e]+ \[[-\d.e]+, [-\d.e]+\]"
    assert re.match(rf" *{interval} +0 ", lines["fastkv:window=8"])  # it is what the others are compared with
    assert re.match(rf" *{interval} +0 \[0, 0\] ", lines["snapkv:window=8"])
    assert re.match(r" *[-\d.e]+ +-\d", lines["full"])  # in the one document of both


def test_plot_draws_rates_or_the_horizon(tiny, measured, cli, tmp_path):
    code, out, _ = cli("plot", measured, "--format", "svg")
    assert code == 0
    names = ("fidelity.svg", "fidelity.csv", "fidelity-differences.csv")
    assert out.splitlines() == [str(measured / name) for name in names]
    assert set(pandas.read_csv(measured / "fidelity.csv").method) == {"snapkv:window=8", "random"}
    code, out, _ = cli(
        "plot", measured, "--figure", "fidelity", "--selector", "random", "--format", "svg", "--out", "x"
    )
    assert (code, out.splitlines()) == (0, ["x.svg", "x.csv", "x-differences.csv"])
    code, out, _ = cli("plot", measured, "--figure", "ranking", "--format", "svg", "--out", "z")
    assert (code, out.splitlines()) == (0, ["z.svg", "z.csv", "z-differences.csv"])
    one = asking(tiny, "--method", "random", "--method", "knorm", "--keep", "0.5", "--quiet", out="one")
    assert cli(*one)[0] == 0
    assert cli("plot", "one", "--format", "svg")[1].splitlines()[0] == "one/ranking.svg"  # of one budget
    code, out, _ = cli("plot", measured, "--figure", "figure2", "--format", "svg", "--out", "y")
    assert (code, out.splitlines()) == (0, ["y.svg", "y.csv", "y-chunks.csv"])
    code, out, err = cli("plot", measured, "--figure", "pie")
    assert (code, out) == (2, "")
    assert "Figure 'pie' is unknown; choose one of figure2, fidelity, ranking, correlations, parameters" in err
    spec = json.loads((measured / "run.json").read_text())["spec"]
    assert spec["mode"] == "keep"


def test_a_run_that_removes_tokens_has_no_rates(tiny, cli):
    numbers = ("--prefix", PREFIX, "--horizon", HORIZON, "--sinks", 2, "--recent", 8, "--quiet")
    data = ("--model", tiny / "model", "--data", tiny / "docs.jsonl", "--out", "removed")
    assert cli("measure", *data, *numbers, "--selector", "random", "--limit", 1)[0] == 0
    code, out, err = cli("plot", "removed", "--figure", "fidelity")
    assert (code, out) == (2, "")
    assert "'removed' removes tokens and has no budgets" in err
