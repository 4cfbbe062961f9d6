"""Fixtures for all tiers. Unit and contract tests may not open a socket."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_configure(config):
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def _no_network(request):
    """Offline by proof: a socket in a unit or contract test is an error."""
    tier = request.node.path.parent.name
    if tier not in ("unit", "contract"):
        yield
        return
    from pytest_socket import disable_socket, enable_socket

    disable_socket(allow_unix_socket=True)
    yield
    enable_socket()


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """The folder of shared reference data: FI_SHARED, or ``shared`` beside the checkout."""
    folder = Path(os.environ.get("FI_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no shared reference data at {folder}; set FI_SHARED")
    return folder
