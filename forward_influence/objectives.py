"""What tuning makes small or large, and how settings are measured for it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from forward_influence.errors import UserError
from forward_influence.filling import Filling, filling
from forward_influence.horizon_bands import named_bands
from forward_influence.methods import make_methods
from forward_influence.plan import Plan
from forward_influence.progress import Progress
from forward_influence.selectors import TopScore, make_selectors
from infokv.scorer import Scorer

#: Mean KL of a compressed cache, to be small; or mean KL after removal of the selected tokens, to be large.
OBJECTIVES = ("fidelity", "influence")


@dataclass(frozen=True)
class Objective:
    """What a setting is measured as, and the sign that makes it a loss.

    Attributes
    ----------
    kind : str
        One of :data:`OBJECTIVES`.
    keep : str or None
        The budget of ``"fidelity"``, as a share of the prefix.
    """

    kind: str
    keep: str | None

    def __post_init__(self):
        if self.kind not in OBJECTIVES:
            raise UserError(f"objective is {self.kind!r}; it must be {' or '.join(OBJECTIVES)}.")

    def selectors(self, settings: Sequence[Scorer]) -> list:
        """Compression methods at the budget, or selectors of what is removed."""
        return make_methods(settings, keep=[self.keep]) if self.kind == "fidelity" else list(map(TopScore, settings))

    def name(self, setting: Scorer) -> str:
        """The name of a setting's rows."""
        return next(iter(make_selectors(self.selectors([setting]))))

    def loss(self, kl: float | None) -> float:
        """Of a mean KL in nats; infinite for a setting that failed."""
        if kl is None:
            return math.inf
        return kl if self.kind == "fidelity" else -kl


@contextlib.contextmanager
def measuring(
    plan: Plan, objective: Objective, band: tuple[int, int], *, model, batch: int | None, quiet: bool
) -> Iterator[tuple[Callable, Filling]]:
    """A function that gives the losses of settings on the first documents of a plan, and the open study.

    It takes the settings and a number of documents, and measures what is not there yet.
    """
    say = Progress(quiet=quiet).say
    with filling(plan, model, batch=batch, fresh=False, quiet=quiet, debug=False) as study:

        def loss(settings: Sequence[Scorer], count: int) -> dict[Scorer, float]:
            say(f"{plan.out.name}: {len(settings)} settings on {count} documents.")
            part = replace(
                plan, selectors=make_selectors(objective.selectors(settings)), documents=plan.documents[:count]
            )
            study.fill(part)
            means = mean_kl(study.folder.rows(), part, band)
            return {one: objective.loss(means[objective.name(one)]) for one in settings}

        yield loss, study


def mean_kl(rows, plan: Plan, band: tuple[int, int]) -> dict[str, float | None]:
    """Mean KL over documents and the offsets of a band, nats, by selector; None where a row is missing."""
    wanted = {document.id for document in plan.documents}
    values: dict[str, list[float]] = {name: [] for name in plan.selectors}
    for row in rows:
        if row["document"] in wanted and row["selector"] in values and row["status"] == "ok":
            part = row["kl"][band[0] : band[1]]
            values[row["selector"]] += [sum(part) / len(part)] if part else []
    return {name: sum(found) / len(found) if len(found) == len(wanted) else None for name, found in values.items()}


def parse_band(band: str | tuple[int, int], horizon: int) -> tuple[int, int]:
    """Offsets of ``"all"``, ``"near"``, ``"far"``, ``"128-512"`` or a pair, the second not included.

    Raises
    ------
    UserError
        If there is no such band within the horizon.
    """
    named = named_bands(horizon)
    if isinstance(band, str) and band in named:
        return named[band]
    try:
        start, stop = (int(part) for part in (band.split("-") if isinstance(band, str) else band))
    except (ValueError, TypeError):
        raise UserError(f"band is {band!r}; it must be {', '.join(named)}, or offsets such as 128-512.") from None
    if not 0 <= start < stop <= horizon:
        raise UserError(f"band is {start}-{stop}; it must lie within the horizon, offsets 0-{horizon}.")
    return start, stop
