"""``forward-influence measure``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Exit, Option


def command(
    model: Annotated[str, Option(help="Hub id, folder, .gguf file, or alias.")] = "smollm2-135m",
    tokenizer: Annotated[str | None, Option(help="Folder or hub id of another tokenizer.")] = None,
    data: Annotated[
        list[str] | None,
        Option(
            help="builtin, arxiv, or .jsonl, .parquet, .txt files and folders; may be repeated. "
            "Default: arxiv if the hub answers, else builtin."
        ),
    ] = None,
    selector: Annotated[
        list[str] | None,
        Option(
            help="NAME, NAME:key=value,..., NAME:file.json or module.path:Class; may be repeated. "
            "Default: attention, entropy, random, none. See the command selectors."
        ),
    ] = None,
    fraction: Annotated[str, Option(help="Share of the prefix that is removed.")] = "0.01",
    prefix: Annotated[int, Option(help="Tokens cached before anything is removed.")] = 2048,
    horizon: Annotated[int, Option(help="Tokens that follow; cut to the model's context limit.")] = 14000,
    full_horizon: Annotated[bool, Option("--full-horizon", help="Skip documents that end earlier.")] = False,
    chunk: Annotated[int, Option(help="Offsets over which a reported number is averaged.")] = 128,
    sinks: Annotated[int, Option(help="First positions that are not candidates.")] = 4,
    recent: Annotated[int, Option(help="Last positions of the prefix that are not candidates.")] = 64,
    limit: Annotated[int | None, Option(help="Documents to measure. Default: 100.")] = None,
    seed: Annotated[int, Option(help="Order of documents and random selections.")] = 0,
    batch: Annotated[int | None, Option(help="Ablated rows at once. Default: what memory allows.")] = None,
    dtype: Annotated[str, Option(help="auto, float32, bfloat16, float16 or float64.")] = "auto",
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    offline: Annotated[bool, Option("--offline", help="No network attempt at all.")] = False,
    extend_context: Annotated[
        str | None, Option(help="yarn: let a RoPE model go past its context limit.")
    ] = None,
    shard: Annotated[str | None, Option(help="3/16: the third of sixteen parts of the documents.")] = None,
    out: Annotated[Path | None, Option(help="Run folder. Default: runs/<model>-<hash>.")] = None,
    fresh: Annotated[bool, Option("--fresh", help="Move rows that are there aside; start anew.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Everything up to loading weights.")] = False,
    quiet: Annotated[bool, Option("--quiet", help="Neither notices nor progress.")] = False,
    debug: Annotated[bool, Option("--debug", help="Show tracebacks, stop at the first error.")] = False,
) -> None:  # fmt: skip
    """Remove each selector's tokens from the cache and measure what the future loses.

    The same command goes on after an interruption; with more selectors or documents it extends the run.
    """
    from forward_influence.cli import FAILED, INTERRUPTED
    from forward_influence.cli.streams import OutputLost
    from forward_influence.errors import UserError
    from forward_influence.selectors import DEFAULT_SELECTORS
    from forward_influence.study import Incomplete, measure

    try:
        outcome = measure(
            model=model, tokenizer=tokenizer, data=data or None, selector=selector or DEFAULT_SELECTORS,
            fraction=fraction, prefix=prefix, horizon=horizon, full_horizon=full_horizon, chunk=chunk, sinks=sinks,
            recent=recent, limit=limit, seed=seed, batch=batch, dtype=dtype, device=device, offline=offline,
            extend_context=extend_context, shard=shard, out=out, fresh=fresh, dry_run=dry_run, quiet=quiet, debug=debug,
        )  # fmt: skip
    except KeyboardInterrupt:
        print("\nInterrupted; finished rows are kept, and the same command goes on from there.", file=sys.stderr)
        raise Exit(INTERRUPTED) from None
    except Incomplete as early:  # its rows are there, so the exit code is that of any run with these rows
        outcome = early.outcome
        print(f"error: {early}", file=sys.stderr)
    if dry_run:
        return
    if not outcome.ok and not outcome.failed:
        raise UserError(f"No document was measured ({outcome.sentence()}); forward-influence show says why.")
    try:
        print(outcome.sentence(), flush=True)
    except OutputLost as lost:  # what was measured is on disk, and the exit code speaks of that
        print(f"error: {lost}", file=sys.stderr)
    if not outcome.ok:
        raise Exit(FAILED)
