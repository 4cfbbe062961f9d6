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
            "ranking: the same, methods below each other, the one that loses least first. correlations: which signal "
            "ranks single tokens as their influence does. parameters: KL by a method's "
            "parameter --x. tuning: what a tuned file is worth. Default: what the run is about."
        ),
    ] = None,
    selector: Annotated[list[str] | None, Option(help="Curves or signals to draw. Default: all.")] = None,
    x: Annotated[str | None, Option(help="Parameter on the axis of --figure parameters, such as alpha.")] = None,
    lines: Annotated[str | None, Option(help="A second parameter, with a curve for each of its values.")] = None,
    method: Annotated[str | None, Option(help="Whose parameters. Default: infokv.")] = None,
    budget: Annotated[str | None, Option(help="The budget of these, if the run has several.")] = None,
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
    from forward_influence.analysis.parameter_plot import plot_parameters
    from forward_influence.analysis.ranking_plot import plot_ranking
    from forward_influence.analysis.rate_curves import plot_rates
    from forward_influence.analysis.rate_distortion import split_selector
    from forward_influence.analysis.stats import few_documents
    from forward_influence.analysis.tuning_plot import plot_tuning
    from forward_influence.analysis.tuning_report import is_tuning, open_tuning
    from forward_influence.cli.parameters import defaults_of
    from forward_influence.errors import UserError
    from forward_influence.quiet import print_notice

    figures = {"figure2": plot_runs, "fidelity": plot_rates, "ranking": plot_ranking, "correlations": plot_correlations}
    names = (*figures, "parameters", "tuning")
    if figure is not None and figure not in names:
        raise UserError(f"Figure {figure!r} is unknown; choose one of {', '.join(names)}.")
    if figure is None and len(run or ()) == 1 and is_tuning(run[0]):
        figure = "tuning"
    if figure == "tuning" and len(run or ()) != 1:
        raise UserError("--figure tuning needs the one folder that tune wrote; name it behind plot.")
    runs = open_tuning(run[0]).runs if figure == "tuning" else open_runs(*(run or ()))
    of_removals = "correlations" if is_token_run(runs) else "figure2"
    budgets = {split_selector(row["selector"])[1] for row in runs.rows if row["status"] == "ok"}
    of_caches = "fidelity" if len(budgets) > 1 else "ranking"  # a curve has more than one point
    figure = figure or (of_caches if runs.spec.mode == "keep" else of_removals)
    _check(figure, x, {"--x": x, "--lines": lines, "--method": method, "--budget": budget}, selector)
    formats = tuple(format or FORMATS)
    if figure == "tuning":
        paths = plot_tuning(run[0], out, formats=formats)
    elif figure == "parameters":
        method = method or "infokv"
        paths = plot_parameters(runs, out, method=method, x=x, line=lines, defaults=defaults_of(method),
                                budget=budget, formats=formats)  # fmt: skip
    else:
        paths = figures[figure](runs, out, selectors=selector or None, formats=formats)
    for path in paths:
        print(path)
    if doubt := few_documents(len({row["document"] for row in runs.rows if row["status"] == "ok"})):
        print_notice(doubt)


def _check(figure: str, x: str | None, of_parameters: dict[str, str | None], selector: list[str] | None) -> None:
    """Refuse options that a figure does not take."""
    from forward_influence.errors import UserError

    given = [flag for flag, value in of_parameters.items() if value is not None]
    if figure != "parameters" and given:
        raise UserError(f"{given[0]} belongs to --figure parameters, and this is {figure}; name that figure.")
    if figure == "parameters" and x is None:
        raise UserError("--figure parameters needs the parameter on its axis; give one such as --x alpha.")
    if figure in ("parameters", "tuning") and selector:
        raise UserError(f"--selector does not go with --figure {figure}, which draws all; leave it out.")
