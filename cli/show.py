"""``forward-influence show``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from forward_influence.cli.rates import rates
from forward_influence.cli.tokens import tokens

#: Seconds between looks at a growing run.
_PAUSE = 5.0


def command(
    run: Annotated[
        list[Path] | None, Argument(help="Run folders that form one run. Default: the newest under runs/.")
    ] = None,
    follow: Annotated[bool, Option("--follow", help="Print each row as it comes, until the run is whole.")] = False,
    export: Annotated[Path | None, Option(help="Write the tidy table to this .csv or .parquet file.")] = None,
    debug: Annotated[bool, Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Say what was run, how far it is, and the key numbers."""
    from forward_influence.analysis.frames import open_runs
    from forward_influence.analysis.tuning_report import is_tuning

    paths = tuple(run or ())
    if len(paths) == 1 and not follow and export is None and is_tuning(paths[0]):
        from forward_influence.analysis.tuning_report import describe_tuning

        print(describe_tuning(paths[0]))
        return
    if len(paths) == 1 and not follow and export is None and (several := different_runs(paths[0])):
        print(listing(several))
        return
    if follow:
        _follow(paths)
    runs = open_runs(*paths)
    print(describe(runs))
    if any(row["status"] == "ok" for row in runs.rows):
        print(key_numbers(runs))
    if export is not None:
        for path in runs.export(export):
            print(path)


def key_numbers(runs) -> str:
    """The tables of what a run is about."""
    from forward_influence.analysis.correlations import is_token_run

    if runs.spec.mode == "keep":
        return rates(runs)
    return tokens(runs) if is_token_run(runs) else numbers(runs)


def different_runs(path: Path) -> list[Path]:
    """What a folder holds, if that is more than one run: the run folders in it, and folders of shards."""
    from forward_influence.paths import reachable_path
    from forward_influence.run_files import RUN_JSON
    from forward_influence.runs import find_runs

    path = reachable_path(path, "run")
    if not path.is_dir() or (path / RUN_JSON).is_file():
        return []
    inside = [child for child in sorted(path.iterdir()) if (find_runs(child)[0] / RUN_JSON).is_file()]
    hashes = {_hash(folder) for child in inside for folder in find_runs(child)}
    return inside if len(hashes) > 1 else []


def _hash(folder: Path) -> str | None:
    """A run's hash; None for one that the listing says to be broken."""
    from forward_influence.errors import UserError
    from forward_influence.run_files import read_header

    try:
        return read_header(folder)["hash"]
    except UserError:
        return None


def listing(folders: list[Path]) -> str:
    """One line for each run: folder, model, rows and when it was last written; the newest last."""
    from forward_influence.analysis.frames import open_runs
    from forward_influence.errors import UserError
    from forward_influence.run_files import ROWS, RUN_JSON
    from forward_influence.runs import find_runs

    lines = []
    for folder in folders:
        files = [one / name for one in find_runs(folder) for name in (RUN_JSON, ROWS)]
        when = max(file.stat().st_mtime for file in files if file.exists())
        try:
            runs = open_runs(folder)
            model = runs.runs[-1].provenance.get("model", {}).get("name", "?")
            told = f"{model}, {runs.count('ok')} of {planned(runs)} rows measured"
        except UserError as error:  # one that is broken hides no other
            told = f"cannot be read: {error}"
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(when))
        lines.append((when, f"{folder}  {told}, {date}"))
    shown = [line for _, line in sorted(lines)]
    return "\n".join([*shown, "", "More about one of them: forward-influence show RUN"])


def describe(runs) -> str:
    """What was run and how far it is, in a few lines."""
    spec, facts = runs.spec, runs.runs[-1].provenance
    lines = [
        f"run        {', '.join(str(one.path) for one in runs.runs)} (hash {runs.hash[:8]})",
        f"model      {facts.get('model', {}).get('name', '?')} ({spec.model[:40]}), {spec.dtype}",
        f"data       {facts.get('corpus', {}).get('name', '?')} ({spec.data[:40]})",
        f"study      {spec.sentence()}",
        f"rows       {runs.count('ok')} measured, {runs.count('skipped')} skipped, {runs.count('failed')} failed"
        f" of {planned(runs)} planned",
    ]
    reasons = {(row["status"], row["reason"]) for row in runs.rows if row["status"] != "ok"}
    lines += [f"{status:<10} {reason}" for status, reason in sorted(reasons)]
    if spec.extend_context:
        lines.append(f"context    extended by {spec.extend_context}: beyond what the model was trained for")
    return "\n".join(lines)


def planned(runs) -> int:
    """Rows that the folders will hold when their last invocations have ended."""
    latest = [run.resumed[-1] if run.resumed else run.provenance for run in runs.runs]
    return max(len(runs.rows), sum(one.get("planned_rows", 0) for one in latest))


def numbers(runs) -> str:
    """Key numbers per selector, and the differences between selectors per band."""
    from forward_influence.analysis.bands import band_table
    from forward_influence.analysis.stats import few_documents, summary_table

    summary = summary_table(runs)
    near, far = summary.near_stop.iloc[0], (summary.far_start.iloc[0], summary.far_stop.iloc[0])
    bands = {"kl_near": f"kl 0-{near}", "kl_far": f"kl {far[0]}-{far[1]}"}
    if len(set(bands.values())) == 1:  # a short horizon is one band
        del bands["kl_far"]
    if (summary.n_documents_far != summary.n_documents).any():  # fewer documents, in which near and far compare
        bands = {"n_documents_far": "n_to_end"} | bands
    shown = summary[
        ["selector", "n_removed", "n_documents", "kl_mean", *bands, "q50", "q99", "max", "delta_nll", "top1_changed"]
    ].rename(columns=bands)
    ends = "; bands: over the n_to_end documents that reach the end" if "n_documents_far" in bands else ""
    parts = ["", f"KL in nats (kl_mean: mean over documents; q50 to max: over all offsets{ends})",
             shown.to_string(index=False, float_format=_short)]  # fmt: skip
    bands = band_table(runs)
    if len(bands) and (bands.n_documents > 1).any():
        bands = bands[["a", "b", "band_start", "band_stop", "difference", "low", "high", "n_documents"]]
        parts += ["", "Differences of mean KL, a minus b, with paired 95% intervals over documents",
                  bands.to_string(index=False, float_format=_short)]  # fmt: skip
    if doubt := few_documents(int(summary.n_documents.max())):
        parts += ["", doubt]
    return "\n".join(parts)


def _short(value: float) -> str:
    return f"{value:.3g}"


def _follow(paths: tuple[Path, ...]) -> None:
    """Print rows as they are written, until all planned ones are there."""
    from forward_influence.analysis.frames import open_runs

    told: set[tuple[str, str]] = set()
    while True:
        runs = open_runs(*paths)
        for row in runs.rows:
            if (row["key"], row["status"]) not in told:
                told.add((row["key"], row["status"]))
                print(_line(row), flush=True)
        if len(runs.rows) >= planned(runs):
            return
        time.sleep(_PAUSE)


def _line(row: dict) -> str:
    if row["status"] != "ok":
        return f"{row['document']}  {row['selector']}  {row['status']}: {row['reason']}"
    mean = sum(count * kl for count, kl in zip(row["chunk_count"], row["kl_mean"])) / sum(row["chunk_count"])
    return f"{row['document']}  {row['selector']}  mean KL {_short(mean)} nats"
