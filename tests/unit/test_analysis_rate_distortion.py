"""Rates against plain loops over the rows, and the figure that is drawn from them."""

import itertools
import math
import warnings

import numpy as np
import pandas
import pytest

from forward_influence.analysis import (
    open_runs,
    plot_ranking,
    plot_rates,
    ranking_figure,
    rate_differences,
    rate_figure,
    rate_table,
)
from forward_influence.analysis.rate_distortion import split_selector
from forward_influence.errors import UserError
from forward_influence.rows import ROW_FIELDS, RunSpec, row_key
from forward_influence.runs import RunFolder

CHUNK, HORIZON = 32, 200
FIXED = {"model": "tiny@1", "dtype": "float32", "tokenizer": "t", "data": "local", "prefix": 100}
SPEC = RunSpec(**FIXED, horizon=HORIZON, chunk=CHUNK, fraction="1", sinks=0, recent=0, mode="keep")
inf = math.inf

METHODS = {"snapkv": 0.02, "infokv:alpha=0.8": 0.01, "random": 0.2}
SELECTORS = {
    **{f"{name}@{keep}": (level / keep, keep) for name, level in METHODS.items() for keep in (0.4, 0.2)},
    "snapkv@0.4,pyramid": (0.04, 0.41),
    "snapkv@10 tokens": (0.3, 0.1),
}


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def make_row(document: str, selector: str, kept: float, kl: list[float], seed: int, spec: RunSpec) -> dict:
    """A row with a random delta NLL and top-1 share in each chunk; the token after the last offset is not known."""
    rng = np.random.default_rng(seed)
    chunks = [kl[start : start + spec.chunk] for start in range(0, len(kl), spec.chunk)]
    counts = [len(c) for c in chunks]
    row = dict.fromkeys(ROW_FIELDS) | {"key": row_key(spec.hash(), document, selector), "mode": spec.mode}
    row |= {"document": document, "document_sha": f"sha-{document}", "selector": selector, "status": "ok"}
    row |= {"n_tokens": 300, "n_removed": 60, "removed_fraction": 1 - kept, "kept_fraction": kept}
    row |= {"kept_counts": [round(100 * kept)] * 2, "chunk_start": list(range(0, len(kl), spec.chunk))}
    row |= {"chunk_count": counts, "kl": kl, "kl_mean": [sum(c) / len(c) for c in chunks]}
    row |= {"delta_nll": rng.normal(0.1, 1, len(chunks)).tolist(), "nll_count": [*counts[:-1], counts[-1] - 1]}
    if spec.mode == "remove":
        row |= {"removed": [5], "n_removed": 1, "kept_counts": None}
    return row | {"top1_changed": rng.uniform(0, 1, len(chunks)).tolist(), "seconds": 0.5}


@pytest.fixture
def measured(tmp_path):
    """Function that measures methods in documents of given lengths."""

    def build(selectors=SELECTORS, lengths=(200, 200, 200, 200, 150), missing=(), change=None, spec=SPEC):
        seeds = itertools.count()
        rows = []
        for number, length in enumerate(lengths):
            scale = np.random.default_rng(number).lognormal(0, 1)
            for selector, (level, kept) in selectors.items():
                seed = next(seeds)
                kl = (scale * level * np.random.default_rng(seed).lognormal(0, 1, length)).tolist()
                if (f"d{number}", selector) not in missing:
                    rows.append(make_row(f"d{number}", selector, kept, kl, seed, spec))
        if change is not None:
            change(rows)
        with RunFolder.open(tmp_path / "run", spec, {}) as folder:
            folder.append(rows)
        return open_runs(tmp_path / "run")

    return build


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


def test_the_rates_equal_plain_loops(measured):
    runs = measured(missing={("d1", "random@0.2")})
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


def test_the_differences_equal_plain_loops_over_pairs(measured):
    runs = measured(missing={("d1", "random@0.2")})
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


def test_pairing_removes_what_the_documents_share(measured):
    """The documents differ a thousandfold, the methods by a tenth: only pairs show it."""

    def change(rows):
        for row in rows:
            level = 10.0 ** int(row["document"][1:]) * (1.1 if row["selector"] == "a@0.4" else 1.0)
            row |= {"kl": [level] * len(row["kl"]), "kl_mean": [level] * len(row["kl_mean"])}

    runs = measured({"a@0.4": (1, 0.4), "b@0.4": (1, 0.4)}, change=change)
    assert (rate_differences(runs).kl_low > 0).all()
    table = rate_table(runs).set_index(["method", "band"])
    assert table.kl_low["a", "all"] < table.kl_high["b", "all"]


def test_a_short_horizon_is_one_band_and_one_document_has_no_interval(measured):
    table = rate_table(measured(lengths=(100,)))
    assert set(table.band) == {"all"}
    assert set(table.band_stop) == {100}
    assert table.filter(regex="_(low|high)$").isna().all(axis=None)
    assert table[["kl", "delta_nll", "top1_changed"]].notna().all(axis=None)


def test_a_band_in_which_no_chunk_begins_has_its_kl_alone(measured):
    spec = RunSpec(**{**SPEC.to_dict(), "chunk": 256})
    table = rate_table(measured({"a@0.4": (1, 0.4)}, lengths=(200, 200), spec=spec)).set_index("band")
    assert math.isnan(table.delta_nll["far"]) and math.isnan(table.top1_changed["far"])
    assert table.kl["far"] > 0 and table.n_documents["far"] == 2
    assert not math.isnan(table.delta_nll["near"])


def test_infinite_kl_stays_infinite_and_is_counted(measured):
    def change(rows):
        for row in rows:
            if row["document"] == "d0" and row["selector"] != "b@0.4":
                row["kl"][150] = row["kl_mean"][4] = inf

    runs = measured({name: (1, 0.4) for name in ("a@0.4", "b@0.4", "c@0.4")}, change=change)
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


def test_runs_that_remove_tokens_have_no_rates(measured):
    runs = measured({"entropy": (1, 0.99)}, spec=RunSpec(**FIXED, horizon=HORIZON, chunk=CHUNK))
    for make in (rate_table, rate_differences, rate_figure):
        with pytest.raises(UserError, match=r"removes tokens.*forward-influence fidelity"):
            make(runs)


def test_a_pair_has_one_direction_at_all_budgets(measured):
    table = rate_differences(measured({"a@0.4": (1, 0.4), "b@0.4": (1, 0.4), "b@0.2": (1, 0.2), "a@0.2": (1, 0.2)}))
    assert set(zip(table.a, table.b)) == {("a", "b")}


def test_an_equal_budget_needs_two_methods(measured):
    table = rate_differences(measured({"a@0.4": (1, 0.4), "b@0.2": (1, 0.2)}))
    assert len(table) == 0
    assert {"a", "b", "asked", "kl", "kl_low", "delta_nll_high"} <= set(table.columns)


def legend(figure) -> list[str]:
    (box,) = figure.legends
    return [text.get_text().replace("\n", " ") for text in box.get_texts()]


def test_the_figure_shows_the_table_near_and_far(measured):
    runs = measured()
    table = rate_table(runs)
    figure = rate_figure(runs)
    names = ["snapkv", "infokv:alpha=0.8", "random", "snapkv (pyramid)"]
    assert legend(figure) == names
    near, far = figure.axes
    assert "0 to 127" in near.get_title(loc="left") and "128 to 199" in far.get_title(loc="left")
    for axes, band in ((near, "near"), (far, "far")):
        assert axes.get_yscale() == "log"
        lines = list(axes.lines)
        for name, line in zip(names, lines, strict=True):
            expected = table[(table.method == name) & (table.band == band)].sort_values("budget")
            np.testing.assert_allclose(line.get_xdata(), expected.budget)
            np.testing.assert_allclose(line.get_ydata(), expected.kl)
        looks = {(str(line.get_color()), line.get_marker(), str(line._dash_pattern)) for line in lines}
        assert len(looks) == len({line.get_marker() for line in lines}) == 4
    caption = figure.get_supxlabel().replace("\n", " ")
    for part in ("tiny@1", "float32", "n = 4 to 5 documents", "95% bootstrap"):
        assert part in caption
    assert "nats" in near.get_ylabel()


def zero(rows):
    for row in rows:
        row |= {"kl": [0.0] * len(row["kl"]), "kl_mean": [0.0] * len(row["kl_mean"])}


def infinite(rows):
    rows[0]["kl"][0] = rows[0]["kl_mean"][0] = inf


@pytest.mark.parametrize(
    ("options", "panels", "words"),
    [
        ({"lengths": (100, 100)}, 1, "n = 2 documents"),
        ({"lengths": (200,)}, 2, "n = 1 document; no interval"),
        ({"selectors": {"a@0.4": (1, 0.4)}}, 2, "n = 4 to 5"),
        ({"selectors": {"full-cache@1": (1, 1.0)}, "change": zero}, 2, "n = 4 to 5"),
        ({"change": infinite}, 2, "Gaps: infinite mean (snapkv)"),
        ({"selectors": {f"method-with-a-long-name:parameter={i}@{k}": (i + 1, k) for i in range(9)
                        for k in (0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02)}, "lengths": (200, 200)}, 2, "n = 2"),
    ],
)  # fmt: skip
def test_every_run_can_be_drawn_and_no_text_overlaps(measured, options, panels, words):
    figure = rate_figure(measured(**options))
    assert len(figure.axes) == panels
    assert words in figure.get_supxlabel().replace("\n", " ")
    figure.canvas.draw()
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    boxes += [figure.legends[0].get_window_extent(), figure._supxlabel.get_window_extent()]
    for one, other in itertools.combinations(boxes, 2):
        width = min(one.x1, other.x1) - max(one.x0, other.x0)
        height = min(one.y1, other.y1) - max(one.y0, other.y0)
        assert min(width, height) <= 1
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)
    for axes in figure.axes:
        labels = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
        assert labels
        assert all(one.x1 < other.x0 for one, other in itertools.pairwise(labels))


def test_plot_writes_pictures_and_tables(measured, tmp_path):
    runs = measured()
    paths = plot_rates(runs)
    assert [path.name for path in paths] == [
        *("fidelity.png", "fidelity.pdf", "fidelity.svg"), *("fidelity.csv", "fidelity-differences.csv")
    ]  # fmt: skip
    assert all(path.parent == tmp_path / "run" for path in paths)
    read = [pandas.read_csv(path, dtype={"asked": str}) for path in paths[3:]]
    pandas.testing.assert_frame_equal(read[0], rate_table(runs))
    pandas.testing.assert_frame_equal(read[1], rate_differences(runs))
    again = plot_rates(runs, tmp_path / "again")
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in again]
    few = plot_rates(runs, tmp_path / "few.svg", selectors=["random", "snapkv"], formats=["svg"])
    assert [path.name for path in few] == ["few.svg", "few.csv", "few-differences.csv"]
    assert set(pandas.read_csv(few[1]).method) == {"random", "snapkv"}
    assert legend(rate_figure(runs, ["random", "snapkv"])) == ["random", "snapkv"]
    with pytest.raises(UserError, match=r"'tova' was not measured.*snapkv, infokv"):
        rate_figure(runs, ["tova"])


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


def words(figure) -> str:
    return figure.get_supxlabel().replace("\n", " ")


def test_the_ranking_has_the_points_of_the_table_the_least_first(measured):
    runs = measured()
    table = rate_table(runs)
    figure = ranking_figure(runs)
    budgets = list(dict.fromkeys(table.asked))
    assert [axes.get_xlabel() for axes in figure.axes] == [f"mean KL (nats), budget {asked}" for asked in budgets]
    names = [label.get_text().replace("\n", "") for label in figure.axes[0].get_yticklabels()]
    whole = table[table.band == "all"]
    usual = {asked: np.log(part.kl).mean() for asked, part in whole.groupby("asked")}
    typical = {
        name: np.mean([np.log(line.kl) - usual[line.asked] for line in part.itertuples()])
        for name, part in whole.groupby("method")
    }
    assert names == sorted(typical, key=typical.get)
    for axes, asked in zip(figure.axes, budgets):
        assert axes.get_xscale() == "log"
        for line, bars, band in zip(axes.lines, axes.collections, ("near", "far")):
            found = table[(table.asked == asked) & (table.band == band)].set_index("method").reindex(names)
            np.testing.assert_allclose(line.get_xdata(), found.kl)
            ends = np.array([segment[:, 0] for segment in bars.get_segments() if len(segment)])
            np.testing.assert_allclose(ends, found[["kl_low", "kl_high"]].dropna())
    assert "n = 4 to 5 documents" in words(figure) and "not to be trusted from fewer than 10" in words(figure)


def test_the_ranking_draws_whom_one_asks_for_and_names_gaps(measured, tmp_path):
    def change(rows):
        for row in rows:
            if row["selector"].startswith("random@"):
                row["kl"] = [inf] * len(row["kl"])
                row["kl_mean"] = [inf] * len(row["kl_mean"])

    runs = measured(change=change)
    figure = ranking_figure(runs, ["random", "snapkv"])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["snapkv", "random"]
    assert "No point: zero or infinite mean (random)." in words(figure)
    paths = plot_ranking(runs, tmp_path / "x.svg", selectors=["random", "snapkv"], formats=["svg"])
    assert [path.name for path in paths] == ["x.svg", "x.csv", "x-differences.csv"]
    assert set(pandas.read_csv(paths[1]).method) == {"random", "snapkv"}
    with pytest.raises(UserError, match="'tova' was not measured"):
        ranking_figure(runs, ["tova"])


LONG = "mixture:terms=attention*0.8+observed-attention*0.1+entropy*0.1,temperature=2.0,window=32,kernel=5,sinks={}"


@pytest.mark.parametrize("draw", [rate_figure, ranking_figure])
@pytest.mark.parametrize("count", [2, 24])
def test_names_of_many_methods_have_room(measured, draw, count):
    names = [LONG.format(number) if number % 4 == 0 else f"method-{number}" for number in range(count)]
    figure = draw(measured({f"{name}@{keep}": (0.1, keep) for name in names for keep in (0.4, 0.2)}))
    figure.canvas.draw()
    texts = [text for legend in figure.legends for text in legend.get_texts()] or figure.axes[0].get_yticklabels()
    assert sorted(text.get_text().replace("\n", "") for text in texts) == sorted(names)
    assert all(line.endswith((",", "+", ":")) for text in texts for line in text.get_text().split("\n")[:-1])
    boxes = [text.get_window_extent() for text in texts]
    boxes += [figure._suptitle.get_window_extent(), figure._supxlabel.get_window_extent()]
    for index, one in enumerate(boxes):
        assert one.x0 >= 0 and one.y0 >= 0 and one.x1 <= figure.bbox.x1 and one.y1 <= figure.bbox.y1
        for other in boxes[index + 1 :]:
            width = min(one.x1, other.x1) - max(one.x0, other.x0)
            assert min(width, min(one.y1, other.y1) - max(one.y0, other.y0)) <= 1
    shaded = any(one.get_paths() for axes in figure.axes for one in axes.collections)
    assert shaded == (count == 2 or draw is ranking_figure)
    if not shaded:
        assert "intervals: in the table." in words(figure)
