"""The command line: parse, call, print. Heavy imports wait inside the commands, so that help is instant."""

from __future__ import annotations

import contextlib
import os
import sys
from itertools import pairwise

#: Exit codes: 0 measured, 1 every document failed, 2 the request cannot be met, 130 interrupt.
FAILED, REFUSED, INTERRUPTED = 1, 2, 130


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``forward-influence`` and ``fi``; ends the process with an exit code."""
    from forward_influence.cli.interrupts import ignore_interrupts, interrupt_once
    from forward_influence.cli.malloc import keep_memory
    from forward_influence.cli.streams import OutputLost, guard_streams

    guard_streams()
    interrupt_once()
    keep_memory()
    _look_here_as_well()
    try:
        code = run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:  # while the parser was loaded
        code = INTERRUPTED
    ignore_interrupts()
    try:
        sys.stdout.flush()
    except OutputLost as lost:  # all fitted into the buffer
        code = code or _lost(lost)
    sys.exit(code)


def _look_here_as_well() -> None:
    """Let ``module.path:Class`` lie in the current folder, without hiding anything.

    Last on the path, so that a folder there called like an installed package ("datasets", say) is not taken for
    it; and after our own packages are imported, which an editable installation finds later than the path.
    """
    import forward_influence.analysis
    import forward_influence.data  # noqa: F401
    import infokv  # noqa: F401

    with contextlib.suppress(FileNotFoundError):  # the current folder may have been removed
        sys.path.append(os.getcwd())


def run(arguments: list[str]) -> int:
    """Run a command and give its exit code; whatever goes wrong becomes one sentence on stderr."""
    from typer import Exit

    from forward_influence.cli.app import app
    from forward_influence.cli.streams import OutputLost

    debug = "--debug" in arguments
    try:
        if "HF_ENDPOINT" in os.environ:  # with one that is no address the libraries cannot even be imported
            from forward_influence.data.hub import check_addresses

            check_addresses(("HF_ENDPOINT",))
        return int(app(args=arguments or ["--help"], prog_name="forward-influence", standalone_mode=False) or 0)
    except Exit as leave:
        return leave.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except OutputLost as lost:
        return _lost(lost)
    except SystemExit as leave:
        _refuse(f"a selector's code left the program (SystemExit: {leave}); let it raise an error, or return.")
        return FAILED
    except Exception as error:
        if hasattr(error, "format_message"):  # the parser's errors
            return _refuse(_parser_sentence(error, arguments))
        if debug:
            raise
        if isinstance(error, _user_errors()):
            from forward_influence.errors import NothingMeasured

            return _refuse(str(error), FAILED if isinstance(error, NothingMeasured) else REFUSED)
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


def _lost(lost) -> int:
    """The exit code when standard output takes no more: what was asked for is not there, unless nobody reads on."""
    return 0 if lost.reader_left else _refuse(str(lost))


def _refuse(sentence: str, code: int = REFUSED) -> int:
    from forward_influence.cli.streams import OutputLost

    with contextlib.suppress(OutputLost):  # an error is told already
        sys.stdout.flush()
    print(f"error: {' '.join(sentence.split())}", file=sys.stderr)
    return code


def _user_errors() -> tuple[type[Exception], ...]:
    """What the user has to change; looked up without importing torch anew."""
    from forward_influence.data.errors import DataError
    from forward_influence.errors import UserError
    from infokv.errors import Refused

    return UserError, DataError, Refused
