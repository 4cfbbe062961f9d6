"""What a figure of parameters needs to know of a method's class."""

from __future__ import annotations


def defaults_of(method: str) -> dict[str, object]:
    """The default of each parameter of a method, without those that have none.

    Raises
    ------
    Refused
        If there is no such class.
    """
    from dataclasses import MISSING, fields, is_dataclass

    from forward_influence.selectors import SELECTORS
    from infokv.registry import default_of, import_class
    from infokv.scorer import SCORERS

    known = SELECTORS if method in SELECTORS and method not in SCORERS else SCORERS
    cls = import_class(method) if ":" in method else known.get(method)
    found = {one.name: default_of(one) for one in (fields(cls) if is_dataclass(cls) else ()) if one.init}
    return {name: value for name, value in found.items() if value is not MISSING}
