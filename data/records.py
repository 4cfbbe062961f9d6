"""Files to records: .jsonl, .parquet and .txt, read as UTF-8 whatever the locale, one bad record at a time.

A record keeps where its text lies, not the text, so files larger than memory are fine.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from forward_influence.data.errors import DataError

TEXT_FIELDS = ("article", "text", "content", "document", "body")
ID_FIELDS = ("id", "article_id", "document_id", "_id")
_PARQUET_ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Record:
    """One usable document of a file.

    Attributes
    ----------
    own_id : str or None
        The record's own id, if it has one.
    stem : str
        Name of the file without folder and ending.
    sha : str
        SHA-256 of the text, hex.
    read : callable
        Reads the text again; raises :class:`DataError` if it is not the same any more.
    """

    own_id: str | None
    stem: str
    sha: str
    read: Callable[[], str]


class _UnusableError(Exception):
    """Why a record is left out."""


def scan_file(path: Path, report: Callable[[str], None]) -> Iterator[Record]:
    """Usable records of a file, in its order.

    Parameters
    ----------
    path : Path
        The ending says the format: one of the keys of :data:`SCANNERS`.
    report : callable
        Takes a sentence about each record that is left out.
    """
    found = False

    def told(sentence: str) -> None:
        nonlocal found
        found = True
        report(sentence)

    try:
        for own_id, text, read in SCANNERS[path.suffix.lower()](path, told):
            found = True
            sha = _sha(text)
            yield Record(own_id, _stem(path), sha, partial(_read_same, path, read, sha))
    except OSError as error:
        told(f"{path} cannot be read ({error.strerror or error}).")
    if not found:
        report(f"{path} is empty.")


def _scan_jsonl(path: Path, report: Callable[[str], None]) -> Iterator[tuple]:
    with open(path, "rb") as file:
        start = 0
        # A binary file splits at b"\n" alone: U+0085 and U+2028 stay inside their record.
        for number, line in enumerate(file, 1):
            record = line.removeprefix(codecs.BOM_UTF8)
            offset = start + len(line) - len(record)
            start += len(line)
            if not record.strip():
                continue
            try:
                row = _parse(_decode(record, offset))
                own_id, field, text = _pick(row)
            except _UnusableError as why:
                report(f"{path}, line {number} (from byte {offset}) {why}; the record is left out.")
            else:
                yield own_id, text, partial(_read_jsonl, path, offset, len(record), field)


def _scan_txt(path: Path, report: Callable[[str], None]) -> Iterator[tuple]:
    try:
        text = _read_txt(path)
    except _UnusableError as why:
        report(f"{path} {why}; the file is left out.")
        return
    if text.strip():
        yield None, text, partial(_read_txt, path)


def _scan_parquet(path: Path, report: Callable[[str], None]) -> Iterator[tuple]:
    import pyarrow

    try:
        yield from _scan_row_groups(path, report)
    except pyarrow.ArrowException as error:
        report(f"{path} cannot be read as Parquet ({str(error).splitlines()[0].rstrip('.')}).")


def _scan_row_groups(path: Path, report: Callable[[str], None]) -> Iterator[tuple]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        columns = [name for name in (*TEXT_FIELDS, *ID_FIELDS) if name in names]
        if not set(columns) & set(TEXT_FIELDS):
            report(f"{path} {_no_text_field(names)}; the file is left out.")
            return
        for group in range(file.num_row_groups):
            row = -1
            for batch in file.iter_batches(_PARQUET_ROWS_AT_ONCE, row_groups=[group], columns=columns):
                for index in range(batch.num_rows):
                    row += 1
                    try:
                        own_id, field, text = _pick(_parquet_row(batch, index))
                    except _UnusableError as why:
                        report(f"{path}, row {row} of row group {group} {why}; the record is left out.")
                    else:
                        yield own_id, text, partial(_read_parquet, path, group, row, field)


SCANNERS = {".jsonl": _scan_jsonl, ".parquet": _scan_parquet, ".txt": _scan_txt}


def _pick(row: Mapping) -> tuple[str | None, str, str]:
    """Own id, name of the text field, text: the first field that holds some. One that is null counts as absent."""
    there = [name for name in TEXT_FIELDS if row.get(name) is not None]
    if not there:
        raise _UnusableError(_no_text_field(list(row)))
    field = next((name for name in there if isinstance(row[name], str) and row[name].strip()), there[0])
    text = row[field]
    if not isinstance(text, str):
        raise _UnusableError(f"has a {type(text).__name__} in {field!r} instead of a string")
    if not text.strip():
        raise _UnusableError(f"has no text in {field!r}")
    own_id = next((str(row[name]) for name in ID_FIELDS if _is_id(row.get(name))), None)
    for name, value in ((field, text), ("id", own_id or "")):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _UnusableError(
                f"has half a surrogate pair at character {error.start} of {name!r}, which is no text"
            ) from error
    return own_id, field, text


def _is_id(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool) and value != ""


def _no_text_field(names: list[str]) -> str:
    seen = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f"has text in none of the fields {', '.join(TEXT_FIELDS)} (its fields: {seen or 'none'})"


def _parse(line: str) -> dict:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _UnusableError(f"is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise _UnusableError(f"is a JSON {type(row).__name__} instead of an object")
    return row


def _decode(data: bytes, offset: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _UnusableError(
            f"is not UTF-8 (byte 0x{data[error.start]:02x} at offset {offset + error.start} of the file)"
        ) from error


def _parquet_row(batch, index: int) -> dict:
    row = {}
    for name in batch.schema.names:
        try:
            row[name] = batch.column(name)[index].as_py()
        except UnicodeDecodeError as error:
            raise _UnusableError(f"is not UTF-8 (byte {error.start} of {name!r})") from error
    return row


def _read_jsonl(path: Path, offset: int, length: int, field: str) -> str:
    with open(path, "rb") as file:
        file.seek(offset)
        return json.loads(file.read(length).decode())[field]


def _read_txt(path: Path) -> str:
    data = path.read_bytes()
    text = data.removeprefix(codecs.BOM_UTF8)
    return _decode(text, len(data) - len(text))


def _read_parquet(path: Path, group: int, row: int, field: str) -> str:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        return file.read_row_group(group, columns=[field]).column(0)[row].as_py()


def _read_same(path: Path, read: Callable[[], str], sha: str) -> str:
    try:
        same = _sha(text := read()) == sha
    except (OSError, ValueError, TypeError, LookupError, AttributeError, _UnusableError) as error:
        raise DataError(
            f"{path} changed while it was in use ({error}); start again with a file that stays as it is."
        ) from error
    if not same:
        raise DataError(f"{path} changed while it was in use; start again with a file that stays as it is.")
    return text


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _stem(path: Path) -> str:
    # A file name need not be text, an id has to be.
    return os.fsencode(path.stem).decode(errors="replace")
