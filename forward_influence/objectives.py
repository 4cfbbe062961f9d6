"""What tuning makes small or large, and how settings are measured for it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from forward_influence.errors import UserError
from forward_influence.horizon_bands import named_bands
from forward_influence.methods import make_methods
from forward_influence.open_study import OpenStudy, opened
from forward_influence.plan import Plan
from forward_influence.progress import Progress
from forward_influence.rows import NOISE
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

    def selectors(self, settings: Iterable[Scorer]) -> list:
        """Compression methods at the budget, or selectors of what is removed."""
        if self.kind == "fidelity":
            return make_methods(list(settings), keep=[self.keep])
        return list(map(TopScore, settings))

    def name(self, setting: Scorer) -> str:
        """The name of a setting's rows."""
        return self.selectors([setting])[0].canonical()

    def loss(self, kl: list[float] | None) -> float:
        """What is made small: the mean over documents, nats, or its negative; infinite for a setting that failed."""
        return math.inf if kl is None else self._signed(sum(kl) / len(kl))

    def typical_loss(self, kl: list[float] | None) -> float:
        """The same with the mean of logarithms, to compare settings on few documents.

        Documents differ by a factor of 40 in KL, and one or two of them carry a mean. In 12 settings of InfoKV on 16
        documents, ranks by mean KL over 4 documents had a correlation of 0.37 with those over the other 12, ranks by
        mean logarithm one of 0.63 (SmolLM2-135M, prefix 2048, horizon 512, budget 0.4).
        """
        return math.inf if kl is None else self._signed(sum(math.log(max(one, NOISE)) for one in kl) / len(kl))

    def _signed(self, value: float) -> float:
        return value if self.kind == "fidelity" else -value


@contextlib.contextmanager
def measuring(
    plan: Plan, objective: Objective, band: tuple[int, int], *, model, batch: int | None, quiet: bool
) -> Iterator[tuple[Callable, OpenStudy]]:
    """A function that gives the KL of settings on each of the first documents of a plan, and the open study.

    It takes the settings and a number of documents, measures what is not there yet, and gives None for a setting that
    failed; see :func:`kl_by_document`.
    """
    say = Progress(quiet=quiet).say
    with opened(plan, model, batch=batch, fresh=False, quiet=quiet, debug=False) as study:

        def measure(settings: Sequence[Scorer], count: int) -> dict[Scorer, list[float] | None]:
            say(f"{plan.out.name}: settings {len(settings)}, documents {count}.")
            selectors = make_selectors(objective.selectors(settings))
            part = replace(plan, selectors=selectors, documents=plan.documents[:count])
            study.fill(part)
            found = kl_by_document(study.folder.rows(), part, band)
            return {one: found[objective.name(one)] for one in settings}

        yield measure, study


def kl_by_document(rows: Iterable[dict], plan: Plan, band: tuple[int, int]) -> dict[str, list[float] | None]:
    """KL of each document, the mean over the offsets of a band in nats, by selector.

    Documents in which nothing could be measured count for nobody; a selector that failed in another one has None.
    """
    wanted = {document.id for document in plan.documents}
    found: dict[str, dict[str, float]] = {name: {} for name in plan.selectors}
    for row in rows:
        if row["document"] in wanted and row["selector"] in found and row["status"] == "ok":
            part = row["kl"][band[0] : band[1]]
            if len(part) == band[1] - band[0]:
                found[row["selector"]][row["document"]] = sum(part) / len(part)
    usable = set().union(*(set(values) for values in found.values()))
    return {
        name: [values[one] for one in sorted(usable)] if usable and set(values) == usable else None
        for name, values in found.items()
    }


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
