"""``forward-influence selectors``."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Annotated

from typer import Argument

_WIDTH = 100

#: ``name, name : kind`` and the indented lines below it.
_ENTRY = re.compile(r"^(\w+(?:, *\w+)*) *(?:: *([^\n]*))?(?:\n|\Z)((?:[ \t]+[^\n]*(?:\n|\Z)|\n)*)", re.MULTILINE)


def command(
    selector: Annotated[
        str | None,
        Argument(help="One selector with the meaning of its parameters: NAME or module.path:Class. Default: list all."),
    ] = None,
) -> None:
    """List selectors with their parameters and defaults, and what they remove."""
    if selector is not None:
        print(describe(selector))
        return
    from forward_influence.selectors import SELECTORS
    from infokv.scorer import SCORERS

    listed = [*SELECTORS, *((name, cls) for name, cls in SCORERS if name not in SELECTORS)]
    width = max(len(name) for name, _ in listed)
    for name, cls in listed:
        print(f"{name:<{width}}  {_first_line(cls)}")
        if parameters := _defaults(cls):
            print(f"{'':<{width}}  parameters: {', '.join(parameters.values())}")
    print(
        "\nWhat a selector's parameters mean: forward-influence selectors NAME. With parameters: "
        "infokv:alpha=0.5,k=64.\nYour own: module.path:Class; how to write one: docs/adding-a-selector.md"
    )


def describe(text: str) -> str:
    """One selector: what it removes, and a line for each parameter.

    Raises
    ------
    UserError, Refused
        If there is none of that name.
    """
    name, cls = _named(text)
    defaults, meanings = _defaults(cls), parameter_meanings(cls)
    width = max(map(len, defaults.values()), default=0)
    lines = [f"{name}  {_first_line(cls)}"]
    for parameter, default in defaults.items():
        head = f"  {default:<{width}}  "
        meaning = meanings.get(parameter, "")
        lines.append(
            textwrap.fill(head + meaning, _WIDTH, subsequent_indent=" " * len(head), break_on_hyphens=False).rstrip()
        )
    return "\n".join(lines if defaults else [*lines, "  It has no parameters."])


def parameter_meanings(cls: type) -> dict[str, str]:
    """What the ``Parameters`` section of a class's docstring (or its parents') says about each parameter.

    Where it gives allowed values alone, those.
    """
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        doc = inspect.cleandoc(one.__doc__ or "")
        section = re.search(r"^Parameters\n-+\n(.*?)(?=^\w[^\n]*\n-+\n|\Z)", doc, re.MULTILINE | re.DOTALL)
        for names, kind, meaning in _ENTRY.findall(section[1] if section else ""):
            words = " ".join((meaning.strip() or kind).split())
            found |= dict.fromkeys(re.split(r",\s*", names), re.sub(r":\w+:(?=`)|`", "", words))
    return found


def _named(text: str) -> tuple[str, type]:
    """The class that a text names, and the name without parameters."""
    from forward_influence.errors import UserError
    from forward_influence.selectors import SELECTORS
    from infokv.registry import import_class
    from infokv.scorer import SCORERS

    name, _, rest = text.partition(":")
    for registry in (SELECTORS, SCORERS):
        if name in registry:
            return name, registry.get(name)
    path = rest.partition(":")[0]
    if not path or "=" in path:
        raise UserError(SELECTORS.unknown(name, SCORERS.names()))
    return f"{name}:{path}", import_class(f"{name}:{path}")


def _first_line(cls: type) -> str:
    return (cls.__doc__ or " ").strip().split("\n")[0].replace("`", "")


def _defaults(cls: type) -> dict[str, str]:
    """Parameters with their defaults as they are written in a command."""
    from dataclasses import MISSING, fields, is_dataclass

    shown = {}
    for one in fields(cls) if is_dataclass(cls) else ():
        if one.init and not one.kw_only:
            default = one.default if one.default is not MISSING else ""
            shown[one.name] = f"{one.name}={'none' if default is None else default}"
    return shown
