"""``forward-influence tune``."""

from __future__ import annotations

import sys
from typing import Annotated

from typer import Exit, Option

from forward_influence.cli import study_options as options


def command(
    method: Annotated[str, Option(help="The scorer whose parameters are chosen. See the command methods.")] = "infokv",
    vary: Annotated[
        list[str] | None,
        Option(help="PARAMETER=VALUE,VALUE,...; may be repeated. Default: what docs/tuning.md lists."),
    ] = None,
    objective: Annotated[
        str,
        Option(help="fidelity: small KL after compression. influence: large KL after removal of the selected tokens."),
    ] = "fidelity",
    keep: Annotated[
        list[str] | None, Option(help="Budget of fidelity: share of the prefix that stays; one. Default: 0.4.")
    ] = None,
    fraction: Annotated[str, Option(help="Share of the prefix that is removed, for influence.")] = "0.01",
    band: Annotated[str, Option(help="Offsets that count: all, near, far, or such as 128-512.")] = "all",
    trials: Annotated[int, Option(help="Settings to try; as many random ones are tried beside.")] = 24,
    train: Annotated[int, Option(help="Documents for the search.")] = 16,
    held_out: Annotated[int, Option(help="Documents for the judgement.")] = 16,
    model: options.Model = "smollm2-135m",
    tokenizer: options.Tokenizer = None,
    data: options.Data = None,
    prefix: Annotated[int, Option(help="Tokens cached before the cache is compressed.")] = 2048,
    horizon: options.Horizon = 512,
    chunk: options.Chunk = 128,
    sinks: Annotated[int, Option(help="First positions that are not candidates, for influence.")] = 4,
    recent: Annotated[int, Option(help="Last positions of the prefix that are not candidates, for influence.")] = 64,
    skip: options.Skip = 0,
    seed: Annotated[int, Option(help="Order of documents, and settings.")] = 0,
    batch: Annotated[int | None, Option(help="Settings at once. Default: what memory allows.")] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    offline: options.Offline = False,
    extend_context: options.ExtendContext = None,
    out: Annotated[str | None, Option(help="Folder. Default: runs/<model>-<hash>-tuned-<method>-<hash>.")] = None,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Choose a scorer's parameters by measurement on some documents, and judge them on others.

    The same command goes on after an interruption. It writes tuned.json, which --selector, --method and generate take
    as METHOD:FILE.
    """
    from forward_influence.cli import INTERRUPTED
    from forward_influence.tuning import tune

    try:
        result = tune(
            out=out, method=method, vary=_parsed(vary), objective=objective, keep=_one(keep, objective),
            fraction=fraction, band=band,
            trials=trials, train=train, held_out=held_out, model=model, tokenizer=tokenizer, data=data or None,
            prefix=prefix, horizon=horizon, chunk=chunk, sinks=sinks, recent=recent, skip=skip, seed=seed, batch=batch,
            dtype=dtype, device=device, offline=offline, extend_context=extend_context, dry_run=dry_run, quiet=quiet,
        )  # fmt: skip
    except KeyboardInterrupt:
        print("\nInterrupted; finished rows are kept, and the same command goes on from there.", file=sys.stderr)
        raise Exit(INTERRUPTED) from None
    if result is not None:
        from forward_influence.analysis.tuning_report import describe_tuning

        print(describe_tuning(result.path), flush=True)


def _one(keep: list[str] | None, objective: str) -> str:
    """The one budget: fidelity takes several, and the last one would be taken for all."""
    from forward_influence.errors import UserError

    if keep is None:
        return "0.4"
    if objective == "influence":
        raise UserError(f"--keep {keep[0]} belongs to the objective fidelity; influence takes --fraction.")
    if len(keep) > 1:
        raise UserError(f"--keep is given {len(keep)} times, and tune takes one budget; run it once for each.")
    return keep[0]


def _parsed(vary: list[str] | None) -> dict[str, list[str]] | None:
    """``alpha=0.5,0.7`` as a parameter with its values."""
    from forward_influence.errors import UserError

    if not vary:
        return None
    found: dict[str, list[str]] = {}
    for text in vary:
        name, equals, values = text.partition("=")
        listed = [one.strip() for one in values.split(",") if one.strip()]
        if not equals or not name.strip() or not listed:
            raise UserError(f"--vary {text} is not PARAMETER=VALUE,VALUE; write it like --vary alpha=0.5,0.7.")
        if name.strip() in found:
            raise UserError(f"--vary names {name.strip()} twice; give all its values at once.")
        found[name.strip()] = listed
    return found
