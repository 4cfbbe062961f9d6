"""``forward-influence measure``."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from forward_influence.cli import study_options as options


def command(
    model: options.Model = "smollm2-135m",
    tokenizer: options.Tokenizer = None,
    data: options.Data = None,
    selector: Annotated[
        list[str] | None,
        Option(
            help="NAME, NAME:key=value,..., NAME:file.json or module.path:Class; may be repeated. "
            "Default: attention, entropy, random, none. See the command selectors."
        ),
    ] = None,
    fraction: Annotated[str, Option(help="Share of the prefix that is removed.")] = "0.01",
    prefix: Annotated[int, Option(help="Tokens cached before anything is removed.")] = 2048,
    horizon: options.Horizon = 14000,
    full_horizon: options.FullHorizon = False,
    chunk: options.Chunk = 128,
    sinks: Annotated[int, Option(help="First positions that are not candidates.")] = 4,
    recent: Annotated[int, Option(help="Last positions of the prefix that are not candidates.")] = 64,
    limit: options.Limit = None,
    skip: options.Skip = 0,
    seed: Annotated[int, Option(help="Order of documents and random selections.")] = 0,
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
    """Remove each selector's tokens from the cache and measure what the future loses.

    The same command goes on after an interruption; with more selectors or documents it extends the run.
    """
    from forward_influence.selectors import DEFAULT_SELECTORS
    from forward_influence.study import measure

    options.run_study(
        lambda: measure(
            model=model, tokenizer=tokenizer, data=data or None, selector=selector or DEFAULT_SELECTORS,
            fraction=fraction, prefix=prefix, horizon=horizon, full_horizon=full_horizon, chunk=chunk, sinks=sinks,
            recent=recent, limit=limit, skip=skip, seed=seed, batch=batch, dtype=dtype, device=device, offline=offline,
            extend_context=extend_context, shard=shard, accept_model=accept_model, out=out, fresh=fresh,
            dry_run=dry_run, quiet=quiet, debug=debug,
        ),
        dry_run=dry_run,
    )  # fmt: skip
