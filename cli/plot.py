"""``forward-influence plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option


def command(
    run: Annotated[
        list[Path] | None, Argument(help="Run folders that form one run. Default: the newest under runs/.")
    ] = None,
    selector: Annotated[list[str] | None, Option(help="Curves to draw. Default: all.")] = None,
    out: Annotated[Path | None, Option(help="Stem of the files. Default: figure2 in the run folder.")] = None,
    format: Annotated[list[str] | None, Option(help="png, pdf or svg; may be repeated. Default: all three.")] = None,
    debug: Annotated[bool, Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Draw KL against the horizon, one curve per selector; the table behind it is saved as CSV beside it.

    --selector takes the names that the rows carry, as in the legend and in `forward-influence show`.
    """
    from forward_influence.analysis.figures import FORMATS, plot_runs
    from forward_influence.analysis.frames import open_runs
    from forward_influence.analysis.stats import few_documents
    from forward_influence.quiet import print_notice

    runs = open_runs(*(run or ()))
    stem = out or runs.runs[0].path / "figure2"
    for path in plot_runs(runs, stem, selectors=selector or None, formats=tuple(format or FORMATS)):
        print(path)
    if doubt := few_documents(len({row["document"] for row in runs.rows if row["status"] == "ok"})):
        print_notice(doubt)
