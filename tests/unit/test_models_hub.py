"""The reachability check: short, honest about proxies, silent when offline."""

import socket
import time

import pytest

from forward_influence import hub
from forward_influence.errors import UserError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    hub._accepts_connection.cache_clear()
    yield
    hub._accepts_connection.cache_clear()


@pytest.fixture
def connections(monkeypatch):
    """Records where a connection is attempted; every attempt succeeds."""
    made = []

    class Connection:
        def close(self):
            pass

    def connect(address, timeout=None):
        made.append(address)
        return Connection()

    monkeypatch.setattr(socket, "create_connection", connect)
    return made


def test_reachable_once_per_process(connections):
    assert hub.hub_reachable()
    assert hub.hub_reachable()
    assert connections == [("huggingface.co", 443)]


def test_endpoint_and_port_are_honoured(connections, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example:8080/hf")
    assert hub.hub_reachable()
    assert connections == [("mirror.example", 8080)]


def test_proxy_is_the_first_hop(connections, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    assert hub.hub_reachable()
    assert connections == [("proxy.example", 3128)]


def test_no_proxy_goes_straight(connections, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "huggingface.co")
    assert hub.hub_reachable()
    assert connections == [("huggingface.co", 443)]


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_environment_makes_no_attempt(connections, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert not hub.hub_reachable()
    assert connections == []


def test_refused_is_unreachable(monkeypatch):
    def refuse(address, timeout=None):
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refuse)
    assert not hub.hub_reachable()


def test_a_hanging_name_server_costs_only_the_timeout(monkeypatch):
    monkeypatch.setattr(socket, "create_connection", lambda *_: time.sleep(20))
    start = time.monotonic()
    assert not hub.hub_reachable(timeout=0.2)
    assert time.monotonic() - start < 2


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
