"""Whether influence adds up, against plain loops and hand-made numbers."""

import math
import re
from itertools import combinations

import numpy as np
import pytest
from token_rows import BANDS, PLACES, SETS, inf, interval, mean_in, random_run, spearman

from forward_influence.analysis import additivity_table, open_runs
from forward_influence.analysis.additivity import OTHER, set_table
from forward_influence.token_sets import MEASURED, RANDOM

pytestmark = pytest.mark.filterwarnings("error")


def ranked_first(values: dict[int, float], size: int) -> tuple[int, ...]:
    """By trying all sets: the one whose least value is the largest."""
    return max(combinations(sorted(values), size), key=lambda places: min(values[place] for place in places))


def with_all_choices(documents: int = 5):
    """A run in which what is ranked first was removed as well, and who chose each set."""
    costs, scores = random_run(documents)
    chosen = [("", RANDOM, places) for places in SETS]
    for number, (document, found) in enumerate(costs.items()):
        rankings = {MEASURED: {p: sum(found[p,]) for p in PLACES}}
        rankings |= {signal: {p: one[document][p] for p in PLACES} for signal, one in scores.items()}
        for size in (2, 3):
            for who, values in rankings.items():
                places = ranked_first(values, size)
                found[places] = ((1.5 + number / 10) * sum(np.array(found[p,]) for p in places)).tolist()
                chosen.append((document, who, places))
    return costs, scores, chosen


def test_additivity_equals_plain_loops(token_run):
    costs, scores, chosen = with_all_choices()
    table = additivity_table(token_run(costs, scores, chosen=chosen), seed=7)
    expected = [(size, name, band) for size in (2, 3) for name in (RANDOM, MEASURED, "one", "two") for band in BANDS]
    assert sorted(zip(table["size"], table.chosen_by, table.band)) == sorted(expected)
    for _, part in table.groupby("size"):
        assert list(part.chosen_by)[:3] == [RANDOM] * 3 and list(part.band) == list(BANDS) * 4
        assert part[part.band == "all"].set_kl.iloc[1:].is_monotonic_decreasing
    for line in table.itertuples():
        counted, means, correlations = 0, [], []
        for document, found in costs.items():
            sets = [
                places
                for where, who, places in chosen
                if where in (document, "") and who == line.chosen_by and len(places) == line.size
            ]
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


def test_additivity_by_hand(token_run):
    """Document a: sets of 0.2 and 0.4 where the sums are 0.3 and 0.7; b: one of 0.9 where it is 0.3."""
    level = {"a": {(4,): 0.1, (7,): 0.2, (11,): 0.3, (16,): 0.4, (4, 7): 0.2, (11, 16): 0.4, (4, 22): 5.0}}
    level["b"] = {(4,): 0.1, (7,): 0.2, (4, 7): 0.9, (11, 16): 5.0}
    costs = {d: {p: [one] * 128 for p, one in found.items()} for d, found in level.items()}
    chosen = [("", RANDOM, (4, 7)), ("", RANDOM, (11, 16)), ("a", "last", (11, 16)), ("b", "last", (4, 7))]
    runs = token_run(costs, {}, chosen=chosen)
    others, last = additivity_table(runs).itertuples()
    assert (others.chosen_by, others.size, others.band) == (RANDOM, 2, "all")
    assert (others.n_sets, others.n_documents) == (3, 2)  # (4, 22) and b's (11, 16) have members that nobody measured
    assert (others.set_kl, others.sum_kl) == pytest.approx((0.6, 0.4))  # of 0.3 and 0.9, of 0.5 and 0.3
    assert (others.ratio, others.low, others.high) == pytest.approx((1.5, 0.6, 3.0))
    assert math.isnan(others.spearman)  # no document has three sets
    assert (last.chosen_by, last.n_sets, last.n_documents) == ("last", 2, 2)  # dealt sets may be chosen as well
    assert (last.set_kl, last.sum_kl) == pytest.approx((0.65, 0.5))  # of 0.4 and 0.9, of 0.7 and 0.3


def test_random_sets_come_first_even_beside_infinities(token_run):
    costs = {d: {(p,): [1.0] * 128 for p in (4, 7, 11)} | {(4, 7): [1.0] * 128, (7, 11): [inf] * 128} for d in "ab"}
    chosen = [("", RANDOM, (4, 7)), ("a", "attention", (7, 11)), ("b", "attention", (7, 11))]
    assert list(additivity_table(token_run(costs, {}, chosen=chosen)).chosen_by) == [RANDOM, "attention"]


def test_what_nobody_chose_and_what_was_chosen_before_is_not_called_random(token_run):
    """After a larger sample, or an edit of a signal, its earlier choice lies there still."""
    costs = {"a": {(p,): [1.0] * 128 for p in (4, 7, 11)} | {(4, 7): [2.0] * 128, (7, 11): [3.0] * 128}}
    chosen = [("a", "attention", (4, 7)), ("a", "attention", (7, 11))]
    table = set_table(token_run(costs, {}, chosen=chosen)).set_index("chosen_by").positions
    assert table.to_dict() == {OTHER: (4, 7), "attention": (7, 11)}
    assert set(set_table(token_run(costs, {}, "unsaid", chosen=[])).chosen_by) == {OTHER}


def test_choices_among_fewer_positions_do_not_count(token_run, tmp_path):
    costs = {"a": {(p,): [1.0] * 128 for p in (4, 7, 11)} | {(4, 7): [2.0] * 128}}
    token_run(costs, {}, chosen=[("a", "attention", (4, 7))])
    path = tmp_path / "run" / "sets.jsonl"
    for among, who in ((3, "attention"), (2, OTHER)):
        path.write_text(re.sub(r'"among": \d', f'"among": {among}', path.read_text()))
        assert list(set_table(open_runs(tmp_path / "run")).chosen_by) == [who]


def test_choices_in_another_text_do_not_count(token_run, tmp_path):
    costs = {"a": {(4,): [1.0] * 128, (7,): [1.0] * 128, (4, 7): [2.0] * 128}}
    token_run(costs, {}, chosen=[("a", "attention", (4, 7))])
    path = tmp_path / "run" / "sets.jsonl"
    path.write_text(path.read_text().replace("sha-a", "sha-x"))
    assert list(set_table(open_runs(tmp_path / "run")).chosen_by) == [OTHER]


@pytest.mark.parametrize(
    ("level", "ratio"),
    [
        ({(4,): 1.0, (7,): 1.0, (4, 7): inf}, inf),
        ({(4,): inf, (7,): 1.0, (4, 7): 1.0}, 0.0),
        ({(4,): inf, (7,): 1.0, (4, 7): inf}, math.nan),
        ({(4,): 0.0, (7,): 0.0, (4, 7): 0.0}, math.nan),
    ],
)
def test_additivity_of_infinities_and_of_nothing(token_run, level, ratio):
    kl = {p: [one] * 128 for p, one in level.items()}
    other = {p: [one] * 128 for p, one in {(4,): 1.0, (7,): 1.0, (4, 7): 1.0}.items()}  # no choice: that is all
    costs = {"a": kl, "b": kl if math.isnan(ratio) else other}
    (line,) = additivity_table(token_run(costs, {})).itertuples()
    assert (line.ratio, line.low, line.high) == pytest.approx((ratio,) * 3, nan_ok=True)
