"""Rank correlations against plain loops and hand-made numbers."""

import math

import numpy as np
import pandas
import pytest
from token_rows import (
    BANDS,
    PLACES,
    by_place,
    inf,
    interval,
    mean_in,
    random_run,
    spearman,
    two_levels,
    words,
)

from forward_influence.analysis import additivity_table, correlation_figure, correlation_table, is_token_run, open_runs
from forward_influence.errors import UserError

pytestmark = pytest.mark.filterwarnings("error")


def test_the_correlations_equal_plain_loops(token_run):
    costs, scores = random_run()
    table = correlation_table(token_run(costs, scores), seed=11)
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


def test_the_bootstrap_can_be_chosen(token_run):
    runs = token_run(*random_run())
    for function in (correlation_table, additivity_table):
        pandas.testing.assert_frame_equal(function(runs), function(runs))
        wide = function(runs).high - function(runs).low
        narrow = function(runs, level=0.5, resamples=500, seed=2)
        several = function(runs).n_documents > 3
        assert ((narrow.high - narrow.low) < wide)[several].all() and several.any()


def test_shuffled_influence_destroys_a_planted_correlation(token_run):
    rng = np.random.default_rng(0)
    places = range(4, 36)
    worth = {f"d{n}": dict(zip(places, rng.lognormal(-6, 1, len(places)).tolist())) for n in range(4)}
    scores = {"knows": {name: by_place(found) for name, found in worth.items()}}
    scores["opposite"] = {name: by_place({p: -one for p, one in found.items()}) for name, found in worth.items()}
    costs = {name: {(p,): two_levels(one, one / 2) for p, one in found.items()} for name, found in worth.items()}
    table = correlation_table(token_run(costs, scores))
    assert list(table.signal.unique()) == ["knows", "opposite"]
    for signal, planted in (("knows", 1.0), ("opposite", -1.0)):
        line = table[table.signal == signal]
        assert np.allclose(line[["spearman", "low", "high"]], planted)
    shuffled = {
        name: dict(zip(found, [list(found.values())[i] for i in rng.permutation(len(found))]))
        for name, found in costs.items()
    }
    table = correlation_table(token_run(shuffled, scores, "shuffled"))
    assert (table.spearman.abs() < 0.4).all()


def test_near_and_far_are_told_apart_and_far_decides_the_order(token_run):
    names = ("a", "b")
    costs = {name: {(p,): two_levels(p / 1000, (40 - p) / 1e5) for p in PLACES} for name in names}
    scores = {signal: {name: by_place({p: sign * p for p in PLACES}) for name in names}
              for signal, sign in (("late", 1.0), ("early", -1.0), ("early too", -2.0))}  # fmt: skip
    table = correlation_table(token_run(costs, scores))
    assert list(table.signal[::3]) == ["early", "early too", "late"]
    late = table[table.signal == "late"].set_index("band").spearman
    assert late.to_dict() == pytest.approx({"all": 1.0, "near": 1.0, "far": -1.0})


def test_infinite_influence_ranks_highest(token_run):
    kl = {4: inf, 7: 0.3, 11: inf, 16: 0.1}
    score = {4: 9.0, 7: 2.0, 11: 8.0, 16: 1.0}
    (line,) = correlation_table(
        token_run({"a": {(p,): [one] * 128 for p, one in kl.items()}}, {"s": {"a": by_place(score)}})
    ).itertuples()
    # Ranks 3.5, 2, 3.5, 1 against 4, 2, 3, 1: deviations 1, -.5, 1, -1.5 and 1.5, -.5, .5, -1.5.
    assert line.spearman == pytest.approx((1.5 + 0.25 + 0.5 + 2.25) / math.sqrt(4.5 * 5))
    assert line.n_documents == 1
    assert math.isnan(line.low)
    assert math.isnan(line.high)


def test_positions_without_a_score_are_left_out(token_run):
    kl = {4: 0.1, 7: 0.2, 11: 0.3, 16: 0.4}
    scores = {"gap": by_place({4: 1.0, 7: None, 11: 3.0, 16: 2.0}), "torn": by_place(dict.fromkeys((4, 7)))}
    costs = {"a": {(p,): [one] * 128 for p, one in kl.items()}}
    table = correlation_table(token_run(costs, {name: {"a": one} for name, one in scores.items()}))
    gap, torn = table.itertuples()
    assert (gap.signal, gap.n_tokens, gap.n_documents) == ("gap", 3, 1)
    assert gap.spearman == pytest.approx(0.5)  # ranks 1, 3, 2 against 1, 2, 3
    assert (torn.signal, torn.n_documents) == ("torn", 0)
    assert math.isnan(torn.spearman)
    assert math.isnan(torn.n_tokens)


def test_constant_signals_and_constant_influence_do_not_count(token_run):
    costs = {name: {(p,): [p / 100] * 128 for p in PLACES} for name in ("a", "b")}
    costs["even"] = {(p,): [0.25] * 128 for p in PLACES}
    scores = {
        "flat": {name: by_place(dict.fromkeys(PLACES, 1.0)) for name in costs},
        "half": {name: by_place({p: (p if name == "a" else 1.0) for p in PLACES}) for name in costs},
        "full": {name: by_place({p: -p for p in PLACES}) for name in costs},
    }
    table = correlation_table(token_run(costs, scores)).set_index("signal")
    assert list(table.index) == ["half", "full", "flat"]
    assert table.n_documents.to_dict() == {"half": 1, "full": 2, "flat": 0}
    assert table.spearman.to_dict() == pytest.approx({"half": 1.0, "full": -1.0, "flat": math.nan}, nan_ok=True)
    assert math.isnan(table.low["half"])
    assert (table.low["full"], table.high["full"]) == pytest.approx((-1.0, -1.0))


def test_tokens_are_the_median_of_documents_and_two_are_too_few(token_run):
    counts = {"a": 6, "b": 4, "c": 3, "d": 2}
    costs = {name: {(p,): [p / 100] * 128 for p in PLACES[:count]} for name, count in counts.items()}
    scores = {"s": {name: by_place({p: p for p in PLACES}) for name in costs}}
    (line,) = correlation_table(token_run(costs, scores)).itertuples()
    assert (line.n_documents, line.n_tokens, line.spearman) == (3, 4, pytest.approx(1.0))


def test_scores_of_another_text_do_not_count(token_run, tmp_path):
    costs, scores = random_run(2)
    runs = token_run(costs, scores)
    path = tmp_path / "run" / "scores.jsonl"
    path.write_text(path.read_text().replace("sha-d0", "sha-of-another-text"))
    assert set(correlation_table(runs).n_documents) == {1}


def test_scores_of_another_length_are_refused(token_run):
    costs, scores = random_run(1)
    scores["one"]["d0"] = scores["one"]["d0"][:-1]
    with pytest.raises(UserError, match=r"has 39 scores of 'one' for document 'd0' and should have 40; delete"):
        correlation_table(token_run(costs, scores))


def test_shards_are_one_run(token_run, tmp_path):
    costs, scores = random_run()
    parts = [{"d0", "d1"}, {"d2", "d3", "d4"}]
    for number, part in enumerate(parts):
        some = {signal: {d: one for d, one in found.items() if d in part} for signal, found in scores.items()}
        token_run({d: one for d, one in costs.items() if d in part}, some, f"shards/{number}")
    shards, whole = open_runs(tmp_path / "shards"), token_run(costs, scores)
    assert is_token_run(shards)
    for function in (correlation_table, additivity_table):
        pandas.testing.assert_frame_equal(function(shards), function(whole))


def test_one_document_has_no_interval(token_run):
    runs = token_run(*random_run(1))
    for table in (correlation_table(runs), additivity_table(runs)):
        assert table[["low", "high"]].isna().all(axis=None)
        assert (table.n_documents == 1).all()
    assert "no interval from one document" in words(correlation_figure(runs))


def test_only_explicit_positions_with_scores_are_a_token_run(token_run, tmp_path):
    runs = token_run(*random_run(2))
    assert is_token_run(runs)
    (tmp_path / "run" / "scores.jsonl").unlink()
    assert not is_token_run(runs)
    assert not len(correlation_table(runs))
    assert len(additivity_table(runs))
    with pytest.raises(UserError, match="no scores of signals; measure single tokens with forward-influence influence"):
        correlation_figure(runs)
    mixed = token_run(*random_run(2), name="mixed")
    mixed.rows[0]["selector"] = "attention"
    assert not is_token_run(mixed)


def test_skipped_documents_do_not_matter(token_run):
    whole, more = (token_run(*random_run(2), name=name, skipped=skipped) for name, skipped in (("a", ()), ("b", ["x"])))
    assert is_token_run(more)
    pandas.testing.assert_frame_equal(correlation_table(whole), correlation_table(more))
