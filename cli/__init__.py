"""The command line: parse, call, print. Heavy imports wait inside the commands, so that help is instant."""

from __future__ import annotations

import sys

#: Exit codes: 0 measured, 1 every document failed, 2 the request cannot be met, 130 interrupt.
FAILED, REFUSED, INTERRUPTED = 1, 2, 130


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``forward-influence`` and ``fi``; ends the process with an exit code."""
    from forward_influence.cli.malloc import keep_memory

    keep_memory()
    arguments = sys.argv[1:] if arguments is None else arguments
    sys.exit(_run(arguments))


def _run(arguments: list[str]) -> int:
    from typer.exceptions import Exit, TyperException

    from forward_influence.cli.app import app

    debug = "--debug" in arguments
    try:
        return int(app(args=arguments, prog_name="forward-influence", standalone_mode=False) or 0)
    except Exit as leave:
        return leave.exit_code
    except KeyboardInterrupt:
        print("\nInterrupted; finished rows are kept. Run the same command again to go on.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe (head, less) has gone
        sys.stderr.close()
        return 0
    except TyperException as error:
        sentence = error.format_message() if hasattr(error, "format_message") else str(error)
        print(f"error: {sentence}", file=sys.stderr)
        return REFUSED
    except Exception as error:
        if debug:
            raise
        if isinstance(error, _user_errors()):
            print(f"error: {error}", file=sys.stderr)
            return REFUSED
        sentence = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"error: something unforeseen happened ({sentence}); run again with --debug to see where.",
              file=sys.stderr)  # fmt: skip
        return FAILED


def _user_errors() -> tuple[type[Exception], ...]:
    """What the user has to change; looked up without importing torch anew."""
    from forward_influence.data.errors import DataError
    from forward_influence.errors import UserError

    errors = [UserError, DataError]
    if "infokv.errors" in sys.modules:
        errors.append(sys.modules["infokv.errors"].Refused)
    return tuple(errors)
