"""``forward-influence plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option


def command(
    run: Annotated[
        list[Path] | None, Argument(help="Run folders that form one run. Default: the newest under runs/.")
    ] = None,
    figure: Annotated[
        str | None,
        Option(
            help="figure2: KL against the horizon. fidelity: KL against the share kept, for compression methods. "
            "correlations: which signal ranks single tokens as their influence does. Default: what the run is about."
        ),
    ] = None,
    selector: Annotated[list[str] | None, Option(help="Curves or signals to draw. Default: all.")] = None,
    out: Annotated[Path | None, Option(help="Stem of the files. Default: the figure's name in the run folder.")] = None,
    format: Annotated[list[str] | None, Option(help="png, pdf or svg; may be repeated. Default: all three.")] = None,
    debug: Annotated[bool, Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Draw a run, by selector, method or signal; the tables behind the figure are saved as CSV beside it.

    --selector takes the names in the legend and in `forward-influence show`.
    """
    from forward_influence.analysis.correlation_plot import plot_correlations
    from forward_influence.analysis.correlations import is_token_run
    from forward_influence.analysis.drawing import FORMATS
    from forward_influence.analysis.figures import plot_runs
    from forward_influence.analysis.frames import open_runs
    from forward_influence.analysis.rate_curves import plot_rates
    from forward_influence.analysis.stats import few_documents
    from forward_influence.errors import UserError
    from forward_influence.quiet import print_notice

    figures = {"figure2": plot_runs, "fidelity": plot_rates, "correlations": plot_correlations}
    if figure is not None and figure not in figures:
        raise UserError(f"Figure {figure!r} is unknown; choose one of {', '.join(figures)}.")
    runs = open_runs(*(run or ()))
    of_removals = "correlations" if is_token_run(runs) else "figure2"
    draw = figures[figure or ("fidelity" if runs.spec.mode == "keep" else of_removals)]
    for path in draw(runs, out, selectors=selector or None, formats=tuple(format or FORMATS)):
        print(path)
    if doubt := few_documents(len({row["document"] for row in runs.rows if row["status"] == "ok"})):
        print_notice(doubt)
