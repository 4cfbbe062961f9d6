"""The wheel's top level, and the direction of imports, checked on the built wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder into which the wheel was installed."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def lint(installed: Path, empty: Path) -> subprocess.CompletedProcess:
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache", "--config", ROOT / "pyproject.toml"]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, timeout=120)


def test_top_level_is_two_packages(installed):
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"forward_influence", "infokv"}
    for part in ("cli", "analysis", "data"):
        modules = {path.name for path in (ROOT / part).rglob("*.py")}
        assert modules == {path.name for path in (installed / "forward_influence" / part).rglob("*.py")}


def test_both_commands_are_installed(installed):
    (points,) = installed.glob("*.dist-info/entry_points.txt")
    lines = points.read_text()
    assert "forward-influence = forward_influence.cli:main" in lines
    assert "fi = forward_influence.cli:main" in lines


def test_imports_go_down_only_and_the_check_can_fail(installed, tmp_path):
    good = lint(installed, tmp_path)
    assert good.returncode == 0, good.stdout
    planted = {
        installed / "infokv" / "store.py": "import forward_influence.rows",
        installed / "forward_influence" / "analysis" / "stats.py": "import torch",
        installed / "forward_influence" / "data" / "local.py": "import infokv",
        installed / "forward_influence" / "engine.py": "import forward_influence.analysis",
    }
    for file, line in planted.items():
        before = file.read_text()
        file.write_text(f"{before}\n{line}\n")
        assert lint(installed, tmp_path).returncode != 0, line
        file.write_text(before)


def test_tests_use_the_installed_names():
    """From the checkout's root, ``import data`` would give a second copy of the module."""
    here, names = Path(__file__).resolve().parents[1], ("data", "cli", "analysis")
    for file in here.rglob("*.py"):
        for line in file.read_text().splitlines():
            first = line.split()[:2]
            bare = len(first) == 2 and first[0] in ("from", "import") and first[1].split(".")[0] in names
            assert not bare, file


def test_importing_loads_neither_torch_nor_pandas():
    code = (
        "import sys, forward_influence, infokv, forward_influence.data, forward_influence.rows, forward_influence.runs;"
        "import forward_influence.analysis;"
        "print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"
