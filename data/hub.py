"""Whether the hub is wanted and answers, known within seconds: the libraries retry for half a minute."""

from __future__ import annotations

import http.client
import os
import ssl
import threading
import urllib.error
import urllib.request

_TRUE = {"1", "ON", "YES", "TRUE"}
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
    """
    answers: list[bool] = []
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    # A thread, because no timeout bounds the look-up of a name.
    thread = threading.Thread(target=lambda: answers.append(_answers(endpoint, seconds)), daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answers) and answers[0]


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
