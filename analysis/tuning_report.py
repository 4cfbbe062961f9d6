"""What tuned parameters are worth on documents that the search never saw, against the paper's and chance."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas

from forward_influence.analysis.frames import Runs, open_runs
from forward_influence.analysis.intervals import LEVEL, RESAMPLES, mean_interval, mean_of
from forward_influence.analysis.panel import build_panel
from forward_influence.analysis.rate_distortion import METRICS, by_document, offset_bands
from forward_influence.analysis.stats import FEW_DOCUMENTS, few_documents
from forward_influence.errors import UserError
from forward_influence.paths import reachable_path
from forward_influence.run_files import TUNED

#: Who is judged beside the tuned setting, and what they are.
OTHERS = {
    "default": "the method's defaults",
    "paper": "InfoKV as in the paper",
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
        Rows of the held-out documents alone, of the judged settings.
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

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Whose difference is looked at: the tuned setting minus each other, and the random one minus the default."""
        return [("tuned", who) for who in OTHERS if who in self.facts["judged"]] + [("random", "default")]

    def same(self, one: str, other: str) -> bool:
        """Whether two of those that are judged are one setting."""
        return self.facts["judged"][one] == self.facts["judged"][other]

    @property
    def training_gain(self) -> float:
        """How much better the tuned setting was than the default on the documents of the search, nats."""
        kl = [self.facts["train_kl"].get(self.facts["judged"][who]) for who in ("default", "tuned")]
        return float("nan") if None in kl else 0.0 + self.sign * (kl[0] - kl[1])  # no minus zero

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
        [(facts["judged"][who], facts["held_out_kl"][who]) for who in ("tuned", "default", "attention", "random")]
    except OSError as error:
        raise UserError(f"{str(file)!r} cannot be read ({error.strerror}); give a folder of `tune`.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{str(file)!r} is no tuned file with its provenance ({type(error).__name__}: {error}); run `tune` again."
        ) from error
    judged, held_out = set(facts["judged"].values()), set(facts["held_out"])
    runs = open_runs(file.parent / "held-out")  # which an earlier request may have filled with other rows, too
    own = tuple(
        replace(run, rows=[row for row in run.rows if row["document"] in held_out and row["selector"] in judged])
        for run in runs.runs
    )
    return Tuning(file, content, Runs(own))


def tuning_table(
    tuning: Tuning, *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> pandas.DataFrame:
    """The tuned setting minus each other, and the best random one minus the default, paired over held-out documents.

    Returns
    -------
    pandas.DataFrame
        One line per pair (``one`` minus ``other``, see :attr:`Tuning.pairs`), band (``all``, ``near``, ``far``, and
        ``tuned``: the offsets that counted in the search) and metric: ``one_mean`` and ``other_mean`` (means over
        documents: KL and delta NLL in nats, top-1 changes as shares), ``difference`` with its paired percentile
        bootstrap interval ``low`` to ``high``, ``n_documents``. Two names of one setting have differences of 0.
    """
    panel = build_panel(tuning.runs)
    bands = offset_bands(panel) | {"tuned": tuple(tuning.facts["band"])}
    places = {who: panel.index(name) for who, name in tuning.facts["judged"].items()}
    lines, differences = [], []
    for one, other in tuning.pairs:
        for band, (start, stop) in bands.items():
            values = by_document(panel, band, start, stop)
            for metric in METRICS:
                left, right = values[metric][[places[one], places[other]]]
                both = ~np.isnan(left) & ~np.isnan(right)
                with np.errstate(invalid="ignore"):  # infinity minus infinity
                    differences.append(np.where(both, left - right, np.nan))
                lines.append({
                    "one": one, "other": other, "band": band, "band_start": start, "band_stop": stop, "metric": metric,
                    "n_documents": int(both.sum()), "one_mean": mean_of(left[both]), "other_mean": mean_of(right[both]),
                    "difference": mean_of(differences[-1][both]),
                })  # fmt: skip
    low, high = mean_interval(np.stack(differences, axis=1), "percentile", level=level, resamples=resamples, seed=seed)
    table = pandas.DataFrame(lines)
    undefined = table.difference.isna()
    return table.assign(low=np.where(undefined, np.nan, low), high=np.where(undefined, np.nan, high))


def verdicts(tuning: Tuning, table: pandas.DataFrame) -> list[str]:
    """One sentence for each pair: whether a gain in the offsets that were tuned for shows on the held-out documents."""
    sentences = []
    for one, other in tuning.pairs:
        line = table[(table.one == one) & (table.other == other) & (table.band == "tuned") & (table.metric == "kl")]
        line = line.iloc[0]
        who = "The tuned setting" if one == "tuned" else "The best random setting"
        if tuning.same(one, other):
            sentences.append(f"{who} is that of {OTHERS[other]}.")
            continue
        gain, *ends = (0.0 - tuning.sign * value for value in (line.difference, line.low, line.high))  # no minus zero
        low, high = sorted(ends)
        count = f"{line.n_documents} document{'' if line.n_documents == 1 else 's'}"
        if np.isnan(low):
            found, word = "", f"no interval from {count}"
        else:
            found = f" [{low:.3g}, {high:.3g}]"
            word = "shown" if low > 0 else "a loss" if high < 0 else "not shown: the interval includes 0"
            word += f" ({count})"
        sentences.append(f"{who}'s gain over {OTHERS[other]}: {gain:.3g} nats{found}; {word}.")
    return sentences


def describe_tuning(path: str | Path) -> str:
    """A tuning for a person: parameters, gains in training and on held-out documents, and the table."""
    tuning = open_tuning(path)
    facts, table = tuning.facts, tuning_table(tuning)
    method = tuning.content["method"]
    default = table[(table.one == "tuned") & (table.other == "default") & (table.band == "tuned")].set_index("metric")
    gain = 0.0 - tuning.sign * default.difference["kl"]
    lines = [
        f"tuned      {method}: {tuning.setting}",
        f"for        {tuning.aim}",
        f"tried      {facts['tried']} settings on {len(facts['train'])} documents, and {facts['random']['tried']} "
        "random ones beside",
        f"gain       over the defaults {tuning.training_gain:.3g} nats in the search, {gain:.3g} on held-out documents",
        "",
        "Differences on the held-out documents with paired 95% intervals, by band of offsets",
        _text(table),
        "",
        *verdicts(tuning, table),
        "Each interval is for one choice and one draw of random settings, and not corrected for the number of lines.",
    ]
    if doubt := few_documents(int(table.n_documents.min())):
        lines.append(doubt)
    return "\n".join([*lines, *_drawn_was_better(tuning), "", _advice(tuning, default.loc["kl"])])


def _drawn_was_better(tuning: Tuning) -> list[str]:
    """A sentence where one of the settings that were only drawn did better in training: it is not the tuned one."""
    facts = tuning.facts
    mine = facts["train_kl"].get(facts["judged"]["tuned"])
    drawn = [(tuning.sign * kl, kl, name) for name, kl in facts["random"].get("train_kl", {}).items() if kl is not None]
    if mine is None or not drawn or min(drawn)[0] >= tuning.sign * mine:
        return []
    _, best, name = min(drawn)
    return [
        f"In training a random setting did better, {best:.3g} against {mine:.3g} nats: {name}. Random "
        "settings are what the search is measured by, and not chosen: it did not come upon this one, or dropped it."
    ]


def _advice(tuning: Tuning, line) -> str:
    """What to do with the file, by the gain over the defaults on held-out documents."""
    named = f"{tuning.content['method']}:{tuning.path}"
    if tuning.same("tuned", "default"):
        return f"keep       the defaults: the search found nothing better ({named} holds them)"
    low = min(-tuning.sign * line.low, -tuning.sign * line.high)
    if low > 0 and line.n_documents < FEW_DOCUMENTS:
        return f"try it     {named}: the gain shows, but {line.n_documents} documents prove nothing"
    if low > 0:  # not if there is no interval
        return f"use it     {named}"
    return f"keep       the defaults: no gain over them is shown on held-out documents ({named} has the tuned setting)"


def _text(table: pandas.DataFrame) -> str:
    """A line per pair and band, a column per metric."""
    shown = table[table.band != "tuned"] if table.band.nunique() > 2 else table[table.band == "all"]
    aimed = table[table.band == "tuned"]
    spans = set(zip(shown.band_start, shown.band_stop))
    if (aimed.band_start.iloc[0], aimed.band_stop.iloc[0]) not in spans:
        shown = pandas.concat([shown, aimed]).sort_index()  # with its pair
    rounded = shown[["difference", "low", "high"]].map(lambda value: 0.0 if abs(value) < 1e-15 else value)
    found = [
        f"{line.difference:.3g}" + ("" if line.low != line.low else f" [{line.low:.3g}, {line.high:.3g}]")
        for line in rounded.itertuples()
    ]
    names = [f"{line.one} - {line.other}" for line in shown.itertuples()]
    offsets = [f"{line.band_start}-{line.band_stop}" for line in shown.itertuples()]
    cells = shown.assign(pair=names, offsets=offsets, found=found)
    wide = cells.pivot(index=["pair", "offsets", "n_documents"], columns="metric", values="found")
    order = cells[["pair", "offsets", "n_documents"]].drop_duplicates()
    wide = wide.loc[list(order.itertuples(index=False, name=None)), list(METRICS)]
    return wide.reset_index().rename_axis(columns=None).to_string(index=False)
