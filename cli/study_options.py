"""Flags that all studies share, and how a study ends on the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

if TYPE_CHECKING:
    from forward_influence.study import Outcome

Model = Annotated[str, Option(help="Hub id, folder, .gguf file, or alias.")]
Tokenizer = Annotated[str | None, Option(help="Folder or hub id of another tokenizer.")]
Data = Annotated[
    list[str] | None,
    Option(
        help="builtin, arxiv, or .jsonl, .parquet, .txt files and folders; may be repeated. "
        "Default: arxiv if the hub answers, else builtin."
    ),
]
Horizon = Annotated[int, Option(help="Tokens that follow; cut to the model's context limit.")]
FullHorizon = Annotated[bool, Option("--full-horizon", help="Skip documents that end earlier.")]
Chunk = Annotated[int, Option(help="Offsets over which a reported number is averaged.")]
Limit = Annotated[int | None, Option(help="Documents to measure. Default: 100.")]
Skip = Annotated[int, Option(help="Documents to leave out at the start of the order.")]
Dtype = Annotated[str, Option(help="auto, float32, bfloat16, float16 or float64.")]
Device = Annotated[str, Option(help="auto, cpu, cuda or cuda:N.")]
Offline = Annotated[bool, Option("--offline", help="No network attempt at all.")]
ExtendContext = Annotated[str | None, Option(help="yarn: let a RoPE model go past its context limit.")]
Shard = Annotated[str | None, Option(help="3/16: the third of sixteen parts of the documents.")]
AcceptModel = Annotated[bool, Option("--accept-model", help="Use parameters that were tuned for another model.")]
Out = Annotated[Path | None, Option(help="Run folder. Default: runs/<model>-<hash>.")]
Fresh = Annotated[bool, Option("--fresh", help="Move rows that are there aside; start anew.")]
DryRun = Annotated[bool, Option("--dry-run", help="Everything up to loading weights.")]
Quiet = Annotated[bool, Option("--quiet", help="Neither notices nor progress.")]
Debug = Annotated[bool, Option("--debug", help="Show tracebacks, stop at the first error.")]


def run_study(study: Callable[[], Outcome], *, dry_run: bool) -> None:
    """Run a study, print how it ended, and leave with its exit code.

    Raises
    ------
    UserError
        If nothing was measured and nothing failed.
    Exit
        With the code of an interrupt, or of a study in which every document failed.
    """
    from forward_influence.cli import FAILED, INTERRUPTED
    from forward_influence.cli.streams import OutputLost
    from forward_influence.errors import UserError
    from forward_influence.study import Incomplete

    try:
        outcome = study()
    except KeyboardInterrupt:
        print("\nInterrupted; finished rows are kept, and the same command goes on from there.", file=sys.stderr)
        raise Exit(INTERRUPTED) from None
    except Incomplete as early:  # its rows are there, so the exit code is that of any run with these rows
        outcome = early.outcome
        print(f"error: {early}", file=sys.stderr)
    if dry_run:
        return
    if not outcome.ok and not outcome.failed:
        why = outcome.reason or "forward-influence show says why"
        raise UserError(f"No document was measured ({outcome.sentence()}); {why.rstrip('.')}.")
    try:
        print(outcome.sentence(), flush=True)
    except OutputLost as lost:  # what was measured is on disk, and the exit code speaks of that
        print(f"error: {lost}", file=sys.stderr)
    if not outcome.ok:
        raise Exit(FAILED)
