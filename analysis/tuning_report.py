"""What tuned parameters are worth on documents that the search never saw, against the paper's and chance."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas

from forward_influence.analysis.frames import Runs, open_runs
from forward_influence.analysis.intervals import LEVEL, RESAMPLES, mean_interval, mean_of
from forward_influence.analysis.panel import build_panel
from forward_influence.analysis.rate_distortion import METRICS, by_document, offset_bands
from forward_influence.analysis.stats import few_documents
from forward_influence.errors import UserError
from forward_influence.paths import reachable_path

TUNED = "tuned.json"

#: Whom the tuned setting is compared with, and what they are.
OTHERS = {
    "default": "the method's defaults",
    "attention": "attention alone (snapkv)",
    "random": "the best of as many random settings",
}


@dataclass(frozen=True)
class Tuning:
    """A tuned file and the rows of its held-out documents.

    Attributes
    ----------
    path : Path
        The file.
    content : dict
        Method, parameters, model, provenance.
    runs : Runs
    """

    path: Path
    content: dict
    runs: Runs

    @property
    def facts(self) -> dict:
        """Where the parameters come from."""
        return self.content["provenance"]

    @property
    def sign(self) -> int:
        """1 where a small KL is good, -1 where a large one is."""
        return 1 if self.facts["objective"] == "fidelity" else -1

    def is_tuned(self, other: str) -> bool:
        """Whether one of :data:`OTHERS` is the tuned setting itself."""
        return self.facts["judged"][other] == self.facts["judged"]["tuned"]

    @property
    def setting(self) -> str:
        """The chosen parameters as they are typed, or that there are none."""
        return ", ".join(
            f"{name}={'none' if value is None else value}" for name, value in self.content["parameters"].items()
        ) or "its defaults"  # fmt: skip

    @property
    def aim(self) -> str:
        """What was measured of the settings, and where."""
        facts = self.facts
        share = f"budget {facts['keep']}" if self.sign > 0 else f"removed fraction {facts['fraction']}"
        return f"{facts['objective']}, {share}, offsets {facts['band'][0]:,} to {facts['band'][1] - 1:,}"


def is_tuning(path: str | Path) -> bool:
    """Whether a path is a tuned file, or a folder that holds one."""
    path = reachable_path(path, "run")
    return (path / TUNED).is_file() or path.name == TUNED


def open_tuning(path: str | Path) -> Tuning:
    """Read a tuned file and the run beside it.

    Parameters
    ----------
    path : path
        ``tuned.json``, or the folder that holds it.

    Raises
    ------
    UserError
        If it is none.
    """
    path = reachable_path(path, "run")
    file = path / TUNED if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        facts = content["provenance"]
        content["method"], content["parameters"].items(), facts["keep"], facts["fraction"], facts["random"]["tried"]
        [facts[name] for name in ("objective", "tried", "train", "held_out", "train_kl")], tuple(facts["band"])
        [(facts["judged"][who], facts["held_out_kl"][who]) for who in ("tuned", *OTHERS)]
    except OSError as error:
        raise UserError(f"{str(file)!r} cannot be read ({error.strerror}); give a folder of `tune`.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{str(file)!r} is no tuned file with its provenance ({type(error).__name__}: {error}); run `tune` again."
        ) from error
    return Tuning(file, content, open_runs(file.parent / "held-out"))


def tuning_table(
    tuning: Tuning, *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> pandas.DataFrame:
    """The tuned setting minus each of :data:`OTHERS`, paired over the held-out documents.

    Returns
    -------
    pandas.DataFrame
        One line per other setting, band (``all``, ``near``, ``far``, and ``tuned``: the offsets that counted in the
        search) and metric: ``tuned`` and ``other`` (means over documents: KL and delta NLL in nats, top-1 changes as
        shares), ``difference`` with its paired percentile bootstrap interval ``low`` to ``high``, ``n_documents``.
        A setting that is the tuned one itself has differences of 0.
    """
    panel = build_panel(tuning.runs)
    bands = offset_bands(panel) | {"tuned": tuple(tuning.facts["band"])}
    places = {who: panel.index(name) for who, name in tuning.facts["judged"].items()}
    lines, differences = [], []
    for who in OTHERS:
        for band, (start, stop) in bands.items():
            values = by_document(panel, band, start, stop)
            for metric in METRICS:
                mine, other = values[metric][[places["tuned"], places[who]]]
                both = ~np.isnan(mine) & ~np.isnan(other)
                with np.errstate(invalid="ignore"):  # infinity minus infinity
                    differences.append(np.where(both, mine - other, np.nan))
                lines.append({
                    "other": who, "band": band, "band_start": start, "band_stop": stop, "metric": metric,
                    "n_documents": int(both.sum()), "tuned": mean_of(mine[both]), "other_mean": mean_of(other[both]),
                    "difference": mean_of(differences[-1][both]),
                })  # fmt: skip
    low, high = mean_interval(np.stack(differences, axis=1), "percentile", level=level, resamples=resamples, seed=seed)
    table = pandas.DataFrame(lines)
    undefined = table.difference.isna()
    return table.assign(low=np.where(undefined, np.nan, low), high=np.where(undefined, np.nan, high))


def verdicts(tuning: Tuning, table: pandas.DataFrame) -> list[str]:
    """One sentence for each other setting: whether the gain in the band that was tuned for is real."""
    sentences = []
    for who, what in OTHERS.items():
        line = table[(table.other == who) & (table.band == "tuned") & (table.metric == "kl")].iloc[0]
        if tuning.is_tuned(who):
            sentences.append(f"The tuned setting is that of {what}.")
            continue
        gain, *ends = (0.0 - tuning.sign * value for value in (line.difference, line.low, line.high))  # no minus zero
        low, high = sorted(ends)
        if np.isnan(low):
            found, word = "", f"no interval from {line.n_documents} document{'' if line.n_documents == 1 else 's'}"
        else:
            found = f" [{low:.3g}, {high:.3g}]"
            word = "real" if low > 0 else "a loss" if high < 0 else "not shown: its interval includes 0"
        sentences.append(f"Gain over {what}: {gain:.3g} nats{found}; {word}.")
    return sentences


def describe_tuning(path: str | Path) -> str:
    """A tuning for a person: parameters, gains in training and on held-out documents, and the table."""
    tuning = open_tuning(path)
    facts, table = tuning.facts, tuning_table(tuning)
    method = tuning.content["method"]
    shown = table[table.metric == "kl"].pivot_table(
        index="other", columns="band", values="difference", sort=False, dropna=False
    )  # fmt: skip
    trained = facts["train_kl"].get(facts["judged"]["tuned"], float("nan"))
    others = ", ".join(f"{who} {value:.4g}" for who, value in facts["held_out_kl"].items() if who != "tuned")
    lines = [
        f"tuned      {method}: {tuning.setting}",
        f"for        {tuning.aim}",
        f"tried      {facts['tried']} settings on {len(facts['train'])} documents, and {facts['random']['tried']} "
        "random ones beside",
        f"mean KL    {trained:.4g} in training, {facts['held_out_kl']['tuned']:.4g} held out ({others})",
        "",
        "Tuned minus other on the held-out documents, mean KL in nats by band of offsets",
        shown.to_string(float_format=lambda value: f"{value:.3g}"),
        "",
        *verdicts(tuning, table),
    ]
    if doubt := few_documents(int(table.n_documents.max())):
        lines.append(doubt)
    return "\n".join([*lines, "", f"use it     {method}:{tuning.path}"])
