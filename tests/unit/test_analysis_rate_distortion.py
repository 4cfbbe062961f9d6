"""Rates and their differences against plain loops over the rows."""

import itertools
import math

import numpy as np
import pandas
import pytest
from rate_rows import CHUNK, FIXED, HORIZON, METHODS, SELECTORS, SPEC, inf

from forward_influence.analysis import (
    rate_differences,
    rate_figure,
    rate_table,
)
from forward_influence.analysis.rate_distortion import split_selector
from forward_influence.errors import UserError
from forward_influence.rows import RunSpec

pytestmark = pytest.mark.filterwarnings("error")


def naive(row: dict, band: str) -> dict[str, float] | None:
    """What a row says about a band: KL from its offsets, the rest from the chunks that begin in the band."""
    start, stop = {"all": (0, len(row["kl"])), "near": (0, 128), "far": (128, 200)}[band]
    if len(row["kl"]) < stop:
        return None
    chosen = [i for i, first in enumerate(row["chunk_start"]) if start <= first < stop]
    known = [i for i in chosen if row["nll_count"][i]]
    offsets = sum(row["chunk_count"][i] for i in chosen)
    tokens = sum(row["nll_count"][i] for i in known)
    return {
        "kl": sum(row["kl"][start:stop]) / (stop - start),
        "delta_nll": sum(row["delta_nll"][i] * row["nll_count"][i] for i in known) / tokens,
        "top1_changed": sum(row["top1_changed"][i] * row["chunk_count"][i] for i in chosen) / offsets,
    }


def percentile(values: list[float], seed: int) -> tuple[float, float]:
    draws = np.random.default_rng(seed).integers(0, len(values), (4000, len(values)))
    means = [sum(values[i] for i in draw) / len(draw) for draw in draws.tolist()]
    return np.quantile(means, 0.025), np.quantile(means, 0.975)


@pytest.mark.parametrize(
    ("selector", "parts"),
    [
        ("snapkv@0.4", ("snapkv", "0.4")),
        ("infokv:alpha=0.8@512 tokens", ("infokv:alpha=0.8", "512 tokens")),
        ("infokv:alpha=0.8@512 tokens,pyramid", ("infokv:alpha=0.8 (pyramid)", "512 tokens")),
        ("tuned:dir@home.json,k=2@0.05,entropy", ("tuned:dir@home.json,k=2 (entropy)", "0.05")),
    ],
)
def test_a_name_is_split_at_the_last_at_sign(selector, parts):
    assert split_selector(selector) == parts


def test_the_rates_equal_plain_loops(rate_run):
    runs = rate_run(missing={("d1", "random@0.2")})
    table = rate_table(runs, seed=11)
    assert list(zip(table.method, table.asked, table.band)) == [
        (*split_selector(name), band) for name in SELECTORS for band in ("all", "near", "far")
    ]
    names = {split_selector(name): name for name in SELECTORS}
    for line in table.itertuples():
        name = names[line.method, line.asked]
        found = [naive(row, line.band) for row in runs.rows if row["selector"] == name]
        found = [one for one in found if one is not None]
        missing = name == "random@0.2"
        assert line.n_documents == len(found) == (4 if line.band == "far" else 5) - missing
        assert line.budget == pytest.approx(SELECTORS[name][1])
        assert (line.band_start, line.band_stop) == {"all": (0, 200), "near": (0, 128), "far": (128, 200)}[line.band]
        for metric in ("kl", "delta_nll", "top1_changed"):
            values = [one[metric] for one in found]
            assert getattr(line, metric) == pytest.approx(sum(values) / len(values), rel=1e-9), metric
            low, high = getattr(line, f"{metric}_low"), getattr(line, f"{metric}_high")
            assert min(values) - 1e-9 <= low < getattr(line, metric) < high <= max(values) + 1e-9
        low, high = percentile([one["delta_nll"] for one in found], 11)
        assert (line.delta_nll_low, line.delta_nll_high) == pytest.approx((low, high), rel=1e-9)


def test_the_differences_equal_plain_loops_over_pairs(rate_run):
    runs = rate_run(missing={("d1", "random@0.2")})
    table = rate_differences(runs, seed=5)
    rows = {(row["selector"], row["document"]): row for row in runs.rows}
    pairs = {
        "0.4": list(itertools.combinations([*METHODS, "snapkv (pyramid)"], 2)),
        "0.2": list(itertools.combinations(METHODS, 2)),
    }
    assert list(zip(table.asked, table.a, table.b, table.band)) == [
        (asked, a, b, band) for asked, all_of in pairs.items() for a, b in all_of for band in ("all", "near", "far")
    ]
    names = {split_selector(name): name for name in SELECTORS}
    for line in table.itertuples():
        one, two = names[line.a, line.asked], names[line.b, line.asked]
        assert (line.budget_a, line.budget_b) == pytest.approx((SELECTORS[one][1], SELECTORS[two][1]))
        shared = [d for d in (f"d{i}" for i in range(5)) if (one, d) in rows and (two, d) in rows]
        found = [(naive(rows[one, d], line.band), naive(rows[two, d], line.band)) for d in shared]
        found = [pair for pair in found if None not in pair]
        assert line.n_documents == len(found)
        for metric in ("kl", "delta_nll", "top1_changed"):
            values = [a[metric] - b[metric] for a, b in found]
            assert getattr(line, metric) == pytest.approx(sum(values) / len(values), rel=1e-9, abs=1e-12)
            bounds = getattr(line, f"{metric}_low"), getattr(line, f"{metric}_high")
            assert bounds == pytest.approx(percentile(values, 5), rel=1e-9, abs=1e-12)


def test_pairing_removes_what_the_documents_share(rate_run):
    """The documents differ a thousandfold, the methods by a tenth: only pairs show it."""

    def change(rows):
        for row in rows:
            level = 10.0 ** int(row["document"][1:]) * (1.1 if row["selector"] == "a@0.4" else 1.0)
            row |= {"kl": [level] * len(row["kl"]), "kl_mean": [level] * len(row["kl_mean"])}

    runs = rate_run({"a@0.4": (1, 0.4), "b@0.4": (1, 0.4)}, change=change)
    assert (rate_differences(runs).kl_low > 0).all()
    table = rate_table(runs).set_index(["method", "band"])
    assert table.kl_low["a", "all"] < table.kl_high["b", "all"]


def test_a_short_horizon_is_one_band_and_one_document_has_no_interval(rate_run):
    table = rate_table(rate_run(lengths=(100,)))
    assert set(table.band) == {"all"}
    assert set(table.band_stop) == {100}
    assert table.filter(regex="_(low|high)$").isna().all(axis=None)
    assert table[["kl", "delta_nll", "top1_changed"]].notna().all(axis=None)


def test_a_band_in_which_no_chunk_begins_has_its_kl_alone(rate_run):
    spec = RunSpec(**{**SPEC.to_dict(), "chunk": 256})
    table = rate_table(rate_run({"a@0.4": (1, 0.4)}, lengths=(200, 200), spec=spec)).set_index("band")
    assert math.isnan(table.delta_nll["far"]) and math.isnan(table.top1_changed["far"])
    assert table.kl["far"] > 0 and table.n_documents["far"] == 2
    assert not math.isnan(table.delta_nll["near"])


def test_infinite_kl_stays_infinite_and_is_counted(rate_run):
    def change(rows):
        for row in rows:
            if row["document"] == "d0" and row["selector"] != "b@0.4":
                row["kl"][150] = row["kl_mean"][4] = inf

    runs = rate_run({name: (1, 0.4) for name in ("a@0.4", "b@0.4", "c@0.4")}, change=change)
    table = rate_table(runs).set_index(["method", "band"])
    assert table.kl["a", "all"] == table.kl["a", "far"] == table.kl_high["a", "far"] == inf
    assert math.isfinite(table.kl["a", "near"])
    assert table.n_infinite["a", "far"] == 1 and table.n_infinite["b", "far"] == 0
    pairs = rate_differences(runs).set_index(["a", "b", "band"])
    assert pairs.kl["a", "b", "far"] == inf
    assert pairs.kl["b", "c", "far"] == pairs.kl_low["b", "c", "far"] == -inf
    undefined = pairs.loc[("a", "c", "far"), ["kl", "kl_low", "kl_high"]]
    assert undefined.isna().all()
    assert math.isfinite(pairs.delta_nll["a", "c", "far"])


def test_runs_that_remove_tokens_have_no_rates(rate_run):
    runs = rate_run({"entropy": (1, 0.99)}, spec=RunSpec(**FIXED, horizon=HORIZON, chunk=CHUNK))
    for make in (rate_table, rate_differences, rate_figure):
        with pytest.raises(UserError, match=r"removes tokens.*forward-influence fidelity"):
            make(runs)


def test_a_pair_has_one_direction_at_all_budgets(rate_run):
    table = rate_differences(rate_run({"a@0.4": (1, 0.4), "b@0.4": (1, 0.4), "b@0.2": (1, 0.2), "a@0.2": (1, 0.2)}))
    assert set(zip(table.a, table.b)) == {("a", "b")}


def test_an_equal_budget_needs_two_methods(rate_run):
    table = rate_differences(rate_run({"a@0.4": (1, 0.4), "b@0.2": (1, 0.2)}))
    assert len(table) == 0
    assert {"a", "b", "asked", "kl", "kl_low", "delta_nll_high"} <= set(table.columns)


def test_it_is_said_where_a_method_beats_the_measured_influence():
    from forward_influence.cli.rates import reference_beaten

    reference = "influence:influence-all.json@1234"
    lines = pandas.DataFrame(
        [
            {"asked": "0.4", "a": reference, "b": "snapkv", "kl_low": 0.01, "kl_high": 0.02},
            {"asked": "0.2", "a": "infokv", "b": reference, "kl_low": -0.02, "kl_high": -0.01},
            {"asked": "0.4", "a": reference, "b": "random", "kl_low": -0.5, "kl_high": -0.4},
            {"asked": "0.4", "a": reference, "b": "tova", "kl_low": -0.1, "kl_high": 0.4},
            {"asked": "0.4", "a": "snapkv", "b": "tova", "kl_low": 0.1, "kl_high": 0.4},
        ]
    ).assign(band_start=0, band_stop=128)
    found = reference_beaten(lines)
    assert [sentence.partition(" loses")[0] for sentence in found] == [
        "At 0.4, offsets 0-128, snapkv", "At 0.2, offsets 0-128, infokv",
    ]  # fmt: skip
    assert all("not a bound" in sentence for sentence in found)
