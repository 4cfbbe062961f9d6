"""What one method loses as its parameters change, read from the names of its settings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation

import pandas

from forward_influence.analysis.frames import Runs
from forward_influence.analysis.rate_distortion import METRICS, rate_table
from forward_influence.errors import UserError

#: A spread over layers that was asked for, as the names of methods carry it behind their parameters.
_SPREAD = re.compile(r" \((\w+)\)$")

_KEPT = [
    "asked", "budget", "band", "band_start", "band_stop", "n_documents", "n_infinite",
    *(name + part for name in METRICS for part in ("", "_low", "_high")),
]  # fmt: skip


def parameter_table(
    runs: Runs,
    method: str,
    x: str,
    line: str | None = None,
    *,
    defaults: Mapping[str, object],
    band: str = "all",
    budget: str | float | None = None,
) -> pandas.DataFrame:
    """What a method loses by the value of one parameter, or of two, all others at their defaults.

    Parameters
    ----------
    runs : Runs
        Of mode ``keep``, with settings of the method under their canonical names (``infokv:alpha=0.5,k=none@0.4``).
    method : str
        Name of the scorer, without parameters.
    x, line : str
        Parameters. Settings that differ from the defaults in any other, or whose budget is spread over layers in
        another way than the method's own, are left out.
    defaults : mapping of str to object
        The default of each parameter, which the names leave out; without those that have none.
    band : str
        ``all``, ``near`` or ``far``, as in :func:`rate_table`.
    budget : str or float, optional
        As it was asked for: a share, or a number of tokens such as ``512 tokens``. Needed where there are several.

    Returns
    -------
    pandas.DataFrame
        One line per value of `line` (None without it) and of `x` (``value``), both sorted, numbers first; ``default``
        says which is the default setting. The rest is that of :func:`rate_table`: ``kl`` in nats, ``delta_nll`` in
        nats per token and ``top1_changed`` as a share, means over ``n_documents``, each with its interval.

    Raises
    ------
    UserError
        If a parameter or the band is unknown, nothing was measured at that budget, or several budgets were.
    """
    table = settings_table(rate_table(runs), method, x, line, defaults=defaults, budget=budget)
    bands = list(dict.fromkeys(table.band))
    if band not in bands:
        raise UserError(f"Band {band!r} is not in this run; it has {', '.join(bands)}.")
    return table[table.band == band].reset_index(drop=True)


def settings_table(
    rates: pandas.DataFrame,
    method: str,
    x: str,
    line: str | None,
    *,
    defaults: Mapping[str, object],
    budget: str | float | None,
) -> pandas.DataFrame:
    """As :func:`parameter_table`, for all bands of a table of rates."""
    settings = {name: found for name in dict.fromkeys(rates.method) if (found := _setting(name, method)) is not None}
    if not settings:
        raise UserError(f"Method {method!r} was not measured in this run; it has {', '.join(_methods(rates.method))}.")
    known = dict.fromkeys([*defaults, *(one for found in settings.values() for one in found)])
    axes = [x] if line is None else [x, line]
    for name in axes:
        if name not in known:
            raise UserError(f"Method {method!r} has no parameter {name!r}; it has {', '.join(known)}.")
    if x == line:
        raise UserError(f"Parameter {x!r} is asked for twice; give another one for the lines, or none.")
    usual = {name: value_of(_text(value)) for name, value in defaults.items()}
    places = {
        name: [value_of(found[one]) if one in found else usual[one] for one in axes]
        for name, found in settings.items()
        if found.keys() <= set(axes) <= found.keys() | usual.keys()
    }
    shown = rates[rates.method.isin(places)]
    if not len(shown):
        others = "" if line is None else f" and {line!r}"
        raise UserError(
            f"No setting of {method!r} differs from its defaults in {x!r}{others} alone; measured were "
            f"{', '.join(settings)}."
        )
    shown = shown[shown.asked == _budget(list(dict.fromkeys(shown.asked)), method, budget)]
    values = [places[name] for name in shown.method]
    out = pandas.DataFrame({
        "line": pandas.Series([one[1] if line is not None else None for one in values], dtype=object),
        "value": pandas.Series([one[0] for one in values], dtype=object),
        "default": [not settings[name] for name in shown.method],
    })  # fmt: skip
    out = pandas.concat([out, shown[_KEPT].reset_index(drop=True)], axis=1)
    lines, columns = in_order(out.line), in_order(out.value)
    ranks = [(lines.index(one), columns.index(two)) for one, two in zip(out.line, out.value)]
    return out.iloc[sorted(range(len(out)), key=ranks.__getitem__)].reset_index(drop=True)


def value_of(text: str) -> int | float | str:
    """A value as a name writes it, as a number where it is a finite one."""
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return number if math.isfinite(number) else text
    return text


def in_order(values: Iterable) -> list:
    """Each value once: numbers ascending, then the others in the order of the alphabet."""
    return sorted(dict.fromkeys(values), key=lambda one: (isinstance(one, str), one is None, one))


def _setting(name: str, method: str) -> dict[str, str] | None:
    """Parameters in the name of a setting of this method with its own spread over layers, else None."""
    if _SPREAD.search(name) or not (name == method or name.startswith(f"{method}:")):
        return None
    parts = [part.partition("=") for part in name[len(method) + 1 :].split(",") if part]
    return {key: value for key, equals, value in parts} if all(equals for _, equals, _ in parts) else None


def _methods(names: Iterable[str]) -> list[str]:
    """Names without parameters, each once."""
    return list(dict.fromkeys(re.sub(r":[^:]*=.*", "", name) for name in names))


def _text(value: object) -> str:
    """A value as canonical names write it."""
    return "none" if value is None else str(value)


def _budget(measured: list[str], method: str, asked: str | float | None) -> str:
    if asked is None:
        if len(measured) > 1:
            raise UserError(
                f"Method {method!r} was measured at budgets {', '.join(measured)}; give one of them as the budget."
            )
        return measured[0]
    for one in measured:
        if one == str(asked) or _share(one) == _share(str(asked)) is not None:
            return one
    raise UserError(f"Budget {asked!r} of {method!r} was not measured; this run has {', '.join(measured)}.")


def _share(text: str) -> Decimal | None:
    try:
        return Decimal(text)
    except InvalidOperation:
        return None
