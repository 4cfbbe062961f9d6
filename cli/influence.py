"""``forward-influence influence``."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from forward_influence.cli import study_options as options


def command(
    sample: Annotated[
        int, Option(help="Positions to measure, one drawn from each of as many parts of the prefix.")
    ] = 128,
    every: Annotated[bool, Option("--every", help="Measure every candidate instead of a sample.")] = False,
    group: Annotated[
        list[int] | None,
        Option(help="Remove the positions also in random sets of this size; may be repeated. Default: 8 and 32."),
    ] = None,
    greedy: Annotated[
        int, Option(help="So many tokens are chosen one by one, each for what it adds: influence-greedy.json.")
    ] = 0,
    signal: Annotated[
        list[str] | None,
        Option(help="Scorer that is compared with the influence; may be repeated. Default: 18 of them."),
    ] = None,
    model: options.Model = "smollm2-135m",
    tokenizer: options.Tokenizer = None,
    data: options.Data = None,
    prefix: Annotated[int, Option(help="Tokens cached before anything is removed.")] = 2048,
    horizon: options.Horizon = 1024,
    full_horizon: options.FullHorizon = False,
    chunk: options.Chunk = 128,
    sinks: Annotated[int, Option(help="First positions that are not candidates.")] = 4,
    recent: Annotated[int, Option(help="Last positions of the prefix that are not candidates.")] = 64,
    limit: Annotated[int, Option(help="Documents to measure.")] = 8,
    skip: options.Skip = 0,
    seed: Annotated[int, Option(help="Order of documents, sample and sets.")] = 0,
    batch: Annotated[int | None, Option(help="Ablated rows at once. Default: what memory allows.")] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    offline: options.Offline = False,
    extend_context: options.ExtendContext = None,
    shard: options.Shard = None,
    accept_model: options.AcceptModel = False,
    out: options.Out = None,
    fresh: options.Fresh = False,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Remove single tokens and measure what the future loses by each; then see which signal knew.

    The same command goes on after an interruption. `plot` draws the rank correlations, `show` prints them, and the
    selector influence:RUN/influence-far.json ranks by what was measured.
    """
    from forward_influence.token_influence import DEFAULT_GROUPS, DEFAULT_SIGNALS, token_influence

    options.run_study(
        lambda: token_influence(
            sample=None if every else sample, group=DEFAULT_GROUPS if group is None else group, greedy=greedy,
            signal=signal or DEFAULT_SIGNALS, model=model, tokenizer=tokenizer, data=data or None, prefix=prefix,
            horizon=horizon, full_horizon=full_horizon, chunk=chunk, sinks=sinks, recent=recent, limit=limit, skip=skip,
            seed=seed,
            batch=batch, dtype=dtype, device=device, offline=offline, extend_context=extend_context, shard=shard,
            accept_model=accept_model, out=out, fresh=fresh, dry_run=dry_run, quiet=quiet, debug=debug,
        ),
        dry_run=dry_run,
    )  # fmt: skip
