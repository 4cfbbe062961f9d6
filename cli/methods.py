"""``forward-influence methods``."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Annotated

from typer import Argument

#: Columns of what is printed.
_WIDTH = 100


def command(
    method: Annotated[
        str | None, Argument(help="One method in full: NAME, NAME:key=value or module.path:Class. Default: list all.")
    ] = None,
) -> None:
    """List compression methods: parameters with defaults, what they cut and when, and where they come from."""
    if method is not None:
        print(describe(method))
        return
    from infokv.scorer import SCORERS

    names = SCORERS.names()
    indent = max(map(len, names)) + 2
    for name in names:
        print(_entry(name, indent))
    print()
    print(_wrapped("One in full: forward-influence methods NAME. With parameters: infokv:alpha=0.5,k=64. Your own: "
                   "module.path:Class; how to write one: docs/adding-a-scorer.md. When to use which: "
                   "docs/compressing.md"))  # fmt: skip


def describe(method: str) -> str:
    """One method in full: facts, and its documentation.

    Raises
    ------
    Refused
        If there is none of that name, or it cannot be made.
    """
    from forward_influence.methods import scorer_named
    from infokv.scorer import SCORERS

    scorer = scorer_named(method)
    cls = type(scorer)
    lines = [
        f"{SCORERS.canonical(scorer)}  ({cls.__module__}.{cls.__qualname__})",
        *(_wrapped(text, f"  {label:<12}") for label, text in facts(scorer).items()),
        "",
        inspect.getdoc(cls).replace("`", "") if cls.__doc__ else "It has no docstring.",
    ]
    return "\n".join(lines)


def facts(scorer) -> dict[str, str]:
    """What a method reads, when it cuts, what it keeps by rule, and its parameters as they are."""
    out = {
        "cuts": _phases(scorer),
        "layers": scorer.allocation,
        "reads": ", ".join(scorer.needs) or "nothing but positions",
        "by rule": f"the first {scorer.sinks} and the last {scorer.recent} tokens stay, inside the budget",
        "parameters": _parameters(scorer) or "none",
    }
    if per_query_head(scorer):
        out["compress"] = _refusal(scorer)
    if source := source_of(type(scorer)):
        out["source"] = source
    return out


def per_query_head(scorer) -> bool:
    """Whether a method has a set for each query head, which no cache of KV heads can hold."""
    return getattr(scorer, "heads", "kv") == "query"


def source_of(cls: type) -> str:
    """The paper or code that a class's docstring names after ``Source:``, to the end of that sentence."""
    notes = " ".join((inspect.getdoc(cls) or "").partition("Source:")[2].split("\n\n")[0].split())
    return re.split(r"\.\s+(?=[A-Z])", notes)[0].rstrip(".").replace("`", "")


def _entry(name: str, indent: int) -> str:
    """A method in the list: a few lines beside its name."""
    from infokv.errors import Refused
    from infokv.scorer import SCORERS

    try:
        scorer = SCORERS.create(name)
    except Refused as error:  # somebody else's; the others are listed all the same
        return _wrapped(f"cannot be used: {error}", f"{name:<{indent}}", indent)
    meaning = (type(scorer).__doc__ or " ").strip().split("\n\n")[0].replace("`", "")
    shown = facts(scorer)
    lines = [meaning, *(f"{label}: {shown[label]}" for label in ("cuts", "layers", "parameters"))]
    lines += [f"{label}: {shown[label]}" for label in ("compress", "source") if label in shown]
    heads = [f"{name:<{indent}}", *[" " * indent] * (len(lines) - 1)]
    return "\n".join(_wrapped(line, head, indent + 2 * (number > 0))
                     for number, (head, line) in enumerate(zip(heads, lines)))  # fmt: skip


def _phases(scorer) -> str:
    schedule = scorer.schedule
    if scorer.allocation == "full":
        return "nothing"
    if schedule is None:
        return "the prompt; generated tokens where a schedule is given"
    prompt = "the prompt is protected then" if schedule.protect_prompt else "the prompt is cut with them"
    return f"the prompt; generated tokens every {schedule.every}, but for the last {schedule.recent} ({prompt})"


def _parameters(scorer) -> str:
    from dataclasses import fields, is_dataclass

    shown = [one.name for one in fields(scorer) if one.init] if is_dataclass(scorer) else []
    values = ((name, getattr(scorer, name)) for name in shown)
    return ", ".join(f"{name}={'none' if value is None else value}" for name, value in values)


def _refusal(scorer) -> str:
    from infokv.scorer import kv_head_method

    return f"refuses it, for it has a set for each query head; use {kv_head_method(scorer)}"


def _wrapped(text: str, head: str = "", indent: int | None = None) -> str:
    indent = len(head) if indent is None else indent
    return textwrap.fill(
        text, _WIDTH, initial_indent=head, subsequent_indent=" " * indent, break_on_hyphens=False
    )  # fmt: skip
