"""Every command and every example in README and docs is run, in the order in which it stands.

Blocks in ``bash`` and ``python`` run in one fresh folder per page. ``bash long`` runs with ``--dry-run``; ``python
file=NAME`` is saved under that name. ``make`` targets are run by .ci/run, which this checks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

#: Commands that have --dry-run.
STUDIES = ("measure", "fidelity", "tune", "influence")

pytestmark = pytest.mark.integration


def blocks(page: Path) -> list[tuple[str, str, str]]:
    return [(kind, info.strip(), code) for kind, info, code in FENCE.findall(page.read_text(encoding="utf-8"))]


def lines_of(code: str) -> list[str]:
    return [line for line in code.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_runs(page, tmp_path, shared_environment):
    texts = tmp_path / "texts"
    texts.mkdir()
    from pydoc_data.topics import topics

    whole = "\n".join(topics[name] for name in sorted(topics))
    for part in range(40):  # about 2,800 tokens each
        piece = whole[len(whole) * part // 40 : len(whole) * (part + 1) // 40]
        (texts / f"python{part}.txt").write_text(piece, encoding="utf-8")
    for kind, info, code in blocks(page):
        if kind == "python" and info.startswith("file="):
            (tmp_path / info.removeprefix("file=")).write_text(code, encoding="utf-8")
        elif kind == "python":
            run([sys.executable, "-c", code], tmp_path, shared_environment)
        elif kind == "bash":
            for line in lines_of(code):
                if line.startswith(("make ", "git ", "cd ")):
                    continue  # test_make_targets_are_run_by_ci
                if "$FI_SHARED" in line and not Path(shared_environment["FI_SHARED"]).is_dir():
                    continue
                if "long" in info.split():
                    assert line.split()[:2] in [["forward-influence", one] for one in STUDIES], line
                    line += " --dry-run"
                run(["bash", "-euc", line], tmp_path, shared_environment)
        else:
            assert kind in ("toml", "json", "text"), f"{page}: nobody runs a {kind} block"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_exist(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert "://" in target or (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", ["adding-a-scorer.md", "adding-a-selector.md"])
def test_the_table_of_signals_has_all_with_their_parameters(page):
    from infokv.signals import SIGNALS

    table = [line for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    for name, parameters in SIGNALS.items():
        lines = " ".join(line for line in table if f"`{name}" in line)
        assert lines, name
        assert not [one for one in parameters if f"{one}=" not in lines and f"`{one}`" not in lines], name


def test_tables_printed_in_examples_are_whole():
    for page in PAGES:
        for kind, _, code in blocks(page):
            if kind == "python" and "_table(" in code:
                assert "to_string(index=False)" in code, page


def test_make_targets_are_run_by_ci():
    script = (ROOT / ".ci" / "run").read_text()
    for page in PAGES:
        for kind, _, code in blocks(page):
            for line in lines_of(code) if kind == "bash" else []:
                if line.startswith("make "):
                    assert f"make {line.split()[1]}" in script, f"{page}: {line}"


@pytest.fixture
def shared_environment() -> dict[str, str]:
    scripts = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "FI_SHARED": os.environ.get("FI_SHARED", str(ROOT.parent / "shared")),
        "HF_HUB_OFFLINE": "1",
    }


def run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
