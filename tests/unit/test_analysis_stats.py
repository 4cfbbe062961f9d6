"""Tables against plain loops, and intervals against what an interval promises."""

import math
import statistics
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forward_influence.analysis import band_table, crossover, curve_table, open_runs, summary_table
from forward_influence.analysis.intervals import mean_interval
from forward_influence.analysis.stats import quantiles, widening_edges
from forward_influence.errors import UserError
from forward_influence.horizon_bands import default_bands
from forward_influence.rows import ROW_FIELDS, RunSpec, row_key
from forward_influence.runs import RunFolder

SPEC = RunSpec(model="m", dtype="float32", tokenizer="t", data="local", prefix=100, horizon=22, chunk=4)
inf = math.inf


pytestmark = pytest.mark.filterwarnings("error")


def make_row(document: str, selector: str, kl: list[float]) -> dict:
    """A row whose delta NLL is half the KL, unknown at the last offset, and whose top-1 share is 1/4."""
    chunks = [kl[start : start + SPEC.chunk] for start in range(0, len(kl), SPEC.chunk)]
    known = [len(c) for c in chunks[:-1]] + [len(chunks[-1]) - 1]
    row = dict.fromkeys(ROW_FIELDS) | {"key": row_key(SPEC.hash(), document, selector), "mode": "remove"}
    row |= {"document_sha": f"sha-{document}", "n_tokens": 300, "removed_fraction": 0.01, "kept_fraction": 0.99}
    row |= {"document": document, "selector": selector, "status": "ok", "removed": [5], "n_removed": 1}
    row |= {"chunk_start": list(range(0, len(kl), SPEC.chunk)), "chunk_count": [len(c) for c in chunks]}
    row |= {"kl": kl, "kl_mean": [sum(c) / len(c) for c in chunks], "nll_count": known}
    row |= {"delta_nll": [sum(c[:n]) / n / 2 if n else None for c, n in zip(chunks, known)]}
    return row | {"top1_changed": [0.25] * len(chunks), "seconds": 0.5}


@pytest.fixture
def measured(tmp_path):
    """Function that turns {selector: {document: kl}} into a run."""

    def build(values: dict[str, dict[str, list[float]]]):
        rows = [make_row(d, s, list(map(float, kl))) for s, docs in values.items() for d, kl in docs.items()]
        with RunFolder.open(tmp_path, SPEC, {}) as folder:
            folder.append(rows)
        return open_runs(tmp_path)

    return build


def ragged(seed: int, lengths=(22, 22, 22, 21, 17, 13, 5)) -> dict[str, list[float]]:
    rng = np.random.default_rng(seed)
    return {f"d{i}": rng.lognormal(-5, 1.5, n).tolist() for i, n in enumerate(lengths)}


def naive_quantile(values, share) -> float:
    return min(v for v in values if sum(w <= v for w in values) >= share * len(values) - 1e-9)


def naive_bootstrap(values, draws) -> list[float]:
    return sorted(sum(values[i] for i in draw) / len(draw) for draw in draws)


def test_the_curve_table_equals_plain_loops(measured):
    values = {"attention": ragged(0), "entropy": {d: v for d, v in ragged(1).items() if d != "d2"}}
    table = curve_table(measured(values))
    assert len(table) == 12
    for line in table.itertuples():
        start = line.chunk_start
        pieces = [kl[start : start + 4] for kl in values[line.selector].values() if len(kl) > start]
        offsets = [v for piece in pieces for v in piece]
        means = [sum(piece) / len(piece) for piece in pieces]
        assert line.n_documents == len(pieces)
        assert line.n_offsets == len(offsets)
        assert line.chunk_stop == start + max(map(len, pieces))
        assert line.mean == pytest.approx(sum(means) / len(means), rel=1e-12)
        assert line.median == pytest.approx(statistics.median(means), rel=1e-12)
        for name, share in (("q90", 0.9), ("q95", 0.95), ("q99", 0.99)):
            assert getattr(line, name) == naive_quantile(offsets, share)
        assert line.max == max(offsets)
        assert line.low <= line.mean <= line.high
        assert line.top1_changed == 0.25
        known = [
            kl[start : min(start + 4, len(kl) - 1)] for kl in values[line.selector].values() if len(kl) - 1 > start
        ]
        assert line.n_documents_nll == len(known)
        assert line.delta_nll == pytest.approx(sum(sum(k) / len(k) / 2 for k in known) / len(known))


def test_common_keeps_the_documents_that_reach_the_end_and_stops_there(measured):
    table = curve_table(measured({"attention": ragged(0), "entropy": ragged(1)}), common=True)
    assert set(table.n_documents) == {4}  # 21 offsets are what at least half of the 7 documents reach
    assert table.chunk_start.max() == 20


def test_common_without_a_common_document_is_named(measured):
    runs = measured({"attention": {"a": [1.0] * 8}, "entropy": {"b": [1.0] * 8}})
    with pytest.raises(UserError, match="No document has all of attention, entropy"):
        curve_table(runs, common=True)


def test_merged_chunks_are_means_over_more_offsets(measured):
    values = {f"d{i}": np.random.default_rng(i).lognormal(-5, 1, 90).tolist() for i in range(3)}
    runs = measured({"entropy": values})
    table = curve_table(runs, widening=True)
    widths = table.chunk_stop - table.chunk_start
    assert widths.max() > 4
    assert table.n_offsets.sum() == 3 * 90
    assert table.chunk_start.tolist() == [0, *table.chunk_stop[:-1]]
    for line in table.itertuples():
        pieces = [kl[line.chunk_start : line.chunk_stop] for kl in values.values()]
        assert line.mean == pytest.approx(sum(sum(p) / len(p) for p in pieces) / 3, rel=1e-12)
        assert line.max == max(map(max, pieces))


@given(st.integers(1, 300), st.integers(1, 256))
def test_widening_edges_keep_the_ends_and_widen(chunks, width):
    edges = np.arange(chunks + 1) * width
    chosen = widening_edges(edges)
    assert chosen[0] == 0
    assert chosen[-1] == edges[-1]
    assert set(chosen) <= set(edges.tolist())
    for start, stop in pairwise(chosen[:-1]):
        assert stop - start == width or stop >= start * 2 ** (1 / 6) > stop - width


def test_infinities_stay_infinite_and_are_counted(measured):
    values = {"entropy": {"a": [0.1, inf] + [0.1] * 6, "b": [0.3] * 8, "c": [0.5] * 8}}
    first, second = curve_table(measured(values)).itertuples()
    assert (first.mean, first.low, first.high, first.max, first.q99) == (inf, inf, inf, inf, inf)
    assert (first.median, first.n_infinite) == (0.5, 1)
    assert second.n_infinite == 0
    assert second.high <= 0.5


def test_one_document_has_no_interval(measured):
    runs = measured({"attention": {"a": [0.1] * 8}, "entropy": {"a": [0.3] * 8}})
    assert curve_table(runs)[["low", "high"]].isna().all(axis=None)
    assert band_table(runs)[["low", "high"]].isna().all(axis=None)
    found = crossover(runs, "attention", "entropy")
    assert (found.above, found.offset, found.n_documents) == ("entropy", 0, 1)
    assert math.isnan(found.low)
    assert math.isnan(found.support)


def test_documents_that_agree_give_an_interval_of_their_value(measured):
    table = curve_table(measured({"none": {d: [0.0] * 8 for d in "abc"}}))
    assert (table[["mean", "low", "high", "q99", "max"]] == 0).all(axis=None)


def test_the_interval_is_the_percentile_interval_of_a_bootstrap_by_hand():
    values = np.random.default_rng(3).lognormal(0, 1, (12, 1))
    draws = np.random.default_rng(7).integers(0, 12, (2000, 12))
    means = naive_bootstrap(values[:, 0].tolist(), draws.tolist())
    (low,), (high,) = mean_interval(values, "percentile", resamples=2000, seed=7)
    assert low == pytest.approx(np.quantile(means, 0.025), rel=1e-12)
    assert high == pytest.approx(np.quantile(means, 0.975), rel=1e-12)


def test_a_column_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(0)
    values = rng.lognormal(0, 1, (9, 4))
    values[:3, 1] = np.nan
    values[1, 2] = inf
    together = np.array(mean_interval(values, "percentile", resamples=500))
    alone = np.hstack([mean_interval(values[:, [c]], "percentile", resamples=500) for c in range(4)])
    np.testing.assert_allclose(together, alone, rtol=1e-12)
    assert np.isinf(together[:, 2]).all()
    without = mean_interval(values[3:, [1]], "percentile", resamples=500)
    np.testing.assert_allclose(together[:, [1]], without, rtol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=12), st.sampled_from(["BCa", "percentile"]))
def test_an_interval_lies_within_the_values_and_is_never_nan(values, method):
    (low,), (high,) = mean_interval(np.array(values)[:, None], method, resamples=200)
    slack = 1e-9 * max(values)
    assert min(values) - slack <= low <= high <= max(values) + slack


def test_the_interval_covers_about_as_often_as_documented():
    """Log-normal means, sigma 1.5, 24 documents: BCa near 85 percent, well above the percentile's 79."""
    values = np.random.default_rng(5).lognormal(0, 1.5, (24, 600))
    covers = {}
    for method in ("BCa", "percentile"):
        low, high = mean_interval(values, method, resamples=1000)
        covers[method] = np.mean((low <= np.exp(1.125)) & (np.exp(1.125) <= high))
    assert 0.80 <= covers["BCa"] <= 0.95
    assert covers["BCa"] > covers["percentile"]


@given(st.lists(st.one_of(st.floats(0, 10), st.just(inf)), min_size=1, max_size=40))
def test_quantiles_are_the_naive_ones(values):
    found = quantiles(np.array(values), (0.5, 0.9, 0.95, 0.99))
    for name, share in (("q50", 0.5), ("q90", 0.9), ("q95", 0.95), ("q99", 0.99)):
        assert found[name] == naive_quantile(values, share)


@pytest.mark.parametrize(
    ("horizon", "expected"),
    [
        (14000, [(0, 128), (128, 1024), (1024, 4096), (4096, 14000)]),
        (4096, [(0, 128), (128, 1024), (1024, 4096)]),
        (200, [(0, 128), (128, 200)]),
        (144, [(0, 128), (128, 144)]),
        (143, [(0, 143)]),
        (1100, [(0, 128), (128, 1100)]),
        (1136, [(0, 128), (128, 1024), (1024, 1136)]),
        (5, [(0, 5)]),
    ],
)
def test_default_bands_end_at_the_horizon(horizon, expected):
    assert default_bands(horizon) == expected


def test_the_band_table_equals_plain_loops_over_pairs(measured):
    values = {"a": ragged(0), "b": {d: v for d, v in ragged(1).items() if d != "d1"}, "c": ragged(2)}
    table = band_table(measured(values), [(0, 6), (3, 21), (21, 40)], seed=11)
    assert [(line.a, line.b) for line in table.itertuples()] == [
        *[("a", "b")] * 3,
        *[("a", "c")] * 3,
        *[("b", "c")] * 3,
    ]
    for line in table.itertuples():
        start, stop = line.band_start, line.band_stop
        shared = [d for d in values["a"] if d in values[line.a] and d in values[line.b]]
        whole = [d for d in shared if len(values["a"][d]) >= stop]
        pairs = [[sum(values[name][d][start:stop]) / (stop - start) for d in whole] for name in (line.a, line.b)]
        assert line.n_documents == len(whole)
        if not whole:
            assert math.isnan(line.difference)
            continue
        differences = [x - y for x, y in zip(*pairs)]
        assert line.mean_a == pytest.approx(sum(pairs[0]) / len(whole))
        assert line.mean_b == pytest.approx(sum(pairs[1]) / len(whole))
        assert line.difference == pytest.approx(sum(differences) / len(whole))
        draws = np.random.default_rng(11).integers(0, len(whole), (4000, len(whole))).tolist()
        means = naive_bootstrap(differences, draws)
        assert line.low == pytest.approx(np.quantile(means, 0.025), rel=1e-9)
        assert line.high == pytest.approx(np.quantile(means, 0.975), rel=1e-9)


def test_pairing_removes_what_the_documents_share(measured):
    """The documents differ a thousandfold, the selectors by a tenth: only pairs show it."""
    scale = {f"d{i}": 10 ** (i / 4) for i in range(12)}
    runs = measured({"a": {d: [1.1 * x] * 8 for d, x in scale.items()}, "b": {d: [x] * 8 for d, x in scale.items()}})
    (line,) = band_table(runs).itertuples()
    assert line.low > 0
    first, *_, last = curve_table(runs).itertuples()
    assert first.low < last.high
    assert last.low < first.high


def test_infinite_differences_are_infinite_undefined_ones_are_counted(measured):
    low = {"x": [0.1] * 4, "y": [0.2] * 4, "z": [0.3] * 4}
    high = low | {"x": [inf] * 4}
    table = band_table(measured({"a": high, "b": low, "c": high}), [(0, 4)]).set_index(["a", "b"])
    assert table.loc[("a", "b"), "difference"] == inf
    assert table.loc[("b", "c"), "low"] == -inf
    assert math.isnan(table.loc[("a", "c"), "difference"])
    assert math.isnan(table.loc[("a", "c"), "low"])
    assert (table.n_infinite == 1).all()


def test_an_empty_band_is_named(measured):
    runs = measured({"a": {"d": [0.1] * 4}})
    assert band_table(runs).empty
    for band in ((4, 4), (-1, 3), (5, 2)):
        with pytest.raises(UserError, match="Band"):
            band_table(runs, [band])


def falling(onset: int, seed: int) -> tuple[dict, dict]:
    """Two selectors that cross at an offset, in twelve documents of different scale."""
    rng = np.random.default_rng(seed)
    scales = rng.lognormal(0, 1, 12)
    a = {f"d{i}": [s * (3.0 if o < onset else 1.0) for o in range(20)] for i, s in enumerate(scales)}
    b = {f"d{i}": [s * 2.0 for _ in range(20)] for i, s in enumerate(scales)}
    return a, b


def test_the_crossover_is_found_from_both_sides(measured):
    a, b = falling(8, 0)
    runs = measured({"a": a, "b": b})
    for pair in (("a", "b"), ("b", "a")):
        found = crossover(runs, *pair)
        assert (found.above, found.below, found.offset) == ("b", "a", 8)
        assert (found.low, found.high, found.support) == (8.0, 8.0, 1.0)
        assert (found.n_documents, found.horizon) == (12, 20)


def test_the_crossover_needs_to_hold_to_the_end(measured):
    a = {d: [1, 1, 1, 1, 3, 3, 3, 3, 1, 1, 1, 1, 3, 3, 3, 3] for d in "xyz"}
    b = {d: [2.0] * 16 for d in "xyz"}
    runs = measured({"a": a, "b": b, "same": b})
    assert crossover(runs, "a", "b").offset == 12
    assert crossover(runs, "b", "same") is None
    with pytest.raises(UserError, match=r"'c' was not measured.*a, b, same"):
        crossover(runs, "a", "c")


def test_the_crossover_says_how_unsure_it_is(measured):
    """One document carries the far field, as happens: without it the other selector ends above."""
    a = {f"d{i}": [2.0] * 16 for i in range(8)}
    b = {d: [1.0] * 16 for d in a} | {"d0": [1.0] * 8 + [20.0] * 8}
    found = crossover(measured({"a": a, "b": b}), "a", "b")
    assert (found.above, found.offset) == ("b", 8)
    assert found.support == pytest.approx(1 - (7 / 8) ** 8, abs=0.03)


def test_the_crossover_counts_only_documents_that_reach_the_end(measured):
    a, b = falling(8, 0)
    b["d0"] = [1000.0] * 8  # would put b above from the start
    found = crossover(measured({"a": a, "b": b}), "a", "b")
    assert (found.offset, found.n_documents) == (8, 11)


def test_the_summary_equals_plain_loops(measured):
    rng = np.random.default_rng(9)
    docs = {f"d{i}": rng.lognormal(-5, 1, n).tolist() for i, n in enumerate((300, 300, 260, 40))}
    (line,) = summary_table(measured({"entropy": docs})).itertuples()
    offsets = [v for kl in docs.values() for v in kl]
    assert line.kl_mean == pytest.approx(sum(sum(v) / len(v) for v in docs.values()) / 4)
    assert (line.near_stop, line.far_start, line.far_stop) == (128, 128, 300)
    ends = [kl for kl in docs.values() if len(kl) >= 300]
    assert line.n_documents_far == len(ends) == 2
    assert line.kl_near == pytest.approx(sum(sum(kl[:128]) / 128 for kl in ends) / 2)
    assert line.kl_far == pytest.approx(sum(sum(kl[128:300]) / 172 for kl in ends) / 2)
    for name, share in (("q50", 0.5), ("q90", 0.9), ("q95", 0.95), ("q99", 0.99)):
        assert getattr(line, name) == naive_quantile(offsets, share)
    assert line.max == max(offsets)
    assert line.delta_nll == pytest.approx(sum(sum(v[:-1]) / (len(v) - 1) / 2 for v in docs.values()) / 4)
    assert (line.n_documents, line.n_offsets, line.n_removed) == (4, 900, 1)
    assert line.top1_changed == 0.25


def test_tables_of_a_run_without_measured_rows_say_so(measured):
    runs = measured({})
    for table in (curve_table, band_table, summary_table):
        with pytest.raises(UserError, match="no measured row yet"):
            table(runs)
