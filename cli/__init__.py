"""The command line: parse, call, print. Heavy imports wait inside the commands, so that help is instant."""

from __future__ import annotations

import os
import sys
from itertools import pairwise

#: Exit codes: 0 measured, 1 every document failed, 2 the request cannot be met, 130 interrupt.
FAILED, REFUSED, INTERRUPTED = 1, 2, 130


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``forward-influence`` and ``fi``; ends the process with an exit code."""
    from forward_influence.cli.malloc import keep_memory

    keep_memory()
    # For module.path:Class in the current folder. Last, so that a folder there called like an installed
    # package ("datasets", say) hides nothing.
    sys.path.append(os.getcwd())
    code = run(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the same, if all fitted into the buffer
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run a command and give its exit code; whatever goes wrong becomes one sentence on stderr."""
    from typer import Exit

    from forward_influence.cli.app import app

    debug = "--debug" in arguments
    try:
        return int(app(args=arguments or ["--help"], prog_name="forward-influence", standalone_mode=False) or 0)
    except Exit as leave:
        return leave.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit:  # the parser leaves in this way when the reader of a pipe (head, less) has gone
        return 0
    except Exception as error:
        if hasattr(error, "format_message"):  # the parser's errors
            return _refuse(_parser_sentence(error, arguments))
        if debug:
            raise
        if isinstance(error, _user_errors()):
            return _refuse(str(error))
        sentence = " ".join(f"{type(error).__name__}: {error}".split())
        _refuse(f"something unforeseen happened ({sentence}); run again with --debug to see where.")
        return FAILED


def _parser_sentence(error, arguments: list[str]) -> str:
    """What the parser says, and the value that it means, which it leaves out."""
    message = error.format_message().rstrip(".")
    options = getattr(getattr(error, "param", None), "opts", ())
    for option, value in pairwise(arguments):
        if option in options and value not in message:
            message += f" (given: {value!r})"
    return f"{message}; --help lists what there is."


def _refuse(sentence: str) -> int:
    sys.stdout.flush()
    print(f"error: {' '.join(sentence.split())}", file=sys.stderr)
    return REFUSED


def _user_errors() -> tuple[type[Exception], ...]:
    """What the user has to change; looked up without importing torch anew."""
    from forward_influence.data.errors import DataError
    from forward_influence.errors import UserError
    from infokv.errors import Refused

    return UserError, DataError, Refused
