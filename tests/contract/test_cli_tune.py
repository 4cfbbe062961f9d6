"""The commands tune and influence: flags, kills, tuned files in the other commands, and what plot and show print."""

import inspect
import json
import signal

import pytest
from tiny_runs import Command, command_line, read_rows, refusal, save_model, write_documents

import forward_influence
from forward_influence.cli import run as run_command
from forward_influence.token_influence import token_influence

STUDY = {"prefix": 60, "horizon": 40, "chunk": 20}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder / "model")
    save_model(folder / "gemma", "gemma2")
    write_documents(folder / "docs.jsonl", [100] * 9)
    return folder


def asking(tiny, command, *more, out="run", model="model"):
    return command_line(command, tiny / model, tiny / "docs.jsonl", out, STUDY, *more)


TUNE = ("--method", "snapkv", "--vary", "window=4,8,16", "--vary", "kernel=1,3,5", "--keep", "0.5", "--trials", "6",
        "--train", "4", "--held-out", "5")  # fmt: skip


@pytest.fixture(scope="module")
def tuned(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("tuned") / "run"
    assert run_command(asking(tiny, "tune", *TUNE, "--quiet", out=out)) == 0
    return out


@pytest.mark.parametrize(("name", "function", "renamed"), [
    ("tune", forward_influence.tune, {}),
    ("influence", token_influence, {}),
])  # fmt: skip
def test_the_flags_are_the_keywords_of_the_function(name, function, renamed):
    from importlib import import_module

    flags = inspect.signature(import_module(f"forward_influence.cli.{name}").command).parameters
    own = set(inspect.signature(function).parameters) - {"options"}
    shared = set(inspect.signature(forward_influence.measure).parameters)
    absent = {"tune": {"shard", "fresh", "selector", "limit", "accept_model", "full_horizon"},
              "influence": {"selector", "fraction"}}[name]  # fmt: skip
    assert set(flags) == (own | (shared - absent)) | ({"every"} if name == "influence" else {"debug"})
    defaults = inspect.signature(function).parameters
    for flag in set(flags) & set(defaults) - {"vary", "group", "signal", "keep"}:
        assert flags[flag].default == defaults[flag].default, flag


def test_tune_says_what_it_found_and_writes_its_file(tiny, tuned, cli):
    code, out, err = cli(*asking(tiny, "tune", *TUNE, "--quiet", out=tuned))  # all is there
    assert (code, err) == (0, "")
    content = json.loads((tuned / "tuned.json").read_text())
    chosen = ", ".join(f"{name}={value}" for name, value in content["parameters"].items()) or "its defaults"
    assert f"tuned      snapkv: {chosen}" in out and "tried      6 settings on 4 documents" in out
    for text in ("tuned - default", "tuned - paper", "tuned - attention", "tuned - random", "random - default"):
        assert f"{text} " in out
    assert "not to be trusted" in out and f"snapkv:{tuned / 'tuned.json'}" in out
    assert set(content) == {"method", "parameters", "model", "provenance"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_same_answer_after_a_kill(tiny, tuned, tmp_path, number):
    def start():
        return Command(asking(tiny, "tune", *TUNE, out=tmp_path / "run"), tmp_path)

    def rows():
        path = tmp_path / "run" / "search" / "rows.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    for _ in range(2):
        running, before = start(), rows()
        assert running.wait_for(lambda before=before: rows() > before)
        running.send(number)
        assert running.wait() == (130 if number == signal.SIGINT else -signal.SIGKILL)
    last = start()
    assert last.wait() == 0, last.stderr
    mine, other = (json.loads((folder / "tuned.json").read_text()) for folder in (tmp_path / "run", tuned))
    assert mine["parameters"] == other["parameters"]
    assert mine["provenance"]["train_kl"] == pytest.approx(other["provenance"]["train_kl"], rel=1e-5)
    keys = [row["key"] for row in read_rows(tmp_path / "run" / "search")]
    assert len(keys) == len(set(keys)) and set(keys) == {row["key"] for row in read_rows(tuned / "search")}


FAILING = """
from dataclasses import dataclass
from infokv import Scorer

@dataclass(frozen=True)
class Failing(Scorer):
    window: int = 4

    def score(self, signals):
        raise ArithmeticError("no luck")
"""


def test_a_search_in_which_all_fails_has_the_exit_code_of_a_run_that_failed(tiny, cli, tmp_path, monkeypatch):
    (tmp_path / "failing_scorer.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)
    asked = asking(tiny, "tune", "--method", "failing_scorer:Failing", "--vary", "window=4,8", "--trials", "2",
                   "--train", "2", "--held-out", "2", "--keep", "0.5")  # fmt: skip
    code, out, err = cli(*asked)
    assert (code, out) == (1, "")
    assert "has a finite KL on the training documents" in err and "ArithmeticError: no luck" in err
    assert not (tmp_path / "run" / "tuned.json").exists()


def test_a_tuned_file_goes_wherever_a_method_or_selector_goes(tiny, tuned, cli):
    named = f"snapkv:{tuned / 'tuned.json'}"
    common = ("--model", tiny / "model", "--quiet")
    assert cli(*asking(tiny, "measure", "--selector", named, "--recent", "8", "--limit", "1", "--quiet"))[0] == 0
    kept = asking(tiny, "fidelity", "--method", named, "--keep", "0.5", "--limit", "1", "--quiet", out="kept")
    assert cli(*kept)[0] == 0
    code, _, err = cli("generate", "w3 w4 w5 " * 10, "--raw", "--method", named, "--max-new-tokens", "2", *common)
    assert (code, err) == (0, "")


def test_a_tuned_file_of_another_model_is_refused_and_can_be_accepted(tiny, tuned, cli, tmp_path):
    named = f"snapkv:{tuned / 'tuned.json'}"
    asked = {
        "measure": asking(tiny, "measure", "--selector", named, "--recent", "8", "--limit", "1", model="gemma"),
        "fidelity": asking(tiny, "fidelity", "--method", named, "--limit", "1", model="gemma", out="kept"),
        "generate": [
            "generate",
            "w3 w4 w5 " * 10,
            "--raw",
            "--method",
            named,
            "--max-new-tokens",
            "2",
            "--model",
            tiny / "gemma",
        ],
    }
    for name, arguments in asked.items():
        code, out, err = cli(*arguments)
        sentence = err.strip().splitlines()[-1]
        assert (code, out) == (2, ""), name
        assert "was tuned for another model (architecture 'llama' there, 'gemma2' here" in sentence, name
        assert "--accept-model" in sentence and "forward-influence tune" in sentence
        code, _, err = cli(*arguments, "--accept-model")
        assert code == 0 and "accepted, as asked" in err, (name, err)
    notices = json.loads((tmp_path / "kept" / "run.json").read_text())["provenance"]["notices"]
    assert any("accepted, as asked" in one for one in notices)


@pytest.mark.parametrize(("more", "sentence"), [
    (("--vary", "window"), "--vary window is not PARAMETER=VALUE,VALUE"),
    (("--vary", "window="), "is not PARAMETER=VALUE,VALUE"),
    (("--vary", "window=4", "--vary", "window=8"), "--vary names window twice"),
    (("--vary", "windows=4"), "did you mean 'window'"),
    (("--vary", "window=much"), "window=much: the value must be int"),
    (("--method", "snapkw"), "did you mean 'snapkv'"),
    (("--trials", "1"), "trials is 1"),
    (("--objective", "influence", "--keep", "0.5"), "--keep 0.5 belongs to the objective fidelity"),
    (("--keep", "0.5", "--keep", "0.2"), "--keep is given 2 times, and tune takes one budget; run it once for each."),
    (("--train", "0"), "train is 0"),
    (("--band", "mid"), "band is 'mid'; it must be all"),
    (("--objective", "speed"), "objective is 'speed'; it must be fidelity or influence"),
    (("--train", "30"), "30 training and 16 held-out documents are needed, and 9 have the 60 + 40 tokens"),
])  # fmt: skip
def test_bad_requests_end_in_a_sentence(tiny, cli, tmp_path, more, sentence):
    assert sentence in refusal(*cli(*asking(tiny, "tune", "--method", "snapkv", *more)))
    assert not (tmp_path / "run").exists()


def test_dry_runs_load_nothing_and_write_nothing(tiny, cli, tmp_path):
    code, out, _ = cli(*asking(tiny, "tune", *TUNE, "--dry-run"))
    assert code == 0 and "6 to seek, and as many random ones" in out and "4 for training, 5 held out" in out
    assert "window: 4, 8, 16" in out and "at most" in out
    code, out, _ = cli(*asking(tiny, "influence", "--sample", "6", "--group", "3", "--recent", "8", "--dry-run"))
    assert code == 0 and "64 to measure" in out  # 8 documents, 6 tokens and 2 sets
    assert "Then at most 19 sets in each document, those that are ranked highest: up to 238% more time." in out
    assert not list(tmp_path.glob("*/rows.jsonl")) and not (tmp_path / "run").exists()


def test_an_influence_run_is_shown_and_drawn_as_such(tiny, cli, tmp_path):
    asked = asking(tiny, "influence", "--sample", "10", "--group", "5", "--recent", "8", "--limit", "3", "--signal",
                   "knorm", "--signal", "entropy", "--quiet")  # fmt: skip
    assert cli(*asked) == (0, "3 documents measured, 0 skipped, 0 failed: run\n", "")
    code, out, _ = cli("show", "run")
    assert code == 0 and "knorm" in out and "entropy" in out and "positions:at" not in out
    assert "random sets" in out and "measured influence" in out
    code, out, _ = cli("plot", "run", "--format", "png")
    assert code == 0 and (tmp_path / "run" / "correlations.png").is_file()
    assert (tmp_path / "run" / "correlations-additivity.csv").is_file()
