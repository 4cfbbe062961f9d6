"""Figure 2: what it must show, and that it survives every run that can be measured."""

import math
import os
import re
import subprocess
import sys

import matplotlib
import numpy as np
import pandas
import pytest

from forward_influence.analysis import curve_table, figure2, open_runs, plot_runs, save_figure
from forward_influence.errors import UserError
from forward_influence.rows import ROW_FIELDS, RunSpec, row_key
from forward_influence.runs import RunFolder

SPEC = RunSpec(model="tiny@1", dtype="float32", tokenizer="t", data="local", prefix=200, horizon=64, chunk=4)


def make_row(document: str, selector: str, kl: np.ndarray) -> dict:
    starts = list(range(0, len(kl), SPEC.chunk))
    chunks = [kl[start : start + SPEC.chunk] for start in starts]
    row = dict.fromkeys(ROW_FIELDS) | {"key": row_key(SPEC.hash(), document, selector), "mode": "remove"}
    row |= {"document_sha": f"sha-{document}", "n_tokens": 300, "removed_fraction": 0.01, "kept_fraction": 0.99}
    row |= {"document": document, "selector": selector, "status": "ok", "removed": [5, 6], "n_removed": 2}
    row |= {"chunk_start": starts, "chunk_count": [len(c) for c in chunks], "kl": kl.tolist()}
    row |= {"kl_mean": [float(c.mean()) for c in chunks], "delta_nll": [0.0] * len(chunks)}
    return row | {"nll_count": [len(c) for c in chunks], "top1_changed": [0.0] * len(chunks), "seconds": 0.5}


@pytest.fixture
def measured(tmp_path):
    """Function that measures selectors of given levels in documents of given lengths."""

    def build(levels: dict[str, float], lengths=(64, 64, 64), spike: float | None = None):
        rng = np.random.default_rng(0)
        rows = []
        for number, length in enumerate(lengths):
            for selector, level in levels.items():
                kl = level * rng.lognormal(0, 1, length)
                if spike is not None and number == 0:
                    kl[5] = spike
                rows.append(make_row(f"d{number}", selector, kl))
        path = tmp_path / ("run" if not (tmp_path / "run").exists() else f"run-{len(list(tmp_path.iterdir()))}")
        with RunFolder.open(path, SPEC, {}) as folder:
            folder.append(rows)
        return open_runs(path)

    return build


LEVELS = {"attention": 1e-3, "entropy": 2e-3, "random": 1e-4, "none": 0.0, "recompute": 1e-5}


def legend(figure) -> list[str]:
    (box,) = figure.legends
    assert all(axes.get_legend() is None for axes in figure.axes)
    return [text.get_text().replace("\n", " ") for text in box.get_texts()]


def curves(figure) -> list:
    """Lines of the selectors; the floor's is grey."""
    return [line for line in figure.axes[0].lines if line.get_color() != "0.45"]


def test_the_figure_names_everything_once(measured):
    runs = measured(LEVELS)
    figure = figure2(runs)
    (axes,) = figure.axes
    names = legend(figure)
    assert names[:3] == ["attention", "entropy", "random"]
    assert re.fullmatch(r"numerical floor \(recompute\): up to \de-05 nats", names[3])
    assert names[4] == "none: 0 at every offset"
    assert len(names) == 5
    assert axes.get_yscale() == axes.get_xscale() == "log"
    assert "nats" in axes.get_ylabel()
    assert "tokens" in axes.get_xlabel()
    assert "2 of 200 prefix tokens (1%)" in axes.get_title(loc="left")
    caption = figure.get_supxlabel()
    for part in ("tiny@1", "float32", "n = 3 documents", "95% bootstrap"):
        assert part in caption.replace("\n", " ")


def test_the_curves_are_those_of_the_table(measured):
    runs = measured(LEVELS)
    table = curve_table(runs, widening=True)
    for name, line in zip(("attention", "entropy", "random"), curves(figure2(runs))):
        expected = table[table.selector == name]
        np.testing.assert_allclose(line.get_ydata(), expected["mean"])
        np.testing.assert_allclose(line.get_xdata(), (expected.chunk_start + expected.chunk_stop - 1) / 2)


def test_curves_differ_in_colour_dash_and_marker(measured):
    figure = figure2(measured({f"s{i}": 10.0**-i for i in range(8)}))
    styles = [(line.get_color(), line.get_marker()) for line in curves(figure)]
    assert len({str(colour) for colour, _ in styles}) == len({marker for _, marker in styles}) == 8
    looks = {(line.get_marker(), str(line._dash_pattern)) for line in curves(figure)}
    assert len(looks) == 8


def test_selectors_choose_and_order(measured):
    runs = measured(LEVELS)
    assert legend(figure2(runs, ["random", "attention"])) == ["random", "attention"]
    with pytest.raises(UserError, match=r"'tova' was not measured.*attention, entropy"):
        figure2(runs, ["tova"])


def test_a_floor_among_the_curves_is_drawn_one_far_below_is_named(measured):
    near = figure2(measured({"entropy": 1e-3, "recompute": 1e-4}))
    assert "below" not in legend(near)[1]
    assert near.axes[0].get_ylim()[0] < 1e-4
    assert len(near.axes[0].lines) == 2


def test_a_floor_far_below_does_not_squeeze_the_curves(measured):
    far = figure2(measured({"entropy": 1e-3, "recompute": 1e-12}))
    assert "below this axis" in legend(far)[1]
    assert far.axes[0].get_ylim()[0] > 1e-5
    assert len(far.axes[0].lines) == 1


def test_documents_that_end_early_are_counted_below_the_curves(measured):
    figure = figure2(measured(LEVELS, lengths=(64, 64, 50, 30)))
    assert "n = 4 to 2 documents" in figure.get_supxlabel().replace("\n", " ")
    assert len(figure.axes) == 2
    assert figure.axes[1].get_ylim() == (0, 4)


def test_common_documents_need_no_count_below(measured):
    figure = figure2(measured(LEVELS, lengths=(64, 64, 50, 30)), common=True)
    assert "n = 2 documents" in figure.get_supxlabel().replace("\n", " ")
    assert len(figure.axes) == 1


@pytest.mark.parametrize(
    ("levels", "lengths", "spike", "words"),
    [
        ({"none": 0.0, "recompute": 0.0}, (64, 64), None, "n = 2 documents"),
        ({"none": 0.0}, (64,), None, "n = 1 document."),
        ({"entropy": 1e-3}, (3,), None, "no interval"),
        ({"entropy": 0.0}, (64, 64), None, "n = 2"),
        ({"entropy": 1e-3, "random": 1e-4}, (64, 64), math.inf, "Gaps: infinite mean (entropy, random)"),
        ({"entropy": 1e-3, "recompute": 1.0}, (64, 64), None, "n = 2"),
    ],
)
def test_every_run_can_be_drawn(measured, tmp_path, levels, lengths, spike, words):
    runs = measured(levels, lengths, spike)
    assert words in figure2(runs).get_supxlabel().replace("\n", " ")
    for path in plot_runs(runs, tmp_path / "out", formats=["svg"]):
        assert path.stat().st_size > 100


def test_plot_writes_pictures_and_tables(measured, tmp_path):
    runs = measured(LEVELS)
    inside = plot_runs(runs)
    assert [path.name for path in inside] == [
        *("figure2.png", "figure2.pdf", "figure2.svg"),
        *("figure2.csv", "figure2-chunks.csv"),
    ]
    assert all(path.parent == tmp_path / "run" for path in inside)
    drawn, chunks = (pandas.read_csv(path) for path in inside[3:])
    pandas.testing.assert_frame_equal(drawn, curve_table(runs, widening=True))
    pandas.testing.assert_frame_equal(chunks, curve_table(runs))
    starts = [path.read_bytes()[:5] for path in inside[:3]]
    assert starts == [b"\x89PNG\r", b"%PDF-", b"<?xml"]
    for target in ("deep/er/fig", "deep/er/fig.svg"):
        paths = plot_runs(runs, tmp_path / target, selectors=["entropy"], formats=["svg"])
        assert [path.name for path in paths] == ["fig.svg", "fig.csv", "fig-chunks.csv"]
        assert set(pandas.read_csv(paths[1]).selector) == {"entropy"}


def test_the_same_run_gives_the_same_bytes(measured, tmp_path):
    runs = measured(LEVELS)
    one, two = (plot_runs(runs, tmp_path / name) for name in ("one", "two"))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_what_cannot_be_written_is_named(measured, tmp_path):
    figure = figure2(measured(LEVELS))
    with pytest.raises(UserError, match="'bogus' is unknown"):
        save_figure(figure, tmp_path / "x", ["bogus"])
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="Cannot write"):
        save_figure(figure, tmp_path / "file" / "x")


def test_no_text_overlaps_another(measured):
    figure = figure2(measured(LEVELS, lengths=(64, 64, 50)))
    figure.canvas.draw()
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    boxes += [figure.legends[0].get_window_extent(), figure._supxlabel.get_window_extent()]
    for i, one in enumerate(boxes):
        assert one.x0 >= 0
        assert one.x1 <= figure.bbox.x1
        for other in boxes[i + 1 :]:
            width = min(one.x1, other.x1) - max(one.x0, other.x0)
            height = min(one.y1, other.y1) - max(one.y0, other.y0)
            assert min(width, height) <= 1


def test_few_chunks_have_a_tick_and_a_marker_each(measured):
    figure = figure2(measured(LEVELS, lengths=(16, 16)))
    axes = figure.axes[0]
    assert list(axes.get_xticks()) == [1.5, 5.5, 9.5, 13.5]
    assert {tuple(line.get_markevery()) for line in curves(figure)} == {(0, 1, 2, 3)}
    assert "per chunk of 4 offsets, drawn at its middle" in figure.get_supxlabel().replace("\n", " ")
    many = figure2(measured(LEVELS, lengths=(64, 64)))
    assert set(np.log2(many.axes[0].get_xticks()) % 1) == {0}


def test_a_legend_line_shows_two_dashes(measured):
    figure = figure2(measured({f"s{i}": 10.0**-i for i in range(6)}))
    box = figure.legends[0]
    length = box.handlelength * box.prop.get_size_in_points()
    for line in curves(figure):
        _, dashes = line._dash_pattern
        assert dashes is None or sum(dashes) <= length


def test_a_band_is_on_the_axis_down_to_a_decade_below_the_curves(measured, monkeypatch):
    for share, bottom in ((0.3, 0.3 / 1.3), (1e-6, 0.1)):

        def table(runs, share=share, **options):
            out = curve_table(runs, **options)
            return out.assign(low=out["mean"] * share)

        monkeypatch.setattr("forward_influence.analysis.figures.curve_table", table)
        figure = figure2(measured({"entropy": 1e-3}))
        lowest = min(curves(figure)[0].get_ydata())
        assert figure.axes[0].get_ylim()[0] == pytest.approx(lowest * bottom)


@pytest.mark.parametrize(("documents", "doubtful"), [(2, True), (9, True), (10, False)])
def test_the_caption_doubts_intervals_from_few_documents(measured, documents, doubtful):
    caption = figure2(measured(LEVELS, lengths=(8,) * documents)).get_supxlabel().replace("\n", " ")
    assert ("not to be trusted from fewer than 10 documents" in caption) == doubtful


def test_drawing_leaves_the_callers_settings_alone(measured):
    before = dict(matplotlib.rcParams), matplotlib.get_backend(auto_select=False)
    figure2(measured(LEVELS))
    assert (dict(matplotlib.rcParams), matplotlib.get_backend(auto_select=False)) == before


def test_it_works_without_a_display(measured, tmp_path):
    measured(LEVELS)
    code = (
        "import sys; from forward_influence.analysis import open_runs, plot_runs; "
        "plot_runs(open_runs(sys.argv[1]), formats=['png'])"
    )
    environment = {name: value for name, value in os.environ.items() if "DISPLAY" not in name}
    environment["MPLBACKEND"] = "TkAgg"  # needs a display, and is not used
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    subprocess.run(command, env=environment, check=True, timeout=60)
    assert (tmp_path / "run" / "figure2.png").exists()
