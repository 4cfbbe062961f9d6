"""Whether the hub answers, tried on a server of this machine."""

import http.server
import socket
import threading
import time

import pytest

from forward_influence.data.errors import DataError
from forward_influence.data.hub import check_addresses, hub_answers


@pytest.fixture(autouse=True)
def _no_addresses(monkeypatch):
    for name in ("HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
def hub(monkeypatch, socket_enabled):
    """A server on this machine in the place of the hub; gives what it answers and how late."""
    answer = {"status": 200, "seconds": 0.0}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            time.sleep(answer["seconds"])
            self.send_response(answer["status"])
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield answer
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("status", "answers"), [(200, True), (404, True), (407, False), (503, False)])
def test_the_hub_answers_if_it_answers_itself(hub, status, answers):
    hub["status"] = status
    assert hub_answers() is answers


def test_the_check_ends_in_time(hub):
    hub["seconds"] = 1.0
    start = time.monotonic()
    assert not hub_answers(0.2)
    assert time.monotonic() - start < 0.9


def test_a_slow_look_up_of_the_name_does_not_hold_it_up(socket_enabled, monkeypatch):
    def look_up(*_, **__):
        time.sleep(1.0)
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    start = time.monotonic()
    assert not hub_answers(0.2)
    assert time.monotonic() - start < 0.9


def test_a_proxy_that_refuses_is_no_hub(hub, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    assert not hub_answers()


def test_no_hub_there(socket_enabled, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert not hub_answers()


@pytest.mark.parametrize("name", ["HF_ENDPOINT", "HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "all_proxy"])
@pytest.mark.parametrize(
    "value", ["http://[bad", "http://h:abc", "http://h:99999", "http://", "https:/host", "not a url", "http://:8080"]
)
def test_what_is_no_address_is_named_not_unreachable(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(DataError) as caught:
        hub_answers()
    sentence = str(caught.value)
    assert sentence.startswith(f"{name} is {value!r}, which is no address") and "unset it" in sentence
    assert "\n" not in sentence


def test_a_hub_needs_its_scheme_and_a_proxy_does_not(monkeypatch):
    for good in ("proxy.example:3128", "http://user:word@proxy:80/", "socks5h://127.0.0.1:1080", "http://[::1]:80", ""):
        monkeypatch.setenv("HTTPS_PROXY", good)
        check_addresses()
    monkeypatch.setenv("HF_ENDPOINT", "hub.example")
    with pytest.raises(DataError, match="HF_ENDPOINT"):
        check_addresses()
