"""The cache: whole or not at all, whatever is killed, and made once however many ask."""

import os
import signal
import subprocess
import sys
import time

import pytest

from forward_influence import cache
from forward_influence.errors import UserError

BUILDER = """
import sys, time
from pathlib import Path
from forward_influence.cache import publish

def build(folder):
    (folder / "first").write_text("1")
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    time.sleep(float(sys.argv[3]))
    (folder / "second").write_text("2")

print(sorted(path.name for path in publish(Path(sys.argv[1]), build).iterdir()))
"""


def start(target, log, seconds):
    command = [sys.executable, "-c", BUILDER, str(target), str(log), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_root(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("FORWARD_INFLUENCE_CACHE", raising=False)
    assert cache.cache_root() == tmp_path / "xdg" / "forward-influence"
    monkeypatch.setenv("FORWARD_INFLUENCE_CACHE", str(tmp_path / "own"))
    assert cache.cache_root() == tmp_path / "own"


@pytest.mark.parametrize("own", ["", "~/cache", "~nobody-of-this-name/cache"])
def test_without_a_home_the_way_out_is_named(monkeypatch, own):
    def unknown(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("FORWARD_INFLUENCE_CACHE", own)
    monkeypatch.setattr(cache.Path, "expanduser", unknown)
    monkeypatch.setattr(cache.Path, "home", classmethod(unknown))
    with pytest.raises(UserError, match=f"{own or '~/.cache'}.*HOME.*in FORWARD_INFLUENCE_CACHE"):
        cache.cache_root()


def test_built_once(tmp_path):
    calls = []

    def build(folder):
        calls.append(folder)
        (folder / "file").write_text("x")

    target = tmp_path / "a" / "b"
    assert cache.publish(target, build) == cache.publish(target, build) == target
    assert len(calls) == 1
    assert (target / "file").read_text() == "x"


def test_failure_leaves_nothing(tmp_path):
    def build(folder):
        (folder / "half").write_text("x")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cache.publish(tmp_path / "a", build)
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == []


def test_kill_in_the_middle_leaves_nothing_half(tmp_path):
    target, log = tmp_path / "a", tmp_path / "log"
    process = start(target, log, 60)
    wait_for(log.exists)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not target.exists()
    again = start(target, log, 0)
    assert again.communicate(timeout=20)[0].strip() == "['first', 'second']"
    assert not list(tmp_path.glob(".a.tmp-*")), "what the killed process left is removed"


def test_two_processes_build_once(tmp_path):
    target, log = tmp_path / "a", tmp_path / "log"
    both = [start(target, log, 0.5) for _ in range(2)]
    assert [process.communicate(timeout=30)[0].strip() for process in both] == ["['first', 'second']"] * 2
    assert log.read_text() == "built\n"


def test_unwritable_is_one_sentence(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UserError, match="cannot be written .*FORWARD_INFLUENCE_CACHE"):
        cache.publish(blocked / "a" / "b", lambda folder: None)


def test_hash_follows_the_file(monkeypatch, tmp_path):
    import hashlib

    monkeypatch.setenv("FORWARD_INFLUENCE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "REMEMBER_HASH_FROM", 10)
    file = tmp_path / "weights"
    contents = (b"short", b"long enough to be remembered", b"as long, but it is not the same!")
    for age, content in enumerate(contents):
        file.write_bytes(content[:28])
        os.utime(file, ns=(0, 10**9 * age))
        expected = hashlib.sha256(content[:28]).hexdigest()
        assert cache.file_sha256(file) == expected
        assert cache.file_sha256(file) == expected
    assert len([path for path in (tmp_path / "cache" / "hashes").iterdir() if path.is_dir()]) == 2


def test_a_change_that_keeps_size_and_time_is_seen(monkeypatch, tmp_path):
    monkeypatch.setenv("FORWARD_INFLUENCE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "REMEMBER_HASH_FROM", 1)
    file = tmp_path / "weights"
    file.write_bytes(b"abc")
    os.utime(file, ns=(0, 0))
    first = cache.file_sha256(file)
    time.sleep(0.02)  # longer than a tick of the file system's clock
    file.write_bytes(b"abd")
    os.utime(file, ns=(0, 0))
    assert cache.file_sha256(file) != first


def test_remembered_hash_is_not_computed_again(monkeypatch, tmp_path):
    monkeypatch.setenv("FORWARD_INFLUENCE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "REMEMBER_HASH_FROM", 1)
    file = tmp_path / "weights"
    file.write_bytes(b"abc")
    first = cache.file_sha256(file)
    monkeypatch.setattr(cache, "_sha256", lambda path: pytest.fail("computed again"))
    assert cache.file_sha256(file) == first
