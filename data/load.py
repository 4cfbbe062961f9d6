"""The one entrance: a corpus name, paths or nothing to a corpus."""

from __future__ import annotations

import difflib
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from forward_influence.data.arxiv import REPOSITORY, SPLITS, load_arxiv
from forward_influence.data.builtin import load_builtin
from forward_influence.data.documents import Corpus
from forward_influence.data.errors import DataError
from forward_influence.data.hub import hub_answers, offline_by_environment
from forward_influence.data.local import ENDINGS, load_local
from forward_influence.data.records import TEXT_FIELDS

_ARXIV = {"arxiv": "test", **{f"arxiv:{split}": split for split in SPLITS}}
_NAMES = ("builtin", *_ARXIV)
_CORPUS = f"a corpus ({', '.join(_NAMES)})"
_PATH = f"an existing file or folder ({', '.join(ENDINGS)})"


def load_documents(
    data: str | os.PathLike | Sequence[str | os.PathLike] | None = None,
    *,
    seed: int = 0,
    offline: bool = False,
    hub_reachable: Callable[[], bool] | None = None,
) -> Corpus:
    """A corpus by name or from files.

    Parameters
    ----------
    data : str, path, sequence of these, or None
        ``"builtin"``, ``"arxiv"`` (the test split; ``"arxiv:train"`` and ``"arxiv:validation"`` too), or
        files and folders of .jsonl, .parquet and .txt. A file called like a corpus is ``"./builtin"``.
        None takes ``arxiv`` where the hub answers and ``builtin`` elsewhere.
    seed : int
        Order of the documents; each one's place depends on the seed and its id alone.
    offline : bool
        Make no network attempt: ``arxiv`` comes from the cache of `datasets` or not at all. The
        libraries' own variables, such as HF_HUB_OFFLINE, do the same.
    hub_reachable : callable, optional
        Whether the hub answers. Asked at most once, and only where the answer matters.

    Returns
    -------
    Corpus

    Raises
    ------
    DataError
        If there is no such corpus, or no usable document in it.
    """
    named = _as_list(data)
    if named == ["builtin"]:
        return load_builtin(seed)
    if named and not (len(named) == 1 and named[0] in _ARXIV):
        _check_names(named)
        return load_local(named, seed)
    why_away = partial(_why_away, offline, hub_reachable or hub_answers)
    if named:
        return load_arxiv(_ARXIV[named[0]], seed, why_away=why_away)
    if away := why_away():
        return load_builtin(seed, reasons=[f"No data was named and {away}: 'builtin' is taken."])
    reason = "No data was named and the hub answers: 'arxiv' is taken."
    return load_arxiv("test", seed, why_away=lambda: None, reasons=[reason])


def describe_corpora() -> list[dict]:
    """What can be loaded here without any network: ``name``, ``available``, ``note`` of each corpus."""
    return [
        {"name": "builtin", **_describe_builtin()},
        {"name": "arxiv", **_describe_arxiv()},
        {
            "name": "local",
            "available": True,
            "note": f"{', '.join(ENDINGS)} files or folders; text in the first of {', '.join(TEXT_FIELDS)}",
        },
    ]


def _describe_builtin() -> dict:
    try:
        corpus = load_builtin(0)
    except DataError as error:
        return {"available": False, "note": str(error)}
    version = platform.python_version()
    note = f"the language reference of Python {version}, {len(corpus.text):,} characters, {corpus.identity}"
    return {"available": True, "note": note}


def _describe_arxiv() -> dict:
    try:
        corpus = load_arxiv("test", 0, why_away=lambda: "no network is used")
    except DataError:
        return {"available": False, "note": f"{REPOSITORY} is not in the cache; the first use downloads it"}
    return {"available": True, "note": f"{REPOSITORY} in the cache, {corpus.size} documents"}


def _why_away(offline: bool, hub_reachable: Callable[[], bool]) -> str | None:
    if offline or offline_by_environment():
        return "offline was asked for"
    return None if hub_reachable() else "the hub does not answer"


def _as_list(data) -> list[str | os.PathLike]:
    if data is None:
        return []
    named = [data] if isinstance(data, str | os.PathLike) or not isinstance(data, Iterable) else list(data)
    if not named:
        raise DataError(f"The list of data is empty; name {_CORPUS} or {_PATH}.")
    for name in named:
        if not isinstance(name, str | os.PathLike):
            raise DataError(f"Data {_shown(name)} is a {type(name).__name__}; name {_CORPUS} or {_PATH}.")
    return named


def _check_names(named: list[str | os.PathLike]) -> None:
    """Say which name is no path in words that fit a misspelt corpus too."""
    for name in named:
        if name in _NAMES and len(named) > 1:
            raise DataError(
                f"Corpus {name!r} cannot be joined with other data; name it alone, or ./{name} for a file of that name."
            )
        if not os.path.exists(os.path.expanduser(name)):
            near = difflib.get_close_matches(str(name), _NAMES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "check the path."
            raise DataError(f"Data {_shown(str(name))} is neither {_CORPUS} nor {_PATH}; {hint}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]}...{text[-1]}"
