"""What the commands show and plot say of runs."""

import re
import shutil

import pytest
from tiny_runs import (
    changed,
    measuring,
    refusal,
    write_documents,
)

# The other commands


def test_show(studied, cli, tmp_path):
    code, out, err = cli("show", studied / "done")
    assert (code, err) == (0, "")
    assert "12 measured, 4 skipped, 0 failed of 16 planned" in out
    assert "prefix 60, horizon 40, fraction 0.09, candidates 2 to 51, chunk 16, seed 0" in out
    for name in ("attention", "entropy", "random", "none"):
        assert re.search(rf"^ *{name} ", out, re.MULTILINE)
    code, out, _ = cli("show", studied / "done", "--export", tmp_path / "table.csv")
    assert code == 0
    assert (tmp_path / "table.csv").read_text().startswith("document,selector,")


def test_show_doubts_intervals_from_few_documents(studied, cli):
    _, out, _ = cli("show", studied / "done")
    assert out.rstrip().endswith(
        "\nIntervals from 3 documents are not to be trusted, narrow or not: measure 10 or more."
    )


def test_show_says_over_how_many_documents_the_bands_are(studied, cli):
    _, out, _ = cli("show", studied / "done")
    assert "n_to_end" not in out  # all documents reach the end
    assert cli(*changed(measuring(studied, "--selector", "random", out="longer"), "--horizon", 60))[0] == 0
    _, out, _ = cli("show", "longer")
    header, line = (one.split() for one in out.split("that reach the end)\n")[1].splitlines()[:2])
    assert "kl 0-41" in out  # the texts reach offsets 60, 40 and 41, and the bands end at the middle one
    assert (line[header.index("n_documents")], line[header.index("n_to_end")]) == ("3", "2")


@pytest.mark.parametrize(
    ("count", "words"), [(1, "One document gives no interval"), (9, "from 9 documents"), (10, None)]
)
def test_how_few_documents_are_few(count, words):
    from forward_influence.analysis.stats import few_documents

    told = few_documents(count)
    assert told is None if words is None else words in told


def test_show_lists_different_runs_in_a_folder(studied, cli, tmp_path):
    runs = tmp_path / "runs"
    shutil.copytree(studied / "done", runs / "first")
    shutil.copytree(studied / "done", runs / "shards" / "one")
    assert "12 measured" in cli("show", runs / "shards")[1]
    code, out, _ = cli("show", runs)  # one run in parts
    assert (code, "12 measured" in out) == (0, True)
    assert cli(*changed(measuring(studied, "--selector", "none", out="runs/second"), "--horizon", 30))[0] == 0
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


def test_show_has_each_band_once(studied, cli):
    _, out, _ = cli("show", studied / "done")  # a horizon of 40: near and far are the same offsets
    (header,) = (line.split() for line in out.splitlines() if "n_removed" in line)
    assert len(header) == len(set(header))
    assert re.findall(r"kl \d+-\d+", out) == ["kl 0-40"]


def test_show_has_the_near_and_the_far_band(studied, cli, tmp_path):
    write_documents(tmp_path / "long.jsonl", [256])
    command = changed(
        changed(measuring(studied, "--selector", "none"), "--data", tmp_path / "long.jsonl"), "--horizon", 196
    )
    assert cli(*command)[0] == 0
    _, out, _ = cli("show", "run")
    assert re.findall(r"kl \d+-\d+", out) == ["kl 0-128", "kl 128-196"]


def test_show_follow_ends_with_a_whole_run(studied, cli):
    code, out, _ = cli("show", studied / "done", "--follow")
    assert code == 0
    assert len(re.findall(r"^d\d  \w+  mean KL \S+ nats$", out, re.MULTILINE)) == 12
    assert len(re.findall(r"^d2  \w+  skipped: shorter than 76 tokens$", out, re.MULTILINE)) == 4


def test_show_follow_tells_rows_once_as_they_come(studied, cli, tmp_path, monkeypatch):
    source, target = studied / "done", tmp_path / "growing"
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


def test_plot(studied, cli, tmp_path):
    code, out, err = cli("plot", studied / "done", "--out", tmp_path / "mine", "--selector", "entropy")
    assert (code, err) == (0, "Intervals from 3 documents are not to be trusted, narrow or not: measure 10 or more.\n")
    names = {"mine.png", "mine.pdf", "mine.svg", "mine.csv"}
    assert {path.name for path in tmp_path.iterdir()} == {line.rpartition("/")[2] for line in out.splitlines()}
    assert {path.name for path in tmp_path.iterdir()} >= names
    assert "no run folder" in refusal(*cli("plot", tmp_path / "elsewhere"))
    assert "There is no run under 'runs'" in refusal(*cli("plot"))
    for line in (["plot", "x" * 300], ["show", "x" * 300], ["plot", studied / "done", "--out", "x" * 300]):
        assert "cannot be looked at (File name too long); give another path" in refusal(*cli(*line))
