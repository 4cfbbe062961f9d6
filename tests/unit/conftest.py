"""Fixtures of the unit tier: runs that are written by hand."""

from __future__ import annotations

import pytest
from rate_rows import write_rate_run
from token_rows import write_token_run


@pytest.fixture
def token_run(tmp_path):
    """``token_run(costs, scores, name="run", ...)`` writes a run of single tokens and sets."""

    def build(costs: dict, scores: dict, name: str = "run", **more):
        return write_token_run(tmp_path / name, costs, scores, **more)

    return build


@pytest.fixture
def rate_run(tmp_path):
    """``rate_run(selectors, lengths, ...)`` writes a run of compression methods."""
    return lambda *args, **more: write_rate_run(tmp_path / "run", *args, **more)
