"""The commands of ``forward-influence``."""

from __future__ import annotations

import typer

from forward_influence.cli import doctor, fidelity, generate, influence, measure, methods, plot, selectors, show, tune

app = typer.Typer(
    name="forward-influence",
    help="Which cached tokens matter for the far future? Remove them from the KV cache, and see what it costs.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("measure")(measure.command)
app.command("fidelity")(fidelity.command)
app.command("influence")(influence.command)
app.command("tune")(tune.command)
app.command("plot")(plot.command)
app.command("show")(show.command)
app.command("selectors")(selectors.command)
app.command("generate")(generate.command)
app.command("methods")(methods.command)
app.command("doctor")(doctor.command)


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
    if version:
        from importlib.metadata import version as installed

        print(f"forward-influence {installed('forward-influence')}")
        raise typer.Exit
