"""arxiv-summarization, the corpus of the paper, through the `datasets` library."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from forward_influence.data.documents import RecordCorpus
from forward_influence.data.errors import DataError

REPOSITORY = "ccdv/arxiv-summarization"
CONFIGURATION = "section"  # the repository's own default
SPLITS = ("test", "train", "validation")
_ELSEWHERE = "name another corpus: 'builtin', or a .jsonl, .parquet or .txt file or folder"


def load_arxiv(
    split: str, seed: int, *, why_away: Callable[[], str | None], reasons: Sequence[str] = ()
) -> RecordCorpus:
    """One split, from the cache of `datasets` or else from the hub. Texts stay on disk until they are read.

    The cache comes first, so that a commit in the repository does not change a study under way.

    Parameters
    ----------
    split : {"test", "train", "validation"}
    seed : int
    why_away : callable
        Why the hub cannot be used, as a clause, or None if it can; asked only if the cache has no copy.
    reasons : sequence of str
        Sentences to put before the corpus's own notice.

    Raises
    ------
    DataError
        If it is neither in the cache nor to be had.
    """
    rows = cached_split(split)
    if rows is None:
        if away := why_away():
            raise DataError(
                f"The {split} split of {REPOSITORY} is not in the cache and {away}; "
                f"load it once with network access, or {_ELSEWHERE}."
            )
        rows = _download(split)
    if "article" not in rows.column_names:
        raise DataError(f"{REPOSITORY} has no field 'article' but {', '.join(rows.column_names)}; {_ELSEWHERE}.")
    return RecordCorpus(
        name="arxiv",
        identity=_identity(rows),
        seed=seed,
        notices=(*reasons, f"Corpus 'arxiv': {len(rows)} documents, the {split} split of {REPOSITORY}."),
        entries=[(f"arxiv-{split}-{index}", partial(_article, rows, index)) for index in range(len(rows))],
    )


def cached_split(split: str):
    """The split as a `datasets.Dataset` from the library's cache, the newest there; None without one.

    Files are opened by name: `load_dataset` finds a part of a repository again only by asking the hub.
    """
    import datasets

    folder = Path(datasets.config.HF_DATASETS_CACHE, REPOSITORY.replace("/", "___"))
    ready = [
        info.parent
        for info in folder.glob("*/*/*/dataset_info.json")
        if info.parts[-4] == CONFIGURATION or info.parts[-4].startswith(f"{CONFIGURATION}-")
    ]
    for revision in sorted(ready, key=lambda path: path.stat().st_mtime, reverse=True):
        files = _arrow_files(revision, split)
        if files:
            return datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in files])
    return None


def _arrow_files(folder: Path, split: str) -> list[Path]:
    """The files of a split in row order; none unless all of them are there."""
    name = re.compile(rf".*-{split}(?:-(\d+)-of-(\d+))?\.arrow")
    matches = [(match, file) for file in sorted(folder.iterdir()) if (match := name.fullmatch(file.name))]
    complete = bool(matches) and len(matches) == int(matches[0][0][2] or 1)
    return [file for _, file in matches] if complete else []


def _download(split: str):
    import datasets

    # Without data_files the library downloads every split: gigabytes for the sake of the test rows.
    files = {split: f"{CONFIGURATION}/{split}-*.parquet"}
    try:
        return datasets.load_dataset(REPOSITORY, CONFIGURATION, data_files=files, split=split)
    except Exception as error:  # whatever the libraries and the network raise becomes one sentence
        first_line = f"{error}".strip().split("\n")[0].rstrip(".")
        raise DataError(
            f"{REPOSITORY} could not be loaded ({type(error).__name__}: {first_line}); {_ELSEWHERE}."
        ) from error


def _identity(rows) -> str:
    # The cache folder of a data set is named by the revision it was made from.
    revisions = {Path(file["filename"]).parent.name for file in rows.cache_files}
    return ":".join(["arxiv", *sorted(revisions)])


def _article(rows, index: int) -> str:
    return rows[index]["article"] or ""  # some rows are null
