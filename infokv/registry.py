"""Named classes, and the one grammar by which commands name them with parameters.

``NAME``, ``NAME:key=value,key=value``, ``NAME:file.json``, ``module.path:Class``,
``module.path:Class:key=value``. Registered names win; text with ``=`` is parameters, ``.json`` a file,
anything else a class.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import numbers
import operator
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from importlib.metadata import entry_points
from pathlib import Path

from infokv.errors import Refused


class Registry:
    """Classes (never instances) by name.

    Parameters
    ----------
    kind : str
        What they are, for messages: "scorer".
    group : str
        Entry-point group through which other packages add theirs.
    builtin : dict of str to str
        Names of built-in classes and where they are, ``module:Class``; imported on first use.
    """

    def __init__(self, kind: str, group: str, builtin: dict[str, str] | None = None):
        self.kind = kind
        self._group = group
        self._targets: dict[str, str] = dict(builtin or {})
        self._classes: dict[str, type] = {}
        self._searched = False

    def register(self, name: str) -> Callable[[type], type]:
        """Class decorator that adds a class under a name.

        Raises
        ------
        Refused
            If the name is taken by another class, or cannot be written in a command.
        """
        if not name or any(mark in name for mark in ":=, \t\n"):
            raise Refused(f"{name!r} cannot name a {self.kind}; use letters, digits and dashes.")

        def add(cls: type) -> type:
            if not isinstance(cls, type):
                raise Refused(f"{self.kind} {name!r}: register a class, not {cls!r}; parameters are its fields.")
            taken = self._classes.get(name) or self._targets.get(name)
            # The same definition again (a notebook cell run twice, a module reloaded) replaces itself.
            here = f"{cls.__module__}:{cls.__qualname__}"
            if taken is not None and self._where(taken) != here:
                raise Refused(f"The {self.kind} name {name!r} is taken by {self._where(taken)}; choose another.")
            self._classes[name] = cls
            return cls

        return add

    def names(self) -> list[str]:
        """All names, built-in ones first, in the order in which they were added."""
        self._search_entry_points()
        return list(dict.fromkeys([*self._targets, *self._classes]))

    def __contains__(self, name: str) -> bool:
        return name in self.names()

    def __iter__(self) -> Iterator[tuple[str, type]]:
        return ((name, self.get(name)) for name in self.names())

    def get(self, name: str) -> type:
        """The class of a name.

        Raises
        ------
        Refused
            If the name is unknown; the nearest ones are suggested.
        """
        if name not in self.names():
            raise Refused(self.unknown(name))
        if name not in self._classes:
            self._classes[name] = import_class(self._targets[name])
        return self._classes[name]

    def unknown(self, name: str, others: list[str] = ()) -> str:
        """The sentence about an unknown name."""
        names = [*self.names(), *others]
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        listed = f"{hint}There are: {', '.join(names)}, or write module.path:Class."
        return f"There is no {self.kind} {name!r}; {listed}".replace("; T", "; t")

    def create(self, text: str):
        """An object from its text, by the grammar of this module.

        Raises
        ------
        Refused
            If the name, a parameter or a value is not known, in one sentence.
        """
        name, _, rest = text.partition(":")
        if name in self.names():
            return self._build(self.get(name), name, rest)
        path, _, parameters = rest.partition(":")
        if "." not in name and (not path or "=" in path):
            raise Refused(self.unknown(name))
        if not rest and text.endswith(".json"):
            raise Refused(f"{text!r} has no name of a method before it; write METHOD:{text}, such as infokv:{text}.")
        if not path or "=" in path:
            raise Refused(f"{text!r} names a module but no class; write module.path:Class, or one of: "
                          f"{', '.join(self.names())}.")  # fmt: skip
        return self._build(import_class(f"{name}:{path}"), f"{name}:{path}", parameters)

    def _build(self, cls: type, name: str, rest: str):
        if not rest:
            return construct(cls, name, {})
        if "=" in rest:
            return construct(cls, name, parse_parameters(rest, name))
        if rest.endswith(".json"):
            load = getattr(cls, "load", None)
            if load is None:
                return construct(cls, name, read_json(rest))
            with _making(name, rest):
                return load(rest)
        raise Refused(f"{name}:{rest}: after the name come key=value pairs or a .json file, not {rest!r}.")

    def canonical(self, instance) -> str:
        """The shortest text that gives an equal object: name, and parameters that are not the default."""
        own = getattr(instance, "canonical", None)
        if own is not None:
            return own()
        cls = type(instance)
        name = self.name_of(cls)
        parts = []
        hints = typing.get_type_hints(cls) if is_dataclass(instance) else {}
        for one in fields(instance) if is_dataclass(instance) else ():
            value = getattr(instance, one.name)
            if hints[one.name] is float and isinstance(value, int):  # InfoKV(alpha=1) is InfoKV(alpha=1.0)
                value = float(value)
            if value != default_of(one):
                parts.append(f"{one.name}={'none' if value is None else value}")
        return f"{name}:{','.join(parts)}" if parts else name

    def name_of(self, cls: type) -> str:
        """The name under which a class is registered, or else where it stands."""
        own = self._where(cls)
        for name in self.names():
            if self._where(self._targets.get(name) or self._classes[name]) == own:
                return name
        for name in self.names():  # under a path that only leads to it
            with contextlib.suppress(Refused):  # a broken plug-in is not this class
                if self.get(name) is cls:
                    return name
        return own

    def _search_entry_points(self) -> None:
        if self._searched:
            return
        self._searched = True
        for point in entry_points(group=self._group):
            if point.name in self._targets:
                raise Refused(f"The {self.kind} name {point.name!r} is taken twice: {self._targets[point.name]} and "
                              f"{point.value}; uninstall one of the packages.")  # fmt: skip
            self._targets[point.name] = point.value

    @staticmethod
    def _where(target: str | type) -> str:
        return target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"


def import_class(path: str) -> type:
    """The class at ``module.path:Class``.

    Raises
    ------
    Refused
        If there is none.
    """
    name, _, attribute = path.partition(":")
    module = None
    try:
        module = found = importlib.import_module(name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # other people's code does anything while it is imported
        if module is None:
            hint = "check the path, and that the module is installed or in the current folder"
        else:
            file = getattr(module, "__file__", None) or "a folder without __init__.py"
            hint = f"Python took {name} from {file}, so check the class, and rename your own file if it is another one"
        raise Refused(f"{path!r} cannot be imported ({_describe(error)}); {hint}.") from error
    if not isinstance(found, type):
        raise Refused(f"{path!r} is {type(found).__name__}, not a class.")
    return found


def parse_parameters(text: str, name: str) -> dict[str, str]:
    """``key=value,key=value`` as a dict of texts."""
    out = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise Refused(f"{name}:{text}: {part!r} is not key=value.")
        if key.strip() in out:
            raise Refused(f"{name}:{text}: {key.strip()!r} is given twice.")
        out[key.strip()] = value.strip()
    return out


def construct(cls: type, name: str, given: dict):
    """An object of a dataclass from parameters that may be texts; unknown or unfit ones are refused."""
    known = {one.name: one for one in fields(cls) if one.init} if is_dataclass(cls) else {}
    unknown = [key for key in given if key not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]!r}? It has" if near else "it has"
        raise Refused(f"{name} has no parameter {unknown[0]!r}; {hint}: {', '.join(known) or 'none'}.")
    hints = typing.get_type_hints(cls) if known else {}
    values = {key: convert(value, hints[key], f"{name}:{key}") for key, value in given.items()}
    with _making(name, given):
        return cls(**values)


@contextlib.contextmanager
def _making(name: str, given) -> Iterator[None]:
    """Other people's constructors may fail, or even leave the program, which would end it without a word."""
    try:
        yield
    except (TypeError, SystemExit) as error:
        raise Refused(f"{name} cannot be made from {given}: {_describe(error)}.") from error


def _describe(error: BaseException) -> str:
    """What went wrong, on one line; the kind of error where its message alone says little."""
    message = " ".join(str(error).split()).rstrip(".")
    plain = isinstance(error, ImportError | TypeError | Refused) and message
    return message if plain else f"{type(error).__name__}: {message}".rstrip(": ")


def convert(value, hint, where: str):
    """A typed text as what a field's annotation asks for; other values are checked against it."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        if type(None) in options:
            return None
    elif isinstance(value, str):
        for option in options:
            try:
                return _CONVERTERS[option](value)
            except (KeyError, ValueError):
                continue
    else:
        for option in options:
            number = isinstance(value, numbers.Real) and not isinstance(value, bool)  # numpy's are, too
            if option is float and number:
                return float(value)
            if option is int and number and isinstance(value, numbers.Integral):
                return operator.index(value)
            if isinstance(option, type) and isinstance(value, option) and isinstance(value, bool) == (option is bool):
                return value
    wanted = " or ".join(getattr(option, "__name__", str(option)) for option in options)
    raise Refused(f"{where}={value}: the value must be {wanted}.".replace("NoneType", "none"))


def default_of(one):
    """The default of a dataclass field, made if it has a factory; a value equal to nothing where it has none."""
    if one.default is not MISSING:
        return one.default
    return one.default_factory() if one.default_factory is not MISSING else MISSING


def _boolean(text: str) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


_CONVERTERS: dict = {int: int, float: float, bool: _boolean, str: str}


def read_json(path: str) -> dict:
    """An object from a JSON file, or a sentence about what is wrong with it."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise Refused(f"{path!r} cannot be read ({error.strerror}); check the path.") from error
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path!r} is not JSON ({error}).") from error
    if not isinstance(value, dict):
        raise Refused(f"{path!r} holds {type(value).__name__}; an object of parameters is needed.")
    return value
