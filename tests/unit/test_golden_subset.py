"""The numbers beside the tests: small, explained, and equal to those of the shared folder where there is one."""

from __future__ import annotations

import pytest
from golden_cases import FOLDERS

pytestmark = pytest.mark.golden

SUBSET = FOLDERS[0]
FILES = [file.relative_to(SUBSET) for file in sorted(SUBSET.rglob("*")) if file.is_file()]


def test_small_and_explained():
    assert sum((SUBSET / file).stat().st_size for file in FILES) < 2_000_000
    text = (SUBSET / "PROVENANCE.md").read_text()
    groups = {file.parts[0] for file in FILES} - {"PROVENANCE.md"}
    assert len(groups) == 6
    assert all(f"| {group} |" in text for group in groups)


def test_a_copy():
    if len(FOLDERS) < 2:
        pytest.skip("no shared reference data; set FI_SHARED")
    for file in FILES:
        if file.name != "PROVENANCE.md":
            assert (SUBSET / file).read_bytes() == (FOLDERS[1] / file).read_bytes(), file
