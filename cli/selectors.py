"""``forward-influence selectors``."""

from __future__ import annotations


def command() -> None:
    """List selectors with their parameters and defaults, and what they remove."""
    from forward_influence.selectors import SELECTORS
    from infokv.scorer import SCORERS

    listed = [*SELECTORS, *((name, cls) for name, cls in SCORERS if name not in SELECTORS)]
    width = max(len(name) for name, _ in listed)
    for name, cls in listed:
        print(f"{name:<{width}}  {_first_line(cls)}")
        if parameters := _parameters(cls):
            print(f"{'':<{width}}  parameters: {parameters}")
    print(
        "\nOthers: module.path:Class. With parameters: infokv:alpha=0.5,k=64. "
        "How to write one: docs/adding-a-selector.md"
    )


def _first_line(cls: type) -> str:
    return (cls.__doc__ or " ").strip().split("\n")[0].replace("`", "")


def _parameters(cls: type) -> str:
    from dataclasses import MISSING, fields, is_dataclass

    if not is_dataclass(cls):
        return ""
    shown = []
    for one in fields(cls):
        if one.kw_only or not one.init:
            continue
        default = one.default if one.default is not MISSING else ""
        shown.append(f"{one.name}={'none' if default is None else default}")
    return ", ".join(shown)
