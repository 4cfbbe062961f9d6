"""The figures of rates: curves, and methods below each other."""

import itertools
from itertools import pairwise

import numpy as np
import pandas
import pytest
from rate_rows import inf, words

from forward_influence.analysis import (
    plot_ranking,
    plot_rates,
    ranking_figure,
    rate_differences,
    rate_figure,
    rate_table,
)
from forward_influence.errors import UserError

pytestmark = pytest.mark.filterwarnings("error")


def legend(figure) -> list[str]:
    (box,) = figure.legends
    return [text.get_text().replace("\n", " ") for text in box.get_texts()]


def test_the_figure_shows_the_table_near_and_far(rate_run):
    runs = rate_run()
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
def test_every_run_can_be_drawn_and_no_text_overlaps(rate_run, options, panels, words):
    figure = rate_figure(rate_run(**options))
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


def test_plot_writes_pictures_and_tables(rate_run, tmp_path):
    runs = rate_run()
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


def test_the_ranking_has_the_points_of_the_table_the_least_first(rate_run):
    runs = rate_run()
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


def test_the_ranking_draws_whom_one_asks_for_and_names_gaps(rate_run, tmp_path):
    def change(rows):
        for row in rows:
            if row["selector"].startswith("random@"):
                row["kl"] = [inf] * len(row["kl"])
                row["kl_mean"] = [inf] * len(row["kl_mean"])

    runs = rate_run(change=change)
    figure = ranking_figure(runs, ["random", "snapkv"])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["snapkv", "random"]
    assert "No point: zero or infinite mean (random)." in words(figure)
    paths = plot_ranking(runs, tmp_path / "x.svg", selectors=["random", "snapkv"], formats=["svg"])
    assert [path.name for path in paths] == ["x.svg", "x.csv", "x-differences.csv"]
    assert set(pandas.read_csv(paths[1]).method) == {"random", "snapkv"}
    with pytest.raises(UserError, match="'tova' was not measured"):
        ranking_figure(runs, ["tova"])


def nothing_lost(rows):
    for row in rows:
        row |= {"kl": [0.0] * len(row["kl"]), "kl_mean": [0.0] * len(row["kl_mean"])}


def test_a_budget_at_which_nothing_is_lost_does_not_shuffle_the_ranking(rate_run):
    selectors = {"b@0.5": (0.2, 0.5), "b@1": (0.1, 1), "a@0.5": (0.1, 0.5), "a@1": (0.1, 1), "c@0.5": (0.4, 0.5)}
    runs = rate_run(selectors, change=lambda rows: nothing_lost(row for row in rows if row["selector"].endswith("@1")))
    figure = ranking_figure(runs)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["a", "b", "c"]
    assert "No point: zero or infinite mean (" in words(figure)


def test_a_ranking_of_nothing_but_zeros_can_be_drawn(rate_run):
    figure = ranking_figure(rate_run({"full@0.5": (0.1, 0.5)}, change=nothing_lost))
    figure.canvas.draw()
    assert "No point: zero or infinite mean (full)." in words(figure)


@pytest.mark.parametrize("levels", [(0.031, 0.052), (0.02, 0.9), (1e-7, 0.5)])
def test_the_axes_of_a_ranking_have_numbers_that_do_not_touch(rate_run, levels):
    selectors = {f"m{place}@{keep}": (one, keep) for place, one in enumerate(levels) for keep in (0.4, 0.2)}
    figure = ranking_figure(rate_run(selectors))
    figure.canvas.draw()
    for axes in figure.axes:
        low, high = axes.get_xlim()
        labels = [one for one in axes.get_xticklabels(which="both") if low <= one.get_position()[0] <= high]
        boxes = sorted((one.get_window_extent() for one in labels if one.get_text()), key=lambda box: box.x0)
        assert len(boxes) >= 2
        assert all(one.x1 < other.x0 for one, other in pairwise(boxes))


LONG = "mixture:terms=attention*0.8+observed-attention*0.1+entropy*0.1,temperature=2.0,window=32,kernel=5,sinks={}"


@pytest.mark.parametrize("draw", [rate_figure, ranking_figure])
@pytest.mark.parametrize("count", [2, 24])
def test_names_of_many_methods_have_room(rate_run, draw, count):
    names = [LONG.format(number) if number % 4 == 0 else f"method-{number}" for number in range(count)]
    figure = draw(rate_run({f"{name}@{keep}": (0.1, keep) for name in names for keep in (0.4, 0.2)}))
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
