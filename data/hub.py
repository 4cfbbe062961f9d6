"""Whether the hub is wanted and answers, known within seconds: the libraries retry for half a minute."""

from __future__ import annotations

import http.client
import os
import ssl
import threading
import urllib.error
import urllib.parse
import urllib.request

from forward_influence.data.errors import DataError

_TRUE = {"1", "ON", "YES", "TRUE"}
_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


def offline_by_environment() -> bool:
    """Whether one of the libraries' own offline variables is set."""
    return any(os.environ.get(name, "").upper() in _TRUE for name in _OFFLINE_VARIABLES)


def hub_answers(seconds: float = 3.0) -> bool:
    """Whether ``HF_ENDPOINT`` answers a HEAD request, through the proxies of the environment.

    Parameters
    ----------
    seconds : float
        Upper limit of the whole check, looking up the name included.

    Raises
    ------
    DataError
        If ``HF_ENDPOINT`` or a proxy variable holds something that is no address.
    """
    check_addresses()
    answers: list[bool] = []
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    # A thread, because no timeout bounds the look-up of a name.
    thread = threading.Thread(target=lambda: answers.append(_answers(endpoint, seconds)), daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answers) and answers[0]


def check_addresses(names: tuple[str, ...] = ("HF_ENDPOINT", *_PROXIES)) -> None:
    """Refuse variables that hold no address: behind one, every hub would look out of reach.

    Parameters
    ----------
    names : tuple of str
        Variables to look at.

    Raises
    ------
    DataError
        Names the variable and its value.
    """
    for name in names:
        value = os.environ.get(name)
        if value and (why := _fault(value, bare=name != "HF_ENDPOINT")):
            raise DataError(
                f"{name} is {value!r}, which is no address ({why}); set one such as http://host:8080, or unset it."
            )


def _fault(address: str, *, bare: bool) -> str | None:
    """What is wrong with an address; `bare` ones may lack the ``http://``."""
    try:
        parts = urllib.parse.urlsplit(f"http://{address}" if bare and "://" not in address else address)
        if not parts.hostname or any(mark.isspace() for mark in address.strip()):
            return "it names no host"
        if parts.netloc.endswith(":"):
            return "it has a colon without a port"
        if not bare and parts.scheme not in ("http", "https"):
            return f"its scheme is {parts.scheme!r}"
        _ = parts.port
    except ValueError as error:
        return str(error)
    return None


def _answers(endpoint: str, seconds: float) -> bool:
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        # An opener of its own: the module's shared one keeps the proxies of its first use.
        with urllib.request.build_opener().open(request, timeout=seconds):
            return True
    except urllib.error.HTTPError as error:
        # The hub itself may say 4xx to this request; 407 and 5xx come from a proxy or a hub that is down.
        return error.code < 500 and error.code != 407
    except urllib.error.URLError as error:
        # Somebody answered; the libraries know other certificates than this module does.
        return isinstance(error.reason, ssl.SSLCertVerificationError)
    except (OSError, ValueError, http.client.HTTPException):
        return False
