"""The command line among things that go wrong around it: streams, folders, variables and other people's code."""

import os
import re
import subprocess
import sys
import textwrap

import pytest
from tiny_runs import Script, arguments, refusal, save_model, write_documents


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder / "model")
    write_documents(folder / "docs.jsonl", [120])
    return folder


def shell(command, folder, **environment):
    """Run a line of bash in which ``$FI`` is the command."""
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "FI": Script.path(), **environment},
    )  # fmt: skip


# Streams

COMMANDS = {"selectors": 0, "--help": 0, "--version": 0, "nonsense": 2}


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", COMMANDS)
def test_streams_that_take_nothing_change_no_exit_code(tmp_path, command, unbuffered):
    for streams in (">&-", ">/dev/null 2>&-", ">&- 2>&-", ">/dev/null 2>/dev/full", "2>/dev/full | true"):
        line = f"$FI {command} {streams}; exit ${{PIPESTATUS[0]}}"
        done = shell(line, tmp_path, PYTHONUNBUFFERED=unbuffered)
        assert done.returncode == COMMANDS[command], (streams, done.stderr)
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, streams


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["selectors", "--help", "--version"])
def test_a_full_disk_is_told(tmp_path, command, unbuffered):
    done = shell(f"$FI {command} >/dev/full", tmp_path, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 2
    assert re.fullmatch(r"error: standard output cannot be written \(No space left on device\); .*\n", done.stderr)


def test_what_was_measured_counts_also_when_nobody_can_be_told(tiny, tmp_path):
    line = " ".join(arguments(tiny / "model", tiny / "docs.jsonl", "run", "--selector", "none"))
    for number, streams in enumerate((">/dev/full", "2>/dev/full >&-", ">/dev/null 2>&-")):
        done = shell(f"$FI {line} --out run{number} {streams}", tmp_path)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
        assert (tmp_path / f"run{number}" / "rows.jsonl").read_text().count("\n") == 1
        assert "standard output cannot be written" in done.stderr or streams != ">/dev/full"


def test_no_file_of_ours_takes_the_number_of_a_closed_stream(tmp_path):
    """What is printed past Python must not land in rows.jsonl."""
    script = """
        import os, sys
        from forward_influence.cli.streams import guard_streams
        guard_streams()
        with open("rows.jsonl", "w") as rows:
            print("lost")
            os.write(1, b"lost"), os.write(2, b"lost")
            rows.write("row")
            sys.exit(rows.fileno() <= 2)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    done = shell(f"{sys.executable} script.py >&- 2>&- <&-", tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "rows.jsonl").read_text() == "row"


def test_names_that_a_terminal_cannot_show_are_no_error(tmp_path):
    done = shell("$FI plot größe", tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 2
    assert "\\xf6" in done.stderr or "\\udcc3" in done.stderr


# The current folder


def test_files_here_called_like_our_packages_hide_nothing(tiny, tmp_path):
    for name in ("infokv", "data", "analysis", "cli", "forward_influence"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong one')")
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    needs = ()\n    def select(self, signals, count, document):\n        return [5]\n"
    )
    line = " ".join(arguments(tiny / "model", tiny / "docs.jsonl", "run", "--selector", "mine:Mine"))
    done = shell(f"$FI selectors && $FI {line}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the wrong one" not in done.stderr
    done = shell(f"$FI {changed(line, 'mine:Mine', 'forward_influence:Mine')}", tmp_path)
    assert done.returncode == 2
    assert re.search(
        r"error: 'forward_influence:Mine' cannot be imported .*Python took forward_influence from", done.stderr
    )


def test_a_module_that_is_hidden_by_an_installed_one_is_explained(cli, tmp_path, tiny, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path / "installed")
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed/my_selectors.py").write_text("class Other: pass")
    (tmp_path / "my_selectors.py").write_text("class Mine: pass")
    command = arguments(tiny / "model", tiny / "docs.jsonl", "run", "--selector", "my_selectors:Mine")
    sentence = refusal(*cli(*command))
    assert str(tmp_path / "installed/my_selectors.py") in sentence and "rename your own file" in sentence


def test_a_current_folder_that_is_gone_is_no_traceback(tmp_path):
    done = shell("mkdir gone && cd gone && rmdir ../gone && $FI --version", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


# Other people's code

LEAVES = {
    "on import": "import sys; sys.exit(0)",
    "in the constructor": "class Mine:\n    def __init__(self):\n        raise SystemExit",
}


@pytest.mark.parametrize("when", LEAVES)
def test_code_that_leaves_the_program_is_one_sentence(tiny, tmp_path, when):
    (tmp_path / "mine.py").write_text(LEAVES[when])
    line = " ".join(arguments(tiny / "model", tiny / "docs.jsonl", "run", "--selector", "mine:Mine"))
    done = shell(f"$FI {line}", tmp_path)
    assert "SystemExit" in refusal(done.returncode, done.stdout, done.stderr)


# Variables and names


@pytest.mark.parametrize(("name", "value"), [("HTTPS_PROXY", "http://h:abc"), ("HF_ENDPOINT", "http://[bad")])
def test_a_malformed_address_names_its_variable(tmp_path, name, value):
    environment = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "")
    done = shell("$FI measure --model org/name --data builtin", tmp_path, **environment, **{name: value})
    sentence = refusal(done.returncode, done.stdout, done.stderr)
    assert name in sentence and value in sentence


def test_without_a_home_the_variable_is_named(tmp_path):
    script = """
        import os, pathlib, sys
        for name in ("HOME", "XDG_CACHE_HOME", "FORWARD_INFLUENCE_CACHE"):
            os.environ.pop(name, None)
        def unknown(*_):
            raise RuntimeError("Could not determine home directory.")
        pathlib.Path.home = classmethod(unknown)
        from forward_influence.cli import main
        main(["doctor"])
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    done = shell(f"{sys.executable} script.py", tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "FORWARD_INFLUENCE_CACHE" in done.stderr


@pytest.mark.parametrize("option", ["--model", "--tokenizer", "--data"])
@pytest.mark.parametrize("name", ["x" * 5000, "~no-such-user-here/x"])
def test_names_that_nothing_can_have(cli, tiny, option, name):
    command = arguments(tiny / "model", tiny / "docs.jsonl", "run", "--selector", "none")
    sentence = refusal(*cli(*command, option, name))
    assert len(sentence) < 500


def test_a_broken_configuration_is_one_sentence(cli, tiny, tmp_path):
    (tmp_path / "model").mkdir()
    for content in ("[]", "{", '{"model_type": "llama", "num_hidden_layers": "x"}', '{"model_type": 3}'):
        (tmp_path / "model/config.json").write_text(content)
        refusal(*cli(*arguments(tmp_path / "model", tiny / "docs.jsonl", "run", "--selector", "none")))


def changed(line, before, after):
    assert before in line
    return line.replace(before, after)
