"""Which code a selector of somebody else's runs: rows of one name must come from one code."""

from __future__ import annotations

import hashlib
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Mapping

#: Packages whose versions the provenance has.
_KNOWN = frozenset({"forward_influence", "infokv", "torch", *sys.stdlib_module_names})


def code_hashes(selectors: Mapping[str, object]) -> dict[str, str]:
    """Hash of the source of each selector that does not come with this package, by its name.

    It is taken over the source of the modules of the class and its bases; of a script or notebook that is
    running, over the class alone, because the rest of it changes from run to run.
    """
    hashes = {}
    for name, selector in selectors.items():
        cls = type(getattr(selector, "scorer", selector))
        sources = [_source(one) for one in cls.__mro__ if one.__module__.partition(".")[0] not in _KNOWN]
        if sources:
            hashes[name] = hashlib.sha256("\n".join(sources).encode()).hexdigest()[:16]
    return hashes


def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls if cls.__module__ == "__main__" else sys.modules[cls.__module__])
    except (OSError, TypeError, KeyError):  # typed at a prompt, or compiled
        return "\n".join(_attributes(cls))


def _attributes(cls: type) -> Iterator[str]:
    """Values and compiled functions of a class whose source is not at hand."""
    for name, value in sorted(vars(cls).items()):
        function = getattr(value, "fget", getattr(value, "__func__", value))
        if isinstance(function, types.FunctionType):
            yield from (name, *_compiled(function.__code__))
        elif isinstance(value, bool | int | float | str | tuple):
            yield f"{name}={value!r}"


def _compiled(code: types.CodeType) -> Iterable[str]:
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        yield from _compiled(constant) if isinstance(constant, types.CodeType) else [repr(constant)]
