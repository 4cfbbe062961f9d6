"""Killed at any moment and started again: no row is lost, none is there twice, and the numbers are the same."""

import random
import signal
import time

import pytest
from tiny_runs import Command, Script, alike, arguments, read_rows, save_model, write_documents

SELECTORS = [text for name in ("random", "entropy", "none") for text in ("--selector", name)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model, many short documents, and the rows of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder / "model")
    write_documents(folder / "docs.jsonl", [70, *(76 + index % 30 for index in range(119))])
    whole = Command(command(folder, folder / "whole"), folder)
    assert whole.wait() == 0
    return folder, read_rows(folder / "whole")


def command(folder, out):
    return arguments(folder / "model", folder / "docs.jsonl", out, *SELECTORS, "--quiet", "--limit", "120")


def size(path):
    return path.stat().st_size if path.exists() else 0


def kill_once(start, out, chance):
    """Start the command and kill it: while it starts, or at some moment after it has begun to write rows."""
    before, running = size(out / "rows.jsonl"), start()
    if chance.random() < 0.25:
        time.sleep(chance.uniform(0, 0.3))
    elif running.wait_for(lambda: size(out / "rows.jsonl") > before):
        time.sleep(chance.uniform(0, 0.05))
    running.send(signal.SIGKILL)
    return running.wait()


def tear(path, chance, junk=b""):
    """What a power cut leaves: the last line cut somewhere, maybe with junk in place of the rest."""
    whole = path.read_bytes()
    last = whole[:-1].rfind(b"\n") + 1
    path.write_bytes(whole[: chance.randrange(last + 1, len(whole))] + junk)
    assert not path.read_bytes().endswith(b"\n")


def disturb(tiny, tmp_path, kind, kills, seed):
    folder, expected = tiny
    out, chance = tmp_path / "run", random.Random(seed)

    def start():
        return kind(command(folder, out), tmp_path)

    codes, torn = [], 0
    for _ in range(kills):
        codes.append(kill_once(start, out, chance))
        if size(out / "rows.jsonl") and (torn == 0 or chance.random() < 0.3):
            tear(out / "rows.jsonl", chance, junk=b"\0" * 20 if torn % 2 else b"")
            torn += 1
    assert codes.count(-signal.SIGKILL) >= 0.8 * kills, codes
    assert torn
    assert size(out / "rows.jsonl") < size(folder / "whole" / "rows.jsonl")  # there was something left to do
    last = start()
    assert last.wait() == 0
    assert last.stderr == ""
    assert last.stdout == f"119 documents measured, 1 skipped, 0 failed: {out}\n"
    alike(read_rows(out), expected)


def test_killed_twelve_times(tiny, tmp_path):
    disturb(tiny, tmp_path, Command, kills=12, seed=5)


def test_interrupted_twice_at_once(tiny, tmp_path):
    """Whatever the first interrupt has reached when the second one comes."""
    folder, expected = tiny
    out, chance = tmp_path / "run", random.Random(7)
    for pause in (0.0, 0.001, 0.004, 0.01):
        before, running = size(out / "rows.jsonl"), Command(command(folder, out), tmp_path)
        assert running.wait_for(lambda before=before: size(out / "rows.jsonl") > before)
        time.sleep(chance.uniform(0, 0.02))
        for _ in range(2):
            running.send(signal.SIGINT)
            time.sleep(pause)
        assert running.wait() == 130
        assert running.stderr == ("\nInterrupted; finished rows are kept, and the same command goes on from there.\n")
        rows = (out / "rows.jsonl").read_bytes()
        assert len(rows) >= before
        assert rows.endswith(b"\n") or not rows
    last = Command(command(folder, out), tmp_path)
    assert last.wait() == 0
    alike(read_rows(out), expected)


@pytest.mark.slow
def test_the_installed_script_killed_twenty_times(tiny, tmp_path):
    disturb(tiny, tmp_path, Script, kills=20, seed=6)


def test_undisturbed_rows_are_whole(tiny):
    _, rows = tiny
    assert len(rows) == 120 * 3
    assert {row["status"] for row in rows} == {"ok", "skipped"}
