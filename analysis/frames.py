"""One or several run folders as one run, and the tidy table made from it."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from forward_influence.contents import check_code, check_text
from forward_influence.errors import UserError
from forward_influence.paths import reachable_path
from forward_influence.rows import CHUNK_FIELDS, SCHEMA_VERSION, InfluenceCurve, RunSpec
from forward_influence.run_files import spec_differences
from forward_influence.runs import Run, find_runs, newest_run, read_run

if TYPE_CHECKING:
    import pandas

#: Key of the provenance (JSON) in the key-value metadata of an exported Parquet file.
PARQUET_KEY = b"forward_influence"

_ROW_COLUMNS = ("document", "selector", "mode", "status", "reason")
_SIZE_COLUMNS = ("n_removed", "removed_fraction", "kept_fraction", "n_tokens", "seconds")
_SPEC_COLUMNS = ("model", "dtype", "prefix", "horizon")


@dataclass(frozen=True)
class Runs:
    """Run folders with one spec, read as one run; made by :func:`open_runs`.

    Attributes
    ----------
    runs : tuple of Run
    """

    runs: tuple[Run, ...]

    @property
    def spec(self) -> RunSpec:
        return self.runs[0].spec

    @property
    def hash(self) -> str:
        return self.runs[0].hash

    @cached_property
    def rows(self) -> list[dict]:
        """Rows of any status, each key once, in the order of folders and lines.

        A row that several folders hold counts once if all fields but ``seconds`` are equal; a finished
        one replaces a failed one.

        Raises
        ------
        UserError
            If two finished rows with one key differ, or a document's text differs between rows.
        """
        found: dict[str, tuple[dict, Run]] = {}
        texts: dict[str, str] = {}
        for run in self.runs:
            for row in run.rows:
                check_text(texts, row["document"], row["document_sha"], run.path)
                old, where = found.get(row["key"], (None, None))
                if old is None or old["status"] == "failed":
                    found[row["key"]] = row, run
                elif row["status"] != "failed" and {**row, "seconds": 0} != {**old, "seconds": 0}:
                    raise UserError(
                        f"Document {row['document']!r} with selector {row['selector']!r} has different "
                        f"results in {str(where.path)!r} and {str(run.path)!r}; leave one folder out."
                    )
        return [row for row, _ in found.values()]

    def count(self, status: str) -> int:
        """Number of rows with this status."""
        return sum(row["status"] == status for row in self.rows)

    def curves(self) -> list[InfluenceCurve]:
        """The curve of each measured row."""
        return [InfluenceCurve.from_row(row, self.hash) for row in self.rows if row["status"] == "ok"]

    def frame(self, status: Collection[str] = ("ok",)) -> pandas.DataFrame:
        """The tidy table: one line per document, selector and chunk.

        Parameters
        ----------
        status : collection of str
            Rows to take. Those of status ``skipped`` and ``failed`` have no chunk: each is one line
            with ``chunk_count`` 0, NaN as values, and its ``reason``.

        Returns
        -------
        pandas.DataFrame
            ``kl_mean`` and ``delta_nll`` in nats, infinities as such; ``top1_changed`` a share;
            a chunk is the offsets from ``chunk_start`` up to but without ``chunk_stop``.
        """
        import pandas

        integers = ("chunk_start", "chunk_count", "nll_count")
        nothing = {name: [0 if name in integers else float("nan")] for name in CHUNK_FIELDS}
        columns: dict[str, list] = {name: [] for name in (*_ROW_COLUMNS, *CHUNK_FIELDS, *_SIZE_COLUMNS)}
        for row in self.rows:
            if row["status"] in status:
                chunks = row if row["status"] == "ok" else nothing
                for name in CHUNK_FIELDS:
                    columns[name] += chunks[name]
                for name in (*_ROW_COLUMNS, *_SIZE_COLUMNS):
                    columns[name] += [row[name]] * len(chunks["chunk_start"])
        frame = pandas.DataFrame(columns)
        floats = ("kl_mean", "delta_nll", "top1_changed", "removed_fraction", "kept_fraction", "seconds")
        frame = frame.astype(dict.fromkeys(floats, "float64"))
        for name in (*integers, "n_removed", "n_tokens"):
            frame[name] = frame[name].fillna(0).astype("int64")
        frame.insert(frame.columns.get_loc("chunk_count"), "chunk_stop", frame.chunk_start + frame.chunk_count)
        return frame.assign(**{name: getattr(self.spec, name) for name in _SPEC_COLUMNS}, hash=self.hash)

    def export(self, target: str | Path, status: Collection[str] = ("ok",)) -> list[Path]:
        """Write :meth:`frame` to a ``.parquet`` or ``.csv`` file, or both to a folder.

        Parquet carries :meth:`provenance` under the metadata key ``forward_influence``.

        Returns
        -------
        list of Path
            The files written.
        """
        target = reachable_path(target, "export")
        paths = [target] if target.suffix else [target / "frame.parquet", target / "frame.csv"]
        if paths[0].suffix not in (".parquet", ".csv"):
            raise UserError(f"Cannot export to {str(target)!r}; name a .parquet or .csv file, or a folder.")
        frame = self.frame(status)
        try:
            for path in paths:
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.suffix == ".parquet":
                    _write_parquet(frame, path, self.provenance())
                else:
                    frame.to_csv(path, index=False)
        except OSError as error:
            raise UserError(f"Cannot write {str(path)!r} ({error.strerror}); name another file.") from error
        return paths

    def provenance(self) -> dict:
        """Spec and hash, and what each folder's run.json tells about its making."""
        runs = [{"path": str(r.path), "provenance": r.provenance, "resumed": r.resumed} for r in self.runs]
        return {"schema": SCHEMA_VERSION, "spec": self.spec.to_dict(), "hash": self.hash, "runs": runs}


def open_runs(*paths: str | Path) -> Runs:
    """Read one or several run folders as one run; none given: the newest under ``runs/``.

    Parameters
    ----------
    *paths : path
        Run folders, or folders that hold run folders (the shards of a job array).

    Raises
    ------
    UserError
        If a folder is no run, a file is corrupt, or the runs differ in a choice that changes numbers, the code of
        a selector included.
    """
    folders = [folder for path in paths or (newest_run(),) for folder in find_runs(path)]
    runs = tuple(read_run(folder) for folder in dict.fromkeys(folders))
    for run in runs[1:]:
        if run.hash != runs[0].hash:
            raise UserError(
                f"Run folders {str(runs[0].path)!r} and {str(run.path)!r} cannot be joined "
                f"({spec_differences(runs[0].spec.to_dict(), run.spec.to_dict())}); open them one by one."
            )
        for selector in sorted(run.code.keys() & runs[0].code.keys()):
            check_code(selector, runs[0].code[selector], run.code[selector], runs[0].path)
    return Runs(runs)


def _write_parquet(frame: pandas.DataFrame, path: Path, provenance: dict) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pandas(frame, preserve_index=False)
    metadata = {**table.schema.metadata, PARQUET_KEY: json.dumps(provenance).encode()}
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), path)
