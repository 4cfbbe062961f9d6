"""Correlations and additivity against plain loops and hand-made numbers, and the figure that is drawn from them."""

import json
import math
import warnings
from itertools import combinations
from pkgutil import iter_modules

import numpy as np
import pandas
import pytest

from forward_influence import analysis
from forward_influence.analysis import (
    additivity_table,
    correlation_figure,
    correlation_table,
    is_token_run,
    open_runs,
    plot_correlations,
)
from forward_influence.analysis.additivity import MEASURED, RANDOM, set_table
from forward_influence.errors import UserError
from forward_influence.rows import ROW_FIELDS, RunSpec, row_key
from forward_influence.runs import RunFolder

PREFIX, HORIZON, CHUNK = 40, 160, 32
SPEC = RunSpec(
    model="tiny@1", dtype="float32", tokenizer="t", data="local", prefix=PREFIX, horizon=HORIZON, chunk=CHUNK
)
BANDS = {"all": (0, 160), "near": (0, 128), "far": (128, 160)}
inf = math.inf


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def make_row(document: str, places: tuple[int, ...], kl: list[float], status: str = "ok") -> dict:
    selector = "positions:at=" + "+".join(map(str, places))
    chunks = [kl[start : start + CHUNK] for start in range(0, len(kl), CHUNK)]
    row = dict.fromkeys(ROW_FIELDS) | {"key": row_key(SPEC.hash(), document, selector), "mode": "remove"}
    row |= {"document": document, "document_sha": f"sha-{document}", "selector": selector, "status": status}
    row |= {"n_tokens": 300, "n_removed": len(places), "removed_fraction": len(places) / PREFIX, "seconds": 0.5}
    if status != "ok":
        return row | {"reason": "too short", "n_removed": None, "removed_fraction": None}
    row |= {"removed": list(places), "kept_fraction": 1 - len(places) / PREFIX, "kl": kl}
    row |= {"chunk_start": list(range(0, len(kl), CHUNK)), "chunk_count": [len(c) for c in chunks]}
    row |= {"kl_mean": [sum(c) / len(c) for c in chunks], "delta_nll": [0.0] * len(chunks)}
    return row | {"nll_count": [len(c) for c in chunks], "top1_changed": [0.0] * len(chunks)}


def two_levels(near: float, far: float, length: int = HORIZON) -> list[float]:
    """KL that is constant in the near band and in the far one."""
    return [near] * 128 + [far] * (length - 128)


@pytest.fixture
def measured(tmp_path):
    """Function that writes a run: costs by document and set of positions, scores by signal and document."""

    def build(costs: dict, scores: dict, name: str = "run", skipped=()):
        rows = [make_row(document, places, kl) for document, found in costs.items() for places, kl in found.items()]
        rows += [make_row(document, (5,), [], "skipped") for document in skipped]
        with RunFolder.open(tmp_path / name, SPEC, {}) as folder:
            folder.append(rows)
        lines = [
            {"hash": SPEC.hash(), "document": document, "document_sha": f"sha-{document}"}
            | {"signal": signal, "scores": values}
            for signal, found in scores.items()
            for document, values in found.items()
        ]
        (tmp_path / name / "scores.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return open_runs(tmp_path / name)

    return build


def by_place(values: dict[int, float | None]) -> list:
    """Scores of all positions; -7 where a test gives none, which must not matter."""
    return [values.get(place, -7.0) for place in range(PREFIX)]


def ranks(values: list[float]) -> np.ndarray:
    """Average ranks, by counting."""
    return np.array([sum(b < a for b in values) + (sum(b == a for b in values) + 1) / 2 for a in values])


def spearman(one: list[float], two: list[float]) -> float:
    """The correlation of ranks, written out."""
    a, b = ranks(one), ranks(two)
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


def interval(values: np.ndarray, statistic, seed: int) -> tuple[float, float]:
    """Percentile bootstrap over the first axis, one resample at a time."""
    draws = np.random.default_rng(seed).integers(0, len(values), (4000, len(values)))
    found = [statistic(values[draw]) for draw in draws]
    return np.quantile(found, 0.025), np.quantile(found, 0.975)


PLACES = (4, 7, 11, 16, 22, 30)
SETS = ((4, 7), (11, 16), (22, 30), (4, 22), (7, 16, 30), (4, 11, 22), (11, 22, 30))


def random_run(documents: int = 5):
    rng = np.random.default_rng(3)
    costs, scores = {}, {"one": {}, "two": {}}
    for number in range(documents):
        name, length = f"d{number}", 150 if number == 4 else HORIZON
        costs[name] = {(p,): (rng.lognormal(-5, 1) * rng.lognormal(0, 1, length)).tolist() for p in PLACES}
        for places in SETS:
            costs[name][places] = (rng.uniform(0.5, 1) * sum(np.array(costs[name][p,]) for p in places)).tolist()
        for level, found in zip((1.0, 0.2), scores.values()):
            found[name] = by_place({p: level * math.log(sum(costs[name][p,])) + rng.normal(0, 0.5) for p in PLACES})
    return costs, scores


def mean_in(kl: list[float], band: str) -> float | None:
    start, stop = BANDS[band]
    if band != "all" and len(kl) < stop:
        return None
    return sum(kl[start:stop]) / len(kl[start:stop])


def test_the_correlations_equal_plain_loops(measured):
    costs, scores = random_run()
    table = correlation_table(measured(costs, scores), seed=11)
    assert list(zip(table.signal, table.band)) == [(s, b) for s in ("one", "two") for b in BANDS]
    for line in table.itertuples():
        found = []
        for document, of_places in costs.items():
            kl = [mean_in(of_places[place,], line.band) for place in PLACES]
            if None not in kl:
                found.append(spearman([scores[line.signal][document][place] for place in PLACES], kl))
        assert line.n_documents == len(found) == (4 if line.band == "far" else 5)
        assert line.n_tokens == len(PLACES)
        assert (line.band_start, line.band_stop) == BANDS[line.band]
        assert line.spearman == pytest.approx(np.mean(found), rel=1e-12)
        assert (line.low, line.high) == pytest.approx(interval(np.array(found), np.mean, 11), rel=1e-9)


def test_the_bootstrap_can_be_chosen(measured):
    runs = measured(*random_run())
    for function in (correlation_table, additivity_table):
        pandas.testing.assert_frame_equal(function(runs), function(runs))
        wide = function(runs).high - function(runs).low
        narrow = function(runs, level=0.5, resamples=500, seed=2)
        several = function(runs).n_documents > 3
        assert ((narrow.high - narrow.low) < wide)[several].all() and several.any()


def test_shuffled_influence_destroys_a_planted_correlation(measured):
    rng = np.random.default_rng(0)
    places = range(4, 36)
    worth = {f"d{n}": dict(zip(places, rng.lognormal(-6, 1, len(places)).tolist())) for n in range(4)}
    scores = {"knows": {name: by_place(found) for name, found in worth.items()}}
    scores["opposite"] = {name: by_place({p: -one for p, one in found.items()}) for name, found in worth.items()}
    costs = {name: {(p,): two_levels(one, one / 2) for p, one in found.items()} for name, found in worth.items()}
    table = correlation_table(measured(costs, scores))
    assert list(table.signal.unique()) == ["knows", "opposite"]
    for signal, planted in (("knows", 1.0), ("opposite", -1.0)):
        line = table[table.signal == signal]
        assert np.allclose(line[["spearman", "low", "high"]], planted)
    shuffled = {
        name: dict(zip(found, [list(found.values())[i] for i in rng.permutation(len(found))]))
        for name, found in costs.items()
    }
    table = correlation_table(measured(shuffled, scores, "shuffled"))
    assert (table.spearman.abs() < 0.4).all()


def test_near_and_far_are_told_apart_and_far_decides_the_order(measured):
    names = ("a", "b")
    costs = {name: {(p,): two_levels(p / 1000, (40 - p) / 1e5) for p in PLACES} for name in names}
    scores = {signal: {name: by_place({p: sign * p for p in PLACES}) for name in names}
              for signal, sign in (("late", 1.0), ("early", -1.0), ("early too", -2.0))}  # fmt: skip
    table = correlation_table(measured(costs, scores))
    assert list(table.signal[::3]) == ["early", "early too", "late"]
    late = table[table.signal == "late"].set_index("band").spearman
    assert late.to_dict() == pytest.approx({"all": 1.0, "near": 1.0, "far": -1.0})


def test_infinite_influence_ranks_highest(measured):
    kl = {4: inf, 7: 0.3, 11: inf, 16: 0.1}
    score = {4: 9.0, 7: 2.0, 11: 8.0, 16: 1.0}
    (line,) = correlation_table(
        measured({"a": {(p,): [one] * 128 for p, one in kl.items()}}, {"s": {"a": by_place(score)}})
    ).itertuples()
    # Ranks 3.5, 2, 3.5, 1 against 4, 2, 3, 1: deviations 1, -.5, 1, -1.5 and 1.5, -.5, .5, -1.5.
    assert line.spearman == pytest.approx((1.5 + 0.25 + 0.5 + 2.25) / math.sqrt(4.5 * 5))
    assert line.n_documents == 1
    assert math.isnan(line.low)
    assert math.isnan(line.high)


def test_positions_without_a_score_are_left_out(measured):
    kl = {4: 0.1, 7: 0.2, 11: 0.3, 16: 0.4}
    scores = {"gap": by_place({4: 1.0, 7: None, 11: 3.0, 16: 2.0}), "torn": by_place(dict.fromkeys((4, 7)))}
    costs = {"a": {(p,): [one] * 128 for p, one in kl.items()}}
    table = correlation_table(measured(costs, {name: {"a": one} for name, one in scores.items()}))
    gap, torn = table.itertuples()
    assert (gap.signal, gap.n_tokens, gap.n_documents) == ("gap", 3, 1)
    assert gap.spearman == pytest.approx(0.5)  # ranks 1, 3, 2 against 1, 2, 3
    assert (torn.signal, torn.n_documents) == ("torn", 0)
    assert math.isnan(torn.spearman)
    assert math.isnan(torn.n_tokens)


def test_constant_signals_and_constant_influence_do_not_count(measured):
    costs = {name: {(p,): [p / 100] * 128 for p in PLACES} for name in ("a", "b")}
    costs["even"] = {(p,): [0.25] * 128 for p in PLACES}
    scores = {
        "flat": {name: by_place(dict.fromkeys(PLACES, 1.0)) for name in costs},
        "half": {name: by_place({p: (p if name == "a" else 1.0) for p in PLACES}) for name in costs},
        "full": {name: by_place({p: -p for p in PLACES}) for name in costs},
    }
    table = correlation_table(measured(costs, scores)).set_index("signal")
    assert list(table.index) == ["half", "full", "flat"]
    assert table.n_documents.to_dict() == {"half": 1, "full": 2, "flat": 0}
    assert table.spearman.to_dict() == pytest.approx({"half": 1.0, "full": -1.0, "flat": math.nan}, nan_ok=True)
    assert math.isnan(table.low["half"])
    assert (table.low["full"], table.high["full"]) == pytest.approx((-1.0, -1.0))


def test_tokens_are_the_median_of_documents_and_two_are_too_few(measured):
    counts = {"a": 6, "b": 4, "c": 3, "d": 2}
    costs = {name: {(p,): [p / 100] * 128 for p in PLACES[:count]} for name, count in counts.items()}
    scores = {"s": {name: by_place({p: p for p in PLACES}) for name in costs}}
    (line,) = correlation_table(measured(costs, scores)).itertuples()
    assert (line.n_documents, line.n_tokens, line.spearman) == (3, 4, pytest.approx(1.0))


def test_scores_of_another_text_do_not_count(measured, tmp_path):
    costs, scores = random_run(2)
    runs = measured(costs, scores)
    path = tmp_path / "run" / "scores.jsonl"
    path.write_text(path.read_text().replace("sha-d0", "sha-of-another-text"))
    assert set(correlation_table(runs).n_documents) == {1}


def test_scores_of_another_length_are_refused(measured):
    costs, scores = random_run(1)
    scores["one"]["d0"] = scores["one"]["d0"][:-1]
    with pytest.raises(UserError, match=r"has 39 scores of 'one' for document 'd0' and should have 40; delete"):
        correlation_table(measured(costs, scores))


def test_shards_are_one_run(measured, tmp_path):
    costs, scores = random_run()
    parts = [{"d0", "d1"}, {"d2", "d3", "d4"}]
    for number, part in enumerate(parts):
        some = {signal: {d: one for d, one in found.items() if d in part} for signal, found in scores.items()}
        measured({d: one for d, one in costs.items() if d in part}, some, f"shards/{number}")
    shards, whole = open_runs(tmp_path / "shards"), measured(costs, scores)
    assert is_token_run(shards)
    for function in (correlation_table, additivity_table):
        pandas.testing.assert_frame_equal(function(shards), function(whole))


def ranked_first(values: dict[int, float], size: int) -> tuple[int, ...]:
    """By trying all sets: the one whose least value is the largest."""
    return max(combinations(sorted(values), size), key=lambda places: min(values[place] for place in places))


def choices(costs, scores, document: str, size: int) -> dict[str, list[tuple[int, ...]]]:
    """Sets of a document by who chose them, of those that were removed."""
    there = [places for places in costs[document] if len(places) == size]
    rankings = {MEASURED: {p: sum(costs[document][p,]) for p in PLACES}}
    rankings |= {signal: {p: found[document][p] for p in PLACES} for signal, found in scores.items()}
    out = {name: [one for one in there if one == ranked_first(values, size)] for name, values in rankings.items()}
    return out | {RANDOM: [one for one in there if all(one not in sets for sets in out.values())]}


def with_all_choices(documents: int = 5):
    """A run in which what is ranked first was removed as well."""
    costs, scores = random_run(documents)
    for number, (document, found) in enumerate(costs.items()):
        rankings = [
            {p: sum(found[p,]) for p in PLACES},
            *({p: one[document][p] for p in PLACES} for one in scores.values()),
        ]
        for size in (2, 3):
            for places in {ranked_first(values, size) for values in rankings}:
                found[places] = ((1.5 + number / 10) * sum(np.array(found[p,]) for p in places)).tolist()
    return costs, scores


def test_additivity_equals_plain_loops(measured):
    costs, scores = with_all_choices()
    table = additivity_table(measured(costs, scores), seed=7)
    expected = [(size, name, band) for size in (2, 3) for name in (RANDOM, MEASURED, "one", "two") for band in BANDS]
    assert sorted(zip(table["size"], table.chosen_by, table.band)) == sorted(expected)
    for _, part in table.groupby("size"):
        assert list(part.chosen_by)[:3] == [RANDOM] * 3 and list(part.band) == list(BANDS) * 4
        assert part[part.band == "all"].set_kl.iloc[1:].is_monotonic_decreasing
    for line in table.itertuples():
        counted, means, correlations = 0, [], []
        for document, found in costs.items():
            sets = choices(costs, scores, document, line.size)[line.chosen_by]
            assert len(sets) == 1 or line.chosen_by == RANDOM
            if mean_in(found[4,], line.band) is not None and sets:
                whole = [mean_in(found[one], line.band) for one in sets]
                parts = [sum(mean_in(found[p,], line.band) for p in one) for one in sets]
                means.append((sum(whole) / len(sets), sum(parts) / len(sets)))
                counted += len(sets)
                if len(sets) > 2:
                    correlations.append(spearman(whole, parts))
        means = np.array(means)
        assert line.n_documents == len(means)
        assert line.n_sets == counted
        assert (line.band_start, line.band_stop) == BANDS[line.band]
        assert (line.set_kl, line.sum_kl) == pytest.approx(means.mean(axis=0), rel=1e-12)
        assert line.ratio == pytest.approx(means[:, 0].sum() / means[:, 1].sum(), rel=1e-12)
        ratios = interval(means, lambda one: one[:, 0].sum() / one[:, 1].sum(), 7)
        assert (line.low, line.high) == pytest.approx(ratios, rel=0.02)  # the draws differ
        assert line.low <= line.ratio <= line.high
        expected = np.mean(correlations) if correlations else math.nan
        assert line.spearman == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_additivity_by_hand(measured):
    """Document a: sets of 0.2 and 0.4 where the sums are 0.3 and 0.7; b: one of 0.9 where it is 0.3."""
    level = {"a": {(4,): 0.1, (7,): 0.2, (11,): 0.3, (16,): 0.4, (4, 7): 0.2, (11, 16): 0.4, (4, 22): 5.0}}
    level["b"] = {(4,): 0.1, (7,): 0.2, (4, 7): 0.9, (11, 16): 5.0}
    costs = {d: {p: [one] * 128 for p, one in found.items()} for d, found in level.items()}
    scores = {"last": {"a": list(range(PREFIX)), "b": [0.0] * PREFIX}}  # one that says nothing in b
    last, measured_ones, others = (
        additivity_table(measured(costs, scores)).set_index("chosen_by").loc[["last", MEASURED, RANDOM]].itertuples()
    )
    assert (last.n_sets, last.n_documents, last.ratio) == (1, 1, pytest.approx(0.4 / 0.7))  # 11 and 16 of a
    assert (measured_ones.n_sets, measured_ones.ratio) == (1, pytest.approx(0.4 / 0.7))  # in b it is nobody's choice
    assert (others.size, others.band, others.n_sets, others.n_documents) == (2, "all", 2, 2)
    assert (others.set_kl, others.sum_kl) == pytest.approx((0.55, 0.3))  # of 0.2 and 0.9, of 0.3 and 0.3
    assert (others.ratio, others.low, others.high) == pytest.approx((0.55 / 0.3, 0.2 / 0.3, 3.0))
    assert math.isnan(others.spearman)  # no document has three sets
    assert len(set_table(measured(costs, {}, "unscored"))) == 3


@pytest.mark.parametrize(
    ("level", "ratio"),
    [
        ({(4,): 1.0, (7,): 1.0, (4, 7): inf}, inf),
        ({(4,): inf, (7,): 1.0, (4, 7): 1.0}, 0.0),
        ({(4,): inf, (7,): 1.0, (4, 7): inf}, math.nan),
        ({(4,): 0.0, (7,): 0.0, (4, 7): 0.0}, math.nan),
    ],
)
def test_additivity_of_infinities_and_of_nothing(measured, level, ratio):
    kl = {p: [one] * 128 for p, one in level.items()}
    other = {p: [one] * 128 for p, one in {(4,): 1.0, (7,): 1.0, (4, 7): 1.0}.items()}  # no choice: that is all
    costs = {"a": kl, "b": kl if math.isnan(ratio) else other}
    (line,) = additivity_table(measured(costs, {})).itertuples()
    assert (line.ratio, line.low, line.high) == pytest.approx((ratio,) * 3, nan_ok=True)


def test_one_document_has_no_interval(measured):
    runs = measured(*random_run(1))
    for table in (correlation_table(runs), additivity_table(runs)):
        assert table[["low", "high"]].isna().all(axis=None)
        assert (table.n_documents == 1).all()
    assert "no interval from one document" in words(correlation_figure(runs))


def test_only_explicit_positions_with_scores_are_a_token_run(measured, tmp_path):
    runs = measured(*random_run(2))
    assert is_token_run(runs)
    (tmp_path / "run" / "scores.jsonl").unlink()
    assert not is_token_run(runs)
    assert not len(correlation_table(runs))
    assert len(additivity_table(runs))
    with pytest.raises(UserError, match="no scores of signals; measure single tokens with forward-influence influence"):
        correlation_figure(runs)
    mixed = measured(*random_run(2), name="mixed")
    mixed.rows[0]["selector"] = "attention"
    assert not is_token_run(mixed)


def test_skipped_documents_do_not_matter(measured):
    whole, more = (measured(*random_run(2), name=name, skipped=skipped) for name, skipped in (("a", ()), ("b", ["x"])))
    assert is_token_run(more)
    pandas.testing.assert_frame_equal(correlation_table(whole), correlation_table(more))


def words(figure) -> str:
    return figure.get_supxlabel().replace("\n", " ")


def test_the_points_are_those_of_the_tables(measured):
    runs = measured(*with_all_choices())
    left, right = correlation_figure(runs).axes
    table = correlation_table(runs)
    assert [label.get_text() for label in left.get_yticklabels()] == ["one", "two"]
    lines = {line.get_label(): line for line in left.lines}
    for band, label in (("near", "near: offsets 0 to 127"), ("far", "far: offsets 128 to 159")):
        np.testing.assert_allclose(lines[label].get_xdata(), table[table.band == band].spearman)
        assert np.abs(lines[label].get_ydata() - left.get_yticks()).max() < np.diff(left.get_yticks()).min() / 4
    for bars, band in zip(left.collections, ("near", "far")):
        ends = np.array(bars.get_segments())[:, :, 0]
        np.testing.assert_allclose(ends, table[table.band == band][["low", "high"]])
    assert left.get_xlim()[0] <= 0 <= left.get_xlim()[1]
    sets = set_table(runs)
    sets = sets[sets.band == "all"]
    drawn = {line.get_label(): line for line in right.lines}
    parts = {f"sets of {size}, random": (sets["size"] == size) & (sets.chosen_by == RANDOM) for size in (2, 3)}
    parts["ranked highest, by influence"] = sets.chosen_by == MEASURED
    parts["ranked highest, by a signal"] = sets.chosen_by.isin(["one", "two"])
    for label, part in parts.items():
        points = {tuple(point) for point in np.stack(drawn[label].get_data(), axis=1)}
        whole = set(sets.loc[part, ["sum_kl", "set_kl"]].itertuples(index=False, name=None))
        assert points <= whole
        if label != "ranked highest, by a signal":  # those that influence chose as well have its mark
            assert points == whole
    assert right.get_xscale() == right.get_yscale() == "log"
    looks = {(str(line.get_color()), line.get_marker()) for axes in (left, right) for line in axes.lines}
    assert len(looks) == 7  # near, far, two sizes, two kinds of choice, and what is grey


def test_the_caption_says_what_it_rests_on(measured):
    caption = words(correlation_figure(measured(*random_run())))
    for part in (
        *("tiny@1, float32; n = 4 to 5 documents, 6 tokens", "95% bootstrap interval"),
        *("not to be trusted from fewer than 10 documents", "Left: ", "Right: "),
    ):
        assert part in caption
    assert "not to be trusted" not in words(correlation_figure(measured(*random_run(12), name="more")))


def test_without_sets_there_is_one_panel(measured):
    costs, scores = random_run(2)
    alone = {name: {p: kl for p, kl in found.items() if len(p) == 1} for name, found in costs.items()}
    figure = correlation_figure(measured(alone, scores))
    assert len(figure.axes) == 1
    assert not {"Left", "Right"} & set(words(figure).replace(":", "").split())


def test_what_cannot_be_drawn_is_named(measured):
    costs, scores = random_run(2)
    costs["d0"][4, 7] = [inf] * HORIZON
    costs["d0"][11, 16] = [0.0] * HORIZON
    scores["flat"] = {name: by_place(dict.fromkeys(PLACES, 1.0)) for name in costs}
    figure = correlation_figure(measured(costs, scores))
    assert "No point: nothing to rank by (flat)." in words(figure)
    assert "Not drawn: 2 sets of zero or infinite KL." in words(figure)
    figure = correlation_figure(measured(costs, {"flat": scores["flat"]}, "flat"))
    assert "n = 0 documents" in words(figure)


@pytest.mark.parametrize("ends", [(2e-3, 4e-3), (1e-3, 1e-3), (1e-9, 1.0), (9e-4, 2e-2)])
def test_the_axes_of_sets_have_labels(measured, ends):
    costs, scores = random_run(1)
    costs["d0"] = {p: [ends[0] if len(p) == 1 else ends[1]] * HORIZON for p in costs["d0"]}
    figure = correlation_figure(measured(costs, scores))
    figure.canvas.draw()
    for axis in (figure.axes[1].xaxis, figure.axes[1].yaxis):
        low, high = axis.get_view_interval()
        assert sum(low <= tick <= high for tick in axis.get_majorticklocs()) >= 2


LONG = ("mixture:terms=value-norm*1", "mixture:terms=attention*0.5+entropy*0.25+self-information*0.25,alignment=next")


def test_no_text_overlaps_another(measured):
    costs, scores = random_run(8)
    names = [*LONG, *(f"signal-{number}" for number in range(15))]
    figure = correlation_figure(measured(costs, {name: scores["two"] for name in names}))
    figure.canvas.draw()
    left, right = figure.axes
    labels = left.get_yticklabels()
    assert {label.get_text().replace("\n", "") for label in labels} == set(names)
    inner = [label.get_window_extent() for label in labels]
    outer = [axes.get_tightbbox() for axes in (left, right)]
    outer += [figure._suptitle.get_window_extent(), figure._supxlabel.get_window_extent()]
    for boxes in (inner, outer):
        for i, one in enumerate(boxes):
            assert one.x0 >= 0
            assert one.x1 <= figure.bbox.x1
            for other in boxes[i + 1 :]:
                width = min(one.x1, other.x1) - max(one.x0, other.x0)
                assert min(width, min(one.y1, other.y1) - max(one.y0, other.y0)) <= 1


def test_plot_writes_pictures_and_tables(measured, tmp_path):
    runs = measured(*random_run())
    one, two = (plot_correlations(runs, tmp_path / name) for name in ("one", "two"))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]
    inside = plot_correlations(runs, formats=["png", "svg"])
    assert [path.name for path in inside] == [
        *("correlations.png", "correlations.svg", "correlations.csv", "correlations-additivity.csv")
    ]
    assert all(path.parent == tmp_path / "run" for path in inside)
    for path, table in zip(inside[2:], (correlation_table(runs), additivity_table(runs))):
        pandas.testing.assert_frame_equal(pandas.read_csv(path), table)


def test_signals_can_be_chosen(measured, tmp_path):
    runs = measured(*random_run())
    figure = correlation_figure(runs, ["two", "one"])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["two", "one"]
    _, table, _ = plot_correlations(runs, tmp_path / "x.svg", selectors=["two"], formats=["svg"])
    assert set(pandas.read_csv(table).signal) == {"two"}
    with pytest.raises(UserError, match=r"'tova' was not measured.*one, two"):
        correlation_figure(runs, ["tova"])


def test_plot_and_show_know_a_token_run(measured, tmp_path, capsys, monkeypatch):
    from forward_influence.cli.plot import command as plot
    from forward_influence.cli.show import command as show

    measured(*random_run())
    monkeypatch.chdir(tmp_path)
    plot([tmp_path / "run"], None, format=["svg"])
    assert [line.rsplit("/", 1)[1] for line in capsys.readouterr().out.splitlines()] == [
        *("correlations.svg", "correlations.csv", "correlations-additivity.csv")
    ]
    show([tmp_path / "run"], False, None)
    out = capsys.readouterr().out
    assert "positions:at" not in out
    header, one, two = (line.split() for line in out.split("95% intervals\n")[1].splitlines()[:3])
    assert header == ["signal", "0-160", "0-128", "128-160", "n_documents", "n_tokens"]
    assert (one[0], two[0], one[-4:]) == ("one", "two", ["4", "to", "5", "6"])
    assert "Intervals from 5 documents are not to be trusted" in out
    (tmp_path / "run" / "scores.jsonl").unlink()
    show([tmp_path / "run"], False, None)
    assert "positions:at=4+7" in capsys.readouterr().out


def test_no_name_of_the_package_is_that_of_a_module():
    """The import of a module would put it in the place of what has its name."""
    assert not set(analysis.__all__) & {one.name for one in iter_modules(analysis.__path__)}
