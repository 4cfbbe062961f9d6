"""The figure of correlations and additivity, and the commands that show them."""

import numpy as np
import pandas
import pytest
from token_rows import HORIZON, PLACES, SETS, by_place, inf, random_run, words

from forward_influence.analysis import additivity_table, correlation_figure, correlation_table, plot_correlations
from forward_influence.analysis.additivity import set_table
from forward_influence.errors import UserError
from forward_influence.token_sets import MEASURED, RANDOM

pytestmark = pytest.mark.filterwarnings("error")


LONG = ("mixture:terms=value-norm*1", "mixture:terms=attention*0.5+entropy*0.25+self-information*0.25,alignment=next")


def test_the_points_are_those_of_the_tables(token_run):
    costs, scores = random_run()
    top = [(document, MEASURED, SETS[0]) for document in costs] + [(document, "one", SETS[-1]) for document in costs]
    runs = token_run(costs, scores, chosen=[("", RANDOM, places) for places in SETS[1:-1]] + top)
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
        np.testing.assert_allclose(np.stack(drawn[label].get_data(), axis=1), sets.loc[part, ["sum_kl", "set_kl"]])
    assert right.get_xscale() == right.get_yscale() == "log"
    looks = {(str(line.get_color()), line.get_marker()) for axes in (left, right) for line in axes.lines}
    assert len(looks) == 7  # near, far, two sizes, two kinds of choice, and what is grey


def test_the_caption_says_what_it_rests_on(token_run):
    caption = words(correlation_figure(token_run(*random_run())))
    for part in (
        *("tiny@1, float32; n = 4 to 5 documents, 6 tokens", "95% bootstrap interval"),
        *("not to be trusted from fewer than 10 documents", "Left: ", "Right: "),
    ):
        assert part in caption
    assert "not to be trusted" not in words(correlation_figure(token_run(*random_run(12), name="more")))


def test_without_sets_there_is_one_panel(token_run):
    costs, scores = random_run(2)
    alone = {name: {p: kl for p, kl in found.items() if len(p) == 1} for name, found in costs.items()}
    figure = correlation_figure(token_run(alone, scores))
    assert len(figure.axes) == 1
    assert not {"Left", "Right"} & set(words(figure).replace(":", "").split())


def test_what_cannot_be_drawn_is_named(token_run):
    costs, scores = random_run(2)
    costs["d0"][4, 7] = [inf] * HORIZON
    costs["d0"][11, 16] = [0.0] * HORIZON
    scores["flat"] = {name: by_place(dict.fromkeys(PLACES, 1.0)) for name in costs}
    figure = correlation_figure(token_run(costs, scores))
    assert "No point: nothing to rank by (flat)." in words(figure)
    assert "Not drawn: 2 sets of zero or infinite KL." in words(figure)
    figure = correlation_figure(token_run(costs, {"flat": scores["flat"]}, "flat"))
    assert "n = 0 documents" in words(figure)


@pytest.mark.parametrize("ends", [(2e-3, 4e-3), (1e-3, 1e-3), (1e-9, 1.0), (9e-4, 2e-2)])
def test_the_axes_of_sets_have_labels(token_run, ends):
    costs, scores = random_run(1)
    costs["d0"] = {p: [ends[0] if len(p) == 1 else ends[1]] * HORIZON for p in costs["d0"]}
    figure = correlation_figure(token_run(costs, scores))
    figure.canvas.draw()
    for axis in (figure.axes[1].xaxis, figure.axes[1].yaxis):
        low, high = axis.get_view_interval()
        assert sum(low <= tick <= high for tick in axis.get_majorticklocs()) >= 2


def test_no_text_overlaps_another(token_run):
    costs, scores = random_run(8)
    names = [*LONG, *(f"signal-{number}" for number in range(15))]
    figure = correlation_figure(token_run(costs, {name: scores["two"] for name in names}))
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


def test_plot_writes_pictures_and_tables(token_run, tmp_path):
    runs = token_run(*random_run())
    one, two = (plot_correlations(runs, tmp_path / name) for name in ("one", "two"))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]
    inside = plot_correlations(runs, formats=["png", "svg"])
    assert [path.name for path in inside] == [
        *("correlations.png", "correlations.svg", "correlations.csv", "correlations-additivity.csv")
    ]
    assert all(path.parent == tmp_path / "run" for path in inside)
    for path, table in zip(inside[2:], (correlation_table(runs), additivity_table(runs))):
        pandas.testing.assert_frame_equal(pandas.read_csv(path), table)


def test_signals_can_be_chosen(token_run, tmp_path):
    runs = token_run(*random_run())
    figure = correlation_figure(runs, ["two", "one"])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["two", "one"]
    _, table, _ = plot_correlations(runs, tmp_path / "x.svg", selectors=["two"], formats=["svg"])
    assert set(pandas.read_csv(table).signal) == {"two"}
    with pytest.raises(UserError, match=r"'tova' was not measured.*one, two"):
        correlation_figure(runs, ["tova"])


def test_plot_and_show_know_a_token_run(token_run, tmp_path, capsys, monkeypatch):
    from forward_influence.cli.plot import command as plot
    from forward_influence.cli.show import command as show

    token_run(*random_run())
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
