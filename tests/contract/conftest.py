"""Fixtures of the contract tier: one thread for the tiny models, and the command line in this process."""

from __future__ import annotations

import pytest
import torch


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
