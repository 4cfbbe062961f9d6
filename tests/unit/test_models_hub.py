"""The reachability check: short, honest about proxies, silent when offline."""

import socket
import time

import pytest

from forward_influence import hub
from forward_influence.errors import UserError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    hub._answers.cache_clear()
    yield
    hub._answers.cache_clear()


@pytest.fixture
def asked(monkeypatch):
    """Records each time the hub is asked; it always answers. How it is asked: test_data_hub.py."""
    times = []
    monkeypatch.setattr(hub, "hub_answers", lambda seconds: times.append(seconds) or True)
    return times


def test_asked_once_per_process_and_endpoint(asked, monkeypatch):
    assert hub.hub_reachable()
    assert hub.hub_reachable()
    assert asked == [hub.REACH_TIMEOUT]
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example:8080/hf")
    assert hub.hub_reachable()
    assert len(asked) == 2


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"])
def test_offline_environment_makes_no_attempt(asked, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert not hub.hub_reachable()
    assert asked == []


def test_no_answer_is_unreachable(monkeypatch):
    monkeypatch.setattr(hub, "hub_answers", lambda seconds: False)
    assert not hub.hub_reachable()


def test_a_hub_that_accepts_and_stays_silent_costs_only_the_timeout(socket_enabled, monkeypatch):
    """A TCP connection alone is no answer: behind it the hub libraries would wait for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        start = time.monotonic()
        assert not hub.hub_reachable(timeout=0.3)
        assert time.monotonic() - start < 2


@pytest.mark.parametrize(("name", "value"), [("HTTPS_PROXY", "http://h:abc"), ("HF_ENDPOINT", "http://[bad")])
def test_malformed_addresses_are_named(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        hub.hub_reachable(timeout=1)
    assert name in str(caught.value) and repr(value) in str(caught.value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not hub.hub_reachable(timeout=1), "nobody asks for an address then"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("org/name", True), ("HuggingFaceTB/SmolLM2-135M-Instruct", True), ("smollm2-135m", False)]
    + [(text, False) for text in ("a/b/c", "./a", "../a", "/a/b", "~/a", "a b/c")],
)
def test_repo_id(text, expected):
    assert hub.is_repo_id(text) is expected


def test_snapshot_folder_tells_its_repository(tmp_path):
    folder = tmp_path / "models--org--some-name" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    assert hub.repo_of_snapshot(folder) == ("org/some-name", COMMIT)
    assert hub.repo_of_snapshot(tmp_path) is None
    assert hub.repo_of_snapshot(folder.parent / "main") is None


def test_unreachable_and_not_cached_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "hub_reachable", lambda: False)
    monkeypatch.setattr(hub, "cached_snapshot", lambda repo_id: None)
    with pytest.raises(UserError, match=r"cannot be reached within 3 s; give a local folder"):
        hub.snapshot("org/name", offline=False)
    with pytest.raises(UserError, match=r"offline work was asked for; give a local folder"):
        hub.snapshot("org/name", offline=True)


def test_unreachable_but_cached_is_used_with_a_notice(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "hub_reachable", lambda: False)
    monkeypatch.setattr(hub, "cached_snapshot", lambda repo_id: tmp_path)
    told = []
    assert hub.snapshot("org/name", offline=False, notify=told.append) == tmp_path
    assert len(told) == 1
    assert "org/name is taken from the local cache" in told[0]
    assert hub.snapshot("org/name", offline=True, notify=told.append) == tmp_path
    assert len(told) == 1, "asked for offline, it is no news"
