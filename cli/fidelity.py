"""``forward-influence fidelity``."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from forward_influence.cli import study_options as options


def command(
    method: Annotated[
        list[str] | None,
        Option(
            help="NAME, NAME:key=value,..., NAME:file.json or module.path:Class; may be repeated. "
            "Default: snapkv, infokv, streaming-llm, random. See the command methods."
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        Option(help="Budget: share of the prefix that stays; may be repeated. Default: 0.4 and 0.2."),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        Option(help="Budget: tokens that stay in each layer, instead of or beside shares; may be repeated."),
    ] = None,
    layers: Annotated[
        str | None, Option(help="uniform, pyramid or entropy: budgets over layers. Default: each method's own.")
    ] = None,
    model: options.Model = "smollm2-135m",
    tokenizer: options.Tokenizer = None,
    data: options.Data = None,
    prefix: Annotated[int, Option(help="Tokens cached before the cache is compressed.")] = 2048,
    horizon: options.Horizon = 1024,
    full_horizon: options.FullHorizon = False,
    chunk: options.Chunk = 128,
    limit: options.Limit = None,
    skip: options.Skip = 0,
    seed: Annotated[int, Option(help="Order of documents and random methods.")] = 0,
    batch: Annotated[int | None, Option(help="Compressed caches at once. Default: what memory allows.")] = None,
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
    """Compress a prefix with each method at each budget and measure what the future loses against the full cache.

    The same command goes on after an interruption; with more methods, budgets or documents it extends the run.
    """
    from forward_influence.keep_study import DEFAULT_METHODS, fidelity

    options.run_study(
        lambda: fidelity(
            method=method or DEFAULT_METHODS, keep=keep or (), tokens=tokens or (), layers=layers, model=model,
            tokenizer=tokenizer, data=data or None, prefix=prefix, horizon=horizon, full_horizon=full_horizon,
            chunk=chunk, limit=limit, skip=skip, seed=seed, batch=batch, dtype=dtype, device=device, offline=offline,
            extend_context=extend_context, shard=shard, accept_model=accept_model, out=out, fresh=fresh,
            dry_run=dry_run, quiet=quiet, debug=debug,
        ),
        dry_run=dry_run,
    )  # fmt: skip
