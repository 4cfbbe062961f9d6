"""Fixtures of the contract tier: one thread for the tiny models, and the command line in this process."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_runs import ALL, STUDY, TOKENS, Command, arguments, save_hollow, save_model, words, write_documents

from forward_influence import measure


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """More threads only slow a tiny model down; a test of their number sets its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """``cli(*arguments)`` runs a command in ``tmp_path`` and gives its exit code, stdout and stderr."""
    from forward_influence.cli import run

    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        capsys.readouterr()
        code = run([str(one) for one in arguments])
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    """Models, documents and a finished study: ``model`` can be loaded; of ``hollow`` all is right but the weights."""
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder / "model")
    save_hollow(folder / "hollow")
    write_documents(folder / "docs.jsonl", [120, 100, 60, 101])  # the third is too short
    (folder / "empty.jsonl").touch()
    (folder / "docs").mkdir()
    (folder / "docs" / "one.jsonl").write_text(json.dumps({"id": "d0", "text": words(99, 100)}))
    (folder / "docs" / "two.txt").write_text("w5 w6 " * 50)
    (folder / "bare").mkdir()
    done = Command(arguments(folder / "model", folder / "docs.jsonl", folder / "done", "--quiet"), folder)
    assert done.wait() == 0
    return folder


@pytest.fixture(scope="module")
def study_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    network = save_model(folder / "model")
    write_documents(folder / "docs.jsonl", TOKENS)
    return folder, network


@pytest.fixture
def model_folder(study_folder):
    return study_folder[0] / "model"


@pytest.fixture
def study(study_folder, tmp_path, monkeypatch):
    """``study(out="run", **changes)`` runs measure() on the tiny model, quietly unless asked."""
    monkeypatch.chdir(tmp_path)
    folder, _ = study_folder

    def run(out="run", **changes):
        options = {"model": folder / "model", "data": folder / "docs.jsonl", "quiet": True, "out": out, **STUDY}
        return measure(**{**options, **changes})

    return run


@pytest.fixture(scope="module")
def whole(study_folder, tmp_path_factory):
    """One undisturbed run that several tests compare with."""
    folder, _ = study_folder
    out = tmp_path_factory.mktemp("whole") / "run"
    outcome = measure(
        model=folder / "model", data=folder / "docs.jsonl", selector=ALL, out=out, quiet=True, **STUDY
    )  # fmt: skip
    return outcome
