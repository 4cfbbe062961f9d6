"""The report on a tuning against plain loops over its rows, its verdicts, and the figure."""

import itertools
import json
import math
import re

import numpy as np
import pandas
import pytest

from forward_influence.analysis import describe_tuning, open_tuning, plot_tuning, tuning_figure, tuning_table, verdicts
from forward_influence.analysis.tuning_plot import drawn_bands
from forward_influence.cli import run as run_command
from forward_influence.errors import UserError
from forward_influence.rows import ROW_FIELDS, RunSpec, row_key
from forward_influence.runs import RunFolder

CHUNK, HORIZON = 32, 192
FIXED = {"model": "tiny@1", "dtype": "float32", "tokenizer": "t", "data": "local", "prefix": 100}
LEVELS = {"tuned": 0.05, "default": 0.08, "attention": 0.07, "random": 0.055}
NAMES = {"tuned": "infokv:alpha=0.5,k=none", "default": "infokv", "attention": "snapkv", "random": "infokv:tau=0.5"}
PAPER = {"levels": LEVELS | {"paper": 0.06}, "names": NAMES | {"default": "attention-only", "paper": "infokv"}}
PAIRS = [("tuned", "default"), ("tuned", "attention"), ("tuned", "random"), ("random", "default")]
WITH_PAPER = [PAIRS[0], ("tuned", "paper"), *PAIRS[1:]]
METRICS = ("kl", "delta_nll", "top1_changed")


pytestmark = pytest.mark.filterwarnings("error")


def make_row(spec: RunSpec, document: str, selector: str, kl: list[float]) -> dict:
    """A row whose delta NLL is half of its KL and whose top-1 share is a tenth of it."""
    chunks = [kl[start : start + CHUNK] for start in range(0, len(kl), CHUNK)]
    means = [math.fsum(c) / len(c) for c in chunks]
    row = dict.fromkeys(ROW_FIELDS) | {"key": row_key(spec.hash(), document, selector), "mode": spec.mode}
    row |= {"document": document, "document_sha": f"sha-{document}", "selector": selector, "status": "ok"}
    row |= {"n_tokens": 300, "n_removed": 60, "removed_fraction": 0.6, "kept_fraction": 0.4, "seconds": 0.5}
    row |= {"removed": list(range(60))} if spec.mode == "remove" else {"kept_counts": [40, 40]}
    row |= {"chunk_start": list(range(0, len(kl), CHUNK)), "chunk_count": [len(c) for c in chunks], "kl": kl}
    row |= {"kl_mean": means, "delta_nll": [m / 2 for m in means], "nll_count": [len(c) for c in chunks]}
    return row | {"top1_changed": [m / 10 for m in means]}


@pytest.fixture
def tuned(tmp_path):
    """Function that writes the folder of a tuning, a new one each time, and gives its path."""

    counter = itertools.count()

    def build(
        objective="fidelity", levels=LEVELS, names=NAMES, n=12, band=(32, 96), noise=0.05, change=None, beside=()
    ):
        home = tmp_path / f"tuning{next(counter)}"
        fidelity = objective == "fidelity"
        names = {who: name + ("@0.4" if fidelity else "") for who, name in names.items()}
        choices = {"mode": "keep", "fraction": "1", "sinks": 0, "recent": 0} if fidelity else {}
        spec = RunSpec(**FIXED, horizon=HORIZON, chunk=CHUNK, **choices)
        rng, rows = np.random.default_rng(3), []
        for number in range(n):
            scale = rng.lognormal(0, 1)
            for name, who in {name: who for who, name in names.items()}.items():  # a setting has one row
                kl = scale * levels[who] * rng.lognormal(0, noise) * rng.lognormal(0, 1, HORIZON)
                rows.append(make_row(spec, f"d{number}", name, kl.tolist()))
        rows += [make_row(spec, document, name, [9.0] * HORIZON) for document, name in beside]
        with RunFolder.open(home / "held-out", spec, {}) as folder:
            folder.append(rows)
        trained = {names["tuned"]: 0.05, names["default"]: 0.09, "infokv:alpha=0.7@0.4": 0.06}
        facts = {
            "objective": objective, "keep": "0.4" if fidelity else None, "fraction": None if fidelity else "0.01",
            "band": list(band), "tried": 7, "train_kl": trained, "held_out_kl": levels, "judged": names,
            "random": {"tried": 7, "train_kl": {names["random"]: 0.055}},
            "train": ["a", "b"], "held_out": [f"d{number}" for number in range(n)],
        }  # fmt: skip
        content = {"method": "infokv", "parameters": {"alpha": 0.5, "k": None}, "model": {}, "provenance": facts}
        if change is not None:
            change(content)
        (home / "tuned.json").write_text(json.dumps(content))
        return home

    return build


def by_hand(folder, name: str, start: int, stop: int) -> dict[str, dict[str, float]]:
    """Means of a band of whole chunks by document, from the lines on disk."""
    out = {}
    for line in (folder / "held-out" / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["selector"] == name:
            kl = math.fsum(row["kl"][start:stop]) / (stop - start)
            out[row["document"]] = {"kl": kl, "delta_nll": kl / 2, "top1_changed": kl / 10}
    return out


def make_infinite(folder, name: str, offset: int) -> None:
    """Give one document's row of a setting an infinite KL at an offset."""
    rows = folder / "held-out" / "rows.jsonl"
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    for row in lines:
        if row["selector"] == name and row["document"] == "d0":
            row["kl"][offset], row["kl_mean"][offset // CHUNK] = "inf", "inf"
    rows.write_text("".join(json.dumps(row) + "\n" for row in lines))


@pytest.mark.parametrize(
    ("objective", "given", "pairs"),
    [("fidelity", {}, PAIRS), ("influence", {}, PAIRS), ("fidelity", PAPER, WITH_PAPER)],
)
def test_the_table_equals_plain_loops(tuned, objective, given, pairs):
    folder = tuned(objective, **given)
    tuning = open_tuning(folder)
    judged = tuning.facts["judged"]
    table = tuning_table(tuning, seed=7)
    spans = {"all": (0, 192), "near": (0, 128), "far": (128, 192), "tuned": (32, 96)}
    expected = [(*pair, band, metric) for pair in pairs for band in spans for metric in METRICS]
    assert sorted(zip(table.one, table.other, table.band, table.metric)) == sorted(expected)
    for line in table.itertuples():
        assert (line.band_start, line.band_stop) == spans[line.band]
        one, other = (by_hand(folder, judged[who], *spans[line.band]) for who in (line.one, line.other))
        left, right = ([means[document][line.metric] for document in one] for means in (one, other))
        pairs = [a - b for a, b in zip(left, right)]
        assert line.n_documents == len(pairs) == 12
        assert line.one_mean == pytest.approx(sum(left) / 12, rel=1e-4)
        assert line.other_mean == pytest.approx(sum(right) / 12, rel=1e-4)
        assert line.difference == pytest.approx(sum(pairs) / 12, rel=1e-4)
        draws = np.random.default_rng(7).integers(0, 12, (4000, 12)).tolist()
        means = [sum(pairs[i] for i in draw) / 12 for draw in draws]
        assert (line.low, line.high) == pytest.approx(np.quantile(means, [0.025, 0.975]).tolist(), rel=1e-4)


def test_a_document_without_a_pair_does_not_count(tuned):
    folder = tuned()
    rows = folder / "held-out" / "rows.jsonl"
    lines = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join(one for one in lines if not ('"d3"' in one and '"snapkv@0.4"' in one)))
    table = tuning_table(open_tuning(folder)).set_index("other")
    assert set(table.loc["attention"].n_documents) == {11} and set(table.loc["default"].n_documents) == {12}
    near = table.loc["attention"].query("band == 'near' and metric == 'kl'").iloc[0]
    mine, other = (by_hand(folder, name, 0, 128) for name in ("infokv:alpha=0.5,k=none@0.4", "snapkv@0.4"))
    assert near.difference == pytest.approx(sum(mine[d]["kl"] - other[d]["kl"] for d in other) / 11, rel=1e-4)


def test_rows_of_other_documents_and_selectors_do_not_count(tuned):
    """A folder may hold what an interrupted or an earlier request measured."""
    judged = [f"{name}@0.4" for name in NAMES.values()]
    foreign = [("d99", name) for name in judged] + [("d0", "random@0.4"), ("d99", "random@0.4")]
    alone, shared = tuned(), tuned(beside=foreign)
    tuning = open_tuning(shared)
    found = {(row["document"], row["selector"]) for row in tuning.runs.rows}
    assert found == set(itertools.product((f"d{number}" for number in range(12)), judged))
    assert len((shared / "held-out" / "rows.jsonl").read_text().splitlines()) == len(found) + len(foreign)
    pandas.testing.assert_frame_equal(tuning_table(tuning), tuning_table(open_tuning(alone)))
    assert describe_tuning(shared) == describe_tuning(alone).replace(str(alone), str(shared))
    assert "n = 12 documents" in tuning_figure(shared).get_supxlabel()


def test_a_folder_with_rows_of_others_alone_has_nothing_to_tell(tuned):
    folder = tuned(change=lambda content: content["provenance"].update(held_out=["d77"]))
    with pytest.raises(UserError, match="has no measured row yet"):
        describe_tuning(folder)


def sentences(folder, pairs=PAIRS) -> dict[tuple[str, str], str]:
    tuning = open_tuning(folder)
    return dict(zip(pairs, verdicts(tuning, tuning_table(tuning)), strict=True))


@pytest.mark.parametrize("objective", ["fidelity", "influence"])
def test_a_verdict_is_a_gain_a_loss_or_neither(tuned, objective):
    """A small KL is good after compression, a large one after removal."""
    levels = {"tuned": 0.05, "default": 0.1, "attention": 0.02, "random": 0.05}
    found = sentences(tuned(objective, levels, noise=0.2))
    over_default, over_attention = found["tuned", "default"], found["tuned", "attention"]
    assert over_default.startswith("The tuned setting's gain over the method's defaults: ")
    assert over_attention.startswith("The tuned setting's gain over attention alone (snapkv): ")
    assert found["random", "default"].startswith("The best random setting's gain over the method's defaults: ")
    better = [over_default, found["random", "default"]]
    gains, losses = (better, [over_attention]) if objective == "fidelity" else ([over_attention], better)
    assert all(": 0." in one and one.endswith("]; shown (12 documents).") for one in gains)
    assert all(": -0." in one and one.endswith("]; a loss (12 documents).") for one in losses)
    assert found["tuned", "random"].startswith("The tuned setting's gain over the best of as many random settings: ")
    assert found["tuned", "random"].endswith("]; not shown: the interval includes 0 (12 documents).")
    for sentence in found.values():
        low, high = map(float, sentence.partition("[")[2].partition("]")[0].split(", "))
        assert low <= float(sentence.partition(": ")[2].partition(" nats")[0]) <= high


def test_a_verdict_where_two_settings_are_the_same(tuned):
    folder = tuned(names=NAMES | {"tuned": "infokv", "random": "infokv"}, change=lambda c: c.update(parameters={}))
    found = sentences(folder)
    assert found["tuned", "default"] == "The tuned setting is that of the method's defaults."
    assert found["tuned", "random"] == "The tuned setting is that of the best of as many random settings."
    assert found["random", "default"] == "The best random setting is that of the method's defaults."
    table = tuning_table(open_tuning(folder)).set_index(["one", "other"]).sort_index()
    assert (table.loc[("tuned", "default"), ["difference", "low", "high"]] == 0).all(axis=None)
    assert "infokv: its defaults" in describe_tuning(folder)
    labels = [label.get_text() for label in tuning_figure(folder).axes[0].get_yticklabels()]
    assert ["the same setting" in label for label in labels] == [True, False, True, True]


def test_the_paper_is_told_of_where_it_was_judged(tuned):
    folder = tuned(**PAPER, change=lambda content: content.update(method="attention-only"))
    found = sentences(folder, WITH_PAPER)
    assert found["tuned", "paper"].startswith("The tuned setting's gain over InfoKV as in the paper: 0.")
    assert found["tuned", "paper"].endswith("; shown (12 documents).")
    assert describe_tuning(folder).count("tuned - paper ") == 4
    table = tuning_table(open_tuning(folder)).query("band == 'all' and metric == 'kl'").set_index(["one", "other"])
    axes = tuning_figure(folder).axes[0]
    labels = [label.get_text().replace("\n", " ") for label in axes.get_yticklabels()]
    assert labels == [
        "tuned minus defaults", "tuned minus InfoKV of the paper", "tuned minus attention alone",
        "tuned minus best of 7 random settings", "best of 7 random settings minus defaults",
    ]  # fmt: skip
    drawn = axes.get_lines()[1]
    assert drawn.get_xdata() == pytest.approx(table.loc[WITH_PAPER].difference.to_numpy())
    assert list(np.round(drawn.get_ydata())) == [0, 1, 2, 3, 4]
    assert "- paper" not in (told := describe_tuning(tuned())) and "in the paper" not in told
    assert len(tuning_figure(tuned()).axes[0].get_yticklabels()) == 4


def test_two_settings_that_keep_the_same_tokens_differ_by_0_without_a_sign(tuned):
    folder = tuned()
    rows = folder / "held-out" / "rows.jsonl"
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    same = {row["document"]: row for row in lines if row["selector"] == "infokv@0.4"}
    facts = ("kl", "kl_mean", "delta_nll", "top1_changed")
    lines = [row | {name: same[row["document"]][name] for name in facts} for row in lines]
    rows.write_text("".join(json.dumps(row) + "\n" for row in lines))
    told = "gain over the method's defaults: 0 nats [0, 0]; not shown: the interval includes 0 (12 documents)."
    assert sentences(folder)["tuned", "default"] == f"The tuned setting's {told}"
    assert sentences(folder)["random", "default"] == f"The best random setting's {told}"


def test_one_document_gives_no_verdict(tuned):
    folder = tuned(n=1)
    for sentence in sentences(folder).values():
        assert sentence.endswith(" nats; no interval from 1 document.")
    assert tuning_table(open_tuning(folder))[["low", "high"]].isna().all(axis=None)
    assert "no interval from one document" in tuning_figure(folder).get_supxlabel()


def test_the_description_names_what_was_chosen_and_how_to_use_it(tuned):
    folder = tuned()
    for given in (folder, folder / "tuned.json"):
        told = describe_tuning(given)
        assert "tuned      infokv: alpha=0.5, k=none" in told
        assert "for        fidelity, budget 0.4, offsets 32 to 95" in told
        assert "tried      7 settings on 2 documents, and 7 random ones beside" in told
        assert "gain       over the defaults 0.04 nats in the search, " in told
        assert told.endswith(f"use it     infokv:{folder / 'tuned.json'}")
        assert "not to be trusted" not in told
    told = describe_tuning(tuned("influence", n=3))
    assert "removed fraction 0.01" in told and "over the defaults -0.04 nats in the search, " in told


@pytest.mark.parametrize(("objective", "levels", "word"), [
    ("fidelity", {"tuned": 0.05, "default": 0.1}, "use it     infokv:"),
    ("fidelity", {"tuned": 0.1, "default": 0.05}, "keep       the defaults: no gain over them is shown"),
    ("influence", {"tuned": 0.1, "default": 0.05}, "use it     infokv:"),
    ("influence", {"tuned": 0.05, "default": 0.1}, "keep       the defaults: no gain over them is shown"),
])  # fmt: skip
def test_the_advice_follows_the_held_out_documents(tuned, objective, levels, word):
    assert describe_tuning(tuned(objective, LEVELS | levels)).splitlines()[-1].startswith(word)
    few = describe_tuning(tuned(objective, LEVELS | levels, n=3)).splitlines()[-1]
    assert few.startswith("try it") == word.startswith("use it") and (
        "3 documents prove nothing" in few
    ) == few.startswith("try it")
    one = describe_tuning(tuned(objective, LEVELS | levels, n=1)).splitlines()[-1]  # has no interval
    assert one.startswith("keep       the defaults")


def test_the_advice_where_the_search_found_the_defaults(tuned):
    folder = tuned(names=NAMES | {"tuned": "infokv"}, change=lambda content: content.update(parameters={}))
    assert "keep       the defaults: the search found nothing better" in describe_tuning(folder)


@pytest.mark.parametrize(("objective", "drawn", "told"), [
    ("fidelity", 0.04, True), ("fidelity", 0.06, False), ("fidelity", None, False), ("influence", 0.06, True),
    ("influence", 0.04, False),
])  # fmt: skip
def test_a_drawn_setting_that_did_better_in_training_is_named(tuned, objective, drawn, told):
    def change(content):
        content["provenance"]["random"]["train_kl"] = {"infokv:tau=2": drawn}

    found = describe_tuning(tuned(objective, change=change))
    assert ("In training a random setting did better" in found) == told
    assert (f"{drawn} against 0.05 nats: infokv:tau=2." in found) == told


@pytest.mark.parametrize("objective", ["fidelity", "influence"])
def test_the_gain_on_held_out_documents_stands_beside_that_of_the_search(tuned, objective):
    """The aim of the search is what counts: the KL in the band that was tuned for, here no band of the report."""
    folder = tuned(objective)
    judged = open_tuning(folder).facts["judged"]
    tuning, default = (by_hand(folder, judged[who], 32, 96) for who in ("tuned", "default"))
    gain = sum(default[document]["kl"] - tuning[document]["kl"] for document in default) / 12
    told = re.search(r"in the search, (\S+) on held-out documents", describe_tuning(folder))
    assert float(told.group(1)) == pytest.approx(gain if objective == "fidelity" else -gain, rel=0.005)


@pytest.mark.parametrize(("band", "spans"), [((32, 96), ["0-192", "0-128", "128-192", "32-96"]),
                                             ((0, 192), ["0-192", "0-128", "128-192"])])  # fmt: skip
def test_the_description_has_all_metrics_with_their_intervals(tuned, band, spans):
    folder = tuned(band=band)
    table = tuning_table(open_tuning(folder)).query("band != 'tuned' or band_start == 32")
    told = re.findall(r"^ *(\w+) - (\w+) +(\S+) +12 +(.*\])$", describe_tuning(folder), re.MULTILINE)
    assert sorted(line[:3] for line in told) == sorted((*pair, span) for pair in PAIRS for span in spans)
    for one, other, span, cells in told:
        numbers = [float(number) for number in re.findall(r"[^\s\[\],]+", cells)]
        start, _, stop = span.partition("-")
        part = table[(table.one == one) & (table.other == other)]
        part = part[(part.band_start == int(start)) & (part.band_stop == int(stop))].set_index("metric")
        expected = part.loc[list(METRICS), ["difference", "low", "high"]].to_numpy().ravel()
        assert numbers == pytest.approx(expected.tolist(), rel=0.005)


def test_few_documents_are_told(tuned):
    assert "Intervals from 3 documents are not to be trusted" in describe_tuning(tuned(n=3))


def test_what_is_no_tuning_is_refused(tuned, tmp_path):
    with pytest.raises(UserError, match="nothing' cannot be read .*give a folder of `tune`"):
        open_tuning(tmp_path / "nothing")
    for name in ("objective", "judged", "held_out_kl", "train_kl", "random", "band"):
        folder = tuned(change=lambda content, name=name: content["provenance"].pop(name))
        with pytest.raises(UserError, match=f"no tuned file with its provenance .*{name}"):
            open_tuning(folder)


def test_bands_with_the_same_offsets_are_drawn_once(tuned):
    def bands(band):
        return drawn_bands(tuning_table(open_tuning(tuned(n=2, band=band))))

    assert bands((0, 192)) == {
        "all": "all: offsets 0 to 191, tuned for", "near": "near: offsets 0 to 127", "far": "far: offsets 128 to 191",
    }  # fmt: skip
    assert bands((32, 96))["tuned"] == "offsets 32 to 95, tuned for" and len(bands((32, 96))) == 4


@pytest.mark.parametrize("objective", ["fidelity", "influence"])
def test_the_figure_shows_the_table(tuned, objective):
    folder = tuned(objective)
    table = tuning_table(open_tuning(folder))
    figure = tuning_figure(folder)
    for axes, (metric, factor) in zip(figure.axes, {"kl": 1, "delta_nll": 1, "top1_changed": 100}.items()):
        zero, *lines = axes.get_lines()
        assert list(zero.get_xdata()) == [0, 0]
        for line, bars, band in zip(lines, axes.collections, ("all", "near", "far", "tuned"), strict=True):
            part = table[(table.band == band) & (table.metric == metric)].set_index(["one", "other"])
            part = factor * part.loc[PAIRS, ["difference", "low", "high"]]
            assert line.get_xdata() == pytest.approx(part.difference.to_numpy())
            ends = np.array([segment[:, 0] for segment in bars.get_segments()])
            assert ends == pytest.approx(part[["low", "high"]].to_numpy())
            assert [segment[0, 1] for segment in bars.get_segments()] == pytest.approx(line.get_ydata())
        better = axes.get_xlabel().splitlines()[1]
        assert better == ("\N{LEFTWARDS ARROW} the first is better", "the first is better \N{RIGHTWARDS ARROW}")[
            objective == "influence"
        ]  # fmt: skip
    search, chance, default = figure.axes[3].get_lines()
    ranked = [0.05, 0.06, 0.09] if objective == "fidelity" else [0.09, 0.06, 0.05]
    assert list(search.get_xdata()) == [1, 2, 3] and list(search.get_ydata()) == ranked
    assert list(chance.get_ydata()) == [0.055]
    assert (list(default.get_xdata()), list(default.get_ydata())) == ([ranked.index(0.09) + 1], [0.09])
    assert "alpha=0.5, k=none" in figure.get_suptitle()


def without_training(*nameless: str):
    """Function that leaves some of the judged without a finite mean KL on the training documents."""

    def change(content: dict) -> None:
        facts = content["provenance"]
        facts["train_kl"] |= {facts["judged"][who]: None for who in nameless}
        facts["random"]["train_kl"] |= {"infokv:tau=2@0.4": None, "infokv:tau=1@0.4": 0.07}

    return change


@pytest.mark.parametrize(("without", "ranked", "ring"), [
    ([], [0.05, 0.06, 0.09], [(3, 0.09)]), (["default"], [0.05, 0.06], []), (["tuned"], [0.06, 0.09], [(2, 0.09)]),
])  # fmt: skip
def test_settings_without_a_training_result_are_not_drawn(tuned, without, ranked, ring):
    folder = tuned(change=without_training(*without))
    search, chance, *default = tuning_figure(folder).axes[3].get_lines()
    assert (list(search.get_xdata()), list(search.get_ydata())) == (list(range(1, len(ranked) + 1)), ranked)
    assert (list(chance.get_xdata()), list(chance.get_ydata())) == ([1, 2], [0.055, 0.07])
    assert [(*line.get_xdata(), *line.get_ydata()) for line in default] == ring
    gain = "nan" if without else "0.04"
    assert f"gain       over the defaults {gain} nats in the search, " in describe_tuning(folder)


def test_a_judged_setting_without_a_finite_held_out_result_is_told_as_such(tuned):
    """The file holds null where the mean is infinite; the rows say so themselves."""

    def change(content: dict) -> None:
        content["provenance"]["held_out_kl"] = LEVELS | {"default": None, "attention": None}

    folder = tuned(change=change)
    make_infinite(folder, "infokv@0.4", 40)
    found = sentences(folder)
    for pair in (("tuned", "default"), ("random", "default")):
        assert found[pair].endswith("gain over the method's defaults: inf nats [inf, inf]; shown (12 documents).")
    assert "inf" not in found["tuned", "attention"]
    assert " inf on held-out documents" in describe_tuning(folder)
    words = tuning_figure(folder).get_supxlabel().replace("\n", " ")
    assert "Not drawn: 6 infinite differences." in words  # two pairs; all, near and tuned


@pytest.mark.parametrize("given", [{}, PAPER])
def test_words_stay_inside_the_figure_and_apart(tuned, given):
    terms = "attention/rank*0.8+key-norm/rank*0.1+value-norm/rank*0.1"
    chosen = {"terms": terms, "k": None, "temperature": 0.5, "window": 16, "kernel": 15, "sinks": 4}
    figure = tuning_figure(tuned("influence", n=3, change=lambda content: content.update(parameters=chosen), **given))
    figure.draw_without_rendering()
    rows = figure.axes[0].get_yticklabels()
    ticks = [label for axes in figure.axes[:3] for label, x in zip(axes.get_xticklabels(), axes.get_xticks())
             if axes.get_xlim()[0] <= x <= axes.get_xlim()[1]]  # fmt: skip
    keys = [text for axes in figure.axes[3:] for text in axes.get_legend().get_texts()]
    for text in (*figure.texts, *rows, *ticks, *keys):
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, text.get_text()
    for first, second in itertools.chain(itertools.pairwise(rows), itertools.pairwise(ticks)):
        assert not first.get_window_extent().overlaps(second.get_window_extent()), (first.get_text(), second.get_text())
    assert figure.axes[0].bbox.x0 < 0.2 * figure.bbox.x1  # the rows' words leave room for the panels
    assert terms in figure.get_suptitle().replace("\n", " ")


def test_infinite_differences_are_gaps_that_the_caption_counts(tuned):
    folder = tuned()
    make_infinite(folder, "snapkv@0.4", 0)
    words = tuning_figure(folder).get_supxlabel().replace("\n", " ")
    assert "Not drawn: 2 infinite differences." in words  # all and near


def test_files_lie_in_the_folder_of_the_tuning(tuned, tmp_path):
    folder = tuned(n=2)
    assert [path.name for path in plot_tuning(folder)] == ["tuning.png", "tuning.pdf", "tuning.svg", "tuning.csv"]
    assert all((folder / f"tuning.{suffix}").stat().st_size for suffix in ("png", "pdf", "svg", "csv"))
    paths = plot_tuning(folder / "tuned.json", tmp_path / "other.png", formats=["png"])
    assert paths == [tmp_path / "other.png", tmp_path / "other.csv"]


def test_the_commands_know_the_folder_of_a_tuning(tuned, capsys):
    folder = tuned(n=3)
    for given in (folder, folder / "tuned.json"):
        assert run_command(["plot", str(given), "--format", "svg"]) == 0
        told = capsys.readouterr()
        assert told.out.split() == [str(folder / "tuning.svg"), str(folder / "tuning.csv")]
        assert "from 3 documents" in told.err
        assert run_command(["show", str(given)]) == 0
        assert capsys.readouterr().out == describe_tuning(folder) + "\n"
    for given, message in {
        (): "needs the one folder that tune wrote",
        (folder, folder): "needs the one folder that tune wrote",
        (folder, "--selector", "infokv"): "--selector does not go with --figure tuning",
        (folder, "--x", "alpha"): "--x belongs to --figure parameters",
        (folder / "held-out",): "cannot be read",
    }.items():
        assert run_command(["plot", *map(str, given), "--figure", "tuning"]) == 2
        assert message in capsys.readouterr().err
    assert run_command(["show", str(folder / "held-out")]) == 0
    assert "12 measured" in capsys.readouterr().out
