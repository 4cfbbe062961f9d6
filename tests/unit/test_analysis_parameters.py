"""The table of a method's parameters against names parsed by hand and plain loops, and the figure."""

import itertools
import json
import math

import numpy as np
import pandas
import pytest

from forward_influence.analysis import open_runs, parameter_figure, parameter_table, plot_parameters
from forward_influence.analysis.parameter_plot import evenly_numbered
from forward_influence.analysis.parameters import in_order, value_of
from forward_influence.cli import run as run_command
from forward_influence.cli.parameters import defaults_of
from forward_influence.errors import UserError
from forward_influence.rows import ROW_FIELDS, RunSpec, row_key
from forward_influence.runs import RunFolder

CHUNK = 32
FIXED = {"model": "tiny@1", "dtype": "float32", "tokenizer": "t", "data": "local", "prefix": 100}
DEFAULTS = {"alpha": 0.9, "tau": 1.0, "k": 256, "align": "self", "heads": None}

#: Name without its budget -> (alpha, k), where alpha and k alone differ from the defaults.
GRID = {
    "infokv": (0.9, 256), "infokv:alpha=0.5": (0.5, 256), "infokv:alpha=0.0": (0.0, 256),
    "infokv:k=none": (0.9, "none"), "infokv:alpha=0.5,k=none": (0.5, "none"), "infokv:alpha=0.5,k=16": (0.5, 16),
}  # fmt: skip
#: Settings that differ in something else.
OUTSIDE = (
    "infokv:tau=2.0",
    "infokv:alpha=0.5,align=next",
    "infokv-two:alpha=0.5",
    "snapkv",
    "infokv:alpha=0.7,sinks=4",
)


pytestmark = pytest.mark.filterwarnings("error")


def make_row(spec: RunSpec, document: str, selector: str, kl: list[float]) -> dict:
    chunks = [kl[start : start + CHUNK] for start in range(0, len(kl), CHUNK)]
    means = [math.fsum(c) / len(c) for c in chunks]
    row = dict.fromkeys(ROW_FIELDS) | {"key": row_key(spec.hash(), document, selector), "mode": "keep"}
    row |= {"document": document, "document_sha": f"sha-{document}", "selector": selector, "status": "ok"}
    row |= {"n_tokens": 300, "n_removed": 60, "removed_fraction": 0.6, "kept_fraction": 0.4, "kept_counts": [40, 40]}
    row |= {"chunk_start": list(range(0, len(kl), CHUNK)), "chunk_count": [len(c) for c in chunks], "kl": kl}
    row |= {"kl_mean": means, "delta_nll": [m / 2 for m in means], "nll_count": [len(c) for c in chunks]}
    return row | {"top1_changed": [m / 100 for m in means], "seconds": 0.5}


@pytest.fixture
def measured(tmp_path):
    """Function that measures settings, in the order given, in n documents."""

    def build(names=(*GRID, *OUTSIDE), budgets=("0.4",), n=6, horizon=192, levels=None, missing=()):
        spec = RunSpec(**FIXED, horizon=horizon, chunk=CHUNK, fraction="1", sinks=0, recent=0, mode="keep")
        rng, rows = np.random.default_rng(0), []
        for number in range(n):
            scale = rng.lognormal(0, 1)
            named = [[name] if "@" in name else [f"{name}@{keep}" for keep in budgets] for name in names]
            for selector in itertools.chain(*named):
                level = (levels or {}).get(selector, rng.uniform(0.5, 1))
                kl = (scale * level * rng.lognormal(0, 0.5, horizon)).tolist()
                if (number, selector) not in missing:
                    rows.append(make_row(spec, f"d{number}", selector, kl))
        with RunFolder.open(tmp_path / "run", spec, {}) as folder:
            folder.append(rows)
        return open_runs(tmp_path / "run")

    return build


def naive(runs, selector: str, start: int, stop: int) -> list[float]:
    rows = [json.loads(line) for line in (runs.runs[0].path / "rows.jsonl").read_text().splitlines()]
    return [math.fsum(row["kl"][start:stop]) / (stop - start) for row in rows if row["selector"] == selector]


@pytest.mark.parametrize(("band", "span"), [("all", (0, 192)), ("near", (0, 128)), ("far", (128, 192))])
def test_the_table_equals_plain_loops(measured, band, span):
    runs = measured(missing={(2, "infokv:alpha=0.5@0.4")})
    table = parameter_table(runs, "infokv", "alpha", "k", defaults=DEFAULTS, band=band)
    assert list(zip(table.line, table.value)) == [
        (16, 0.5), (256, 0.0), (256, 0.5), (256, 0.9), ("none", 0.5), ("none", 0.9)
    ]  # fmt: skip
    by_value = {values: name for name, values in GRID.items()}
    for line in table.itertuples():
        name = by_value[line.value, line.line]
        found = naive(runs, f"{name}@0.4", *span)
        assert line.n_documents == len(found) == 6 - (name == "infokv:alpha=0.5")
        assert line.kl == pytest.approx(sum(found) / len(found), rel=1e-4)
        assert min(found) <= line.kl_low < line.kl < line.kl_high <= max(found)
        assert line.delta_nll == pytest.approx(line.kl / 2) and line.top1_changed == pytest.approx(line.kl / 100)
        assert line.default == (name == "infokv")
        assert (line.asked, line.band, line.band_start, line.band_stop) == ("0.4", band, *span)


def test_without_lines_every_other_parameter_is_at_its_default(measured):
    runs = measured()
    table = parameter_table(runs, "infokv", "alpha", defaults=DEFAULTS)
    assert list(table.value) == [0.0, 0.5, 0.9] and table.line.isna().all()
    assert list(parameter_table(runs, "infokv", "tau", defaults=DEFAULTS).value) == [1.0, 2.0]


def test_texts_and_nothing_are_values_too(measured):
    runs = measured(["infokv", "infokv:align=next", "infokv:heads=layer", "infokv:heads=kv,align=next"])
    table = parameter_table(runs, "infokv", "heads", "align", defaults=DEFAULTS)
    assert list(zip(table.line, table.value)) == [("next", "kv"), ("next", "none"), ("self", "layer"), ("self", "none")]


def test_a_spread_over_layers_that_was_asked_for_is_another_setting(measured):
    runs = measured(["infokv@0.4", "infokv@0.4,pyramid", "infokv:alpha=0.5@0.4", "infokv:k=none@0.4,entropy"])
    assert list(parameter_table(runs, "infokv", "alpha", "k", defaults=DEFAULTS).value) == [0.5, 0.9]


def test_a_class_is_named_by_its_path(measured):
    runs = measured(["my.own:Scorer", "my.own:Scorer:a=2", "my.own:Other:a=3", "my.own"])
    assert list(parameter_table(runs, "my.own:Scorer", "a", defaults={"a": 1}).value) == [1, 2]


def test_a_parameter_without_a_default_is_read_from_the_names(measured):
    runs = measured(["mine:size=2", "mine:size=3", "mine:size=3,b=1", "mine:b=1"])
    assert list(parameter_table(runs, "mine", "size", defaults={}).value) == [2, 3]
    table = parameter_table(runs, "mine", "size", "b", defaults={"b": 0})
    assert list(zip(table.line, table.value)) == [(0, 2), (0, 3), (1, 3)]


def test_several_budgets_need_a_choice(measured):
    runs = measured(["infokv", "infokv:alpha=0.5", "infokv:alpha=0.7@20 tokens"], budgets=("0.4", "0.2"))
    with pytest.raises(UserError, match=r"measured at budgets 0\.4, 0\.2, 20 tokens; give one of them as the budget"):
        parameter_table(runs, "infokv", "alpha", defaults=DEFAULTS)
    for budget in ("0.2", "0.20", 0.2):
        table = parameter_table(runs, "infokv", "alpha", defaults=DEFAULTS, budget=budget)
        assert set(table.asked) == {"0.2"} and list(table.value) == [0.5, 0.9]
        found = naive(runs, "infokv@0.2", 0, 192)
        assert table.kl[1] == pytest.approx(sum(found) / len(found), rel=1e-4)
    assert list(parameter_table(runs, "infokv", "alpha", defaults=DEFAULTS, budget="20 tokens").value) == [0.7]
    with pytest.raises(UserError, match=r"Budget '0\.3' .* not measured; this run has 0\.4, 0\.2, 20 tokens\."):
        parameter_table(runs, "infokv", "alpha", defaults=DEFAULTS, budget="0.3")


def test_one_document_has_no_interval(measured):
    runs = measured(n=1)
    table = parameter_table(runs, "infokv", "alpha", "k", defaults=DEFAULTS)
    assert table[["kl_low", "kl_high"]].isna().all(axis=None) and table.kl.gt(0).all()
    figure = parameter_figure(runs, method="infokv", x="alpha", line="k", defaults=DEFAULTS)
    assert "no interval from one document" in figure.get_supxlabel()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (dict(x="beta"), r"'infokv' has no parameter 'beta'; it has alpha, tau, k, align, heads, sinks\."),
        (dict(x="alpha", line="beta"), "has no parameter 'beta'; it has alpha"),
        (dict(x="alpha", line="alpha"), "'alpha' is asked for twice"),
        (dict(x="alpha", method="h2o"), r"'h2o' was not measured in this run; it has infokv, infokv-two, snapkv\."),
        (dict(x="alpha", band="middle"), r"'middle' is not in this run; it has all, near, far\."),
        (dict(x="sinks"), "No setting of 'infokv' differs from its defaults in 'sinks' alone; measured were infokv,"),
    ],
)
def test_what_is_not_there_is_told_in_one_sentence(measured, asked, message):
    given = {"method": "infokv", "defaults": DEFAULTS} | asked
    with pytest.raises(UserError, match=message) as error:
        parameter_table(measured(), **given)
    assert "\n" not in str(error.value)


def test_a_parameter_with_one_value_has_no_figure(measured):
    with pytest.raises(UserError, match=r"'heads' has one value .* \(none\); measure others"):
        parameter_figure(measured(), method="infokv", x="heads", defaults=DEFAULTS)


def test_values_are_numbers_where_they_are_finite():
    assert [value_of(text) for text in ("16", "2.0", "1e-3", "none", "inf", "nan", "True", "next")] == [
        16, 2.0, 0.001, "none", "inf", "nan", "True", "next"
    ]  # fmt: skip
    assert in_order(["none", 256, "all", 16, 2.5, 16, 256.0]) == [2.5, 16, 256, "all", "none"]


@pytest.mark.parametrize(
    ("values", "linear"),
    [
        ([0.0, 0.5, 0.9, 0.95, 1.0], True), ([16, 64, 256], True), ([16, 64, 256, "none"], False),
        ([16, 64, 256, 1024], False), ([1, 2], True), ([3], True), (["a", "b"], False), ([0.1, 0.2, 1.2], True),
    ],
)  # fmt: skip
def test_an_axis_is_linear_for_numbers_with_steps_within_a_decade(values, linear):
    assert evenly_numbered(values) is linear


def curves(axes) -> dict[str, tuple[list, list]]:
    """Points of the drawn curves by marker; "" is the ring."""
    return {
        "ring" if line.get_linestyle() == "None" else str(number): (list(line.get_xdata()), list(line.get_ydata()))
        for number, line in enumerate(axes.get_lines())
    }


def test_the_figure_shows_the_table_near_and_far(measured):
    runs = measured()
    figure = parameter_figure(runs, method="infokv", x="k", line="alpha", defaults=DEFAULTS)
    assert len(figure.axes) == 2
    for axes, band in zip(figure.axes, ("near", "far")):
        table = parameter_table(runs, "infokv", "k", "alpha", defaults=DEFAULTS, band=band)
        assert [label.get_text() for label in axes.get_xticklabels()] == ["16", "256", "none"]
        drawn = curves(axes)
        ring = drawn.pop("ring")
        places = {16: 0, 256: 1, "none": 2}
        for (x, y), (_, part) in zip(drawn.values(), table.groupby("line"), strict=True):
            assert x == [places[value] for value in part.value] and y == list(part.kl)
        default = table[table.default]
        assert ring == ([1], list(default.kl)) and list(zip(default.line, default.value)) == [(0.9, 256)]
        bands = {tuple(path.vertices[:, 1]) for one in axes.collections for path in one.get_paths()}
        ends = {value for band in bands for value in band}
        assert set(table.kl_low) | set(table.kl_high) <= ends
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["alpha = 0", "alpha = 0.5", "alpha = 0.9", "default"]
    assert figure.get_suptitle() == "What infokv loses at 40% of 100 prefix tokens, by k and alpha"


def test_no_two_curves_look_alike(measured):
    names = [f"infokv:alpha={number / 20},k={k}" for number in range(1, 13) for k in (16, 64)]
    figure = parameter_figure(measured(names, n=2, horizon=64), method="infokv", x="k", line="alpha", defaults=DEFAULTS)
    lines = figure.axes[0].get_lines()
    assert len({(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}) == len(lines) == 12
    figure.draw_without_rendering()
    for box in (*(text.get_window_extent() for text in figure.texts), figure.legends[0].get_window_extent()):
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1


def test_numbers_are_at_their_place_and_a_short_horizon_is_one_panel(measured):
    figure = parameter_figure(measured(horizon=64), method="infokv", x="alpha", line="k", defaults=DEFAULTS)
    assert len(figure.axes) == 1
    drawn = curves(figure.axes[0])
    assert [x for x, _ in drawn.values()] == [[0.5], [0.0, 0.5, 0.9], [0.9], [0.5, 0.9]]
    assert drawn["ring"][0] == [0.9]
    assert figure.axes[0].get_title(loc="left") == "all: offsets 0 to 63"


def test_the_default_need_not_have_been_measured(measured):
    runs = measured(["infokv:alpha=0.5", "infokv:alpha=0.7"])
    assert not parameter_table(runs, "infokv", "alpha", defaults=DEFAULTS).default.any()
    figure = parameter_figure(runs, method="infokv", x="alpha", defaults=DEFAULTS)
    assert "ring" not in curves(figure.axes[0]) and not figure.legends and figure.axes[0].get_legend() is None


@pytest.mark.parametrize(("top", "scale"), [(0.5, "linear"), (3, "log")])
def test_means_more_than_tenfold_apart_are_on_a_logarithmic_axis(measured, top, scale):
    names = ("infokv", "infokv:alpha=0.5", "infokv:alpha=0.0")
    runs = measured(names, levels=dict(zip((f"{name}@0.4" for name in names), (0.1, 0.2, top))), n=2)
    figure = parameter_figure(runs, method="infokv", x="alpha", defaults=DEFAULTS)
    assert [axes.get_yscale() for axes in figure.axes] == [scale, scale]


def test_infinite_means_are_gaps_that_the_caption_counts(measured):
    runs = measured(horizon=64)
    rows = runs.runs[0].path / "rows.jsonl"
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    lines[0]["kl"][0] = lines[0]["kl_mean"][0] = "inf"
    rows.write_text("".join(json.dumps(row) + "\n" for row in lines))
    runs = open_runs(rows.parent)
    assert parameter_table(runs, "infokv", "alpha", defaults=DEFAULTS).kl.tolist()[2] == math.inf
    figure = parameter_figure(runs, method="infokv", x="alpha", defaults=DEFAULTS)
    assert "Gaps: infinite mean (1 point)." in figure.get_supxlabel()
    assert math.isnan(figure.axes[0].get_lines()[0].get_ydata()[2])


def test_files_are_named_after_the_parameters(measured):
    runs = measured(n=2)
    given = {"method": "infokv", "x": "alpha", "defaults": DEFAULTS}
    paths = plot_parameters(runs, line="k", **given)
    assert [path.name for path in paths] == [f"parameters-alpha-k.{kind}" for kind in ("png", "pdf", "svg", "csv")]
    assert all(path.parent == runs.runs[0].path and path.stat().st_size for path in paths)
    table = pandas.read_csv(paths[-1])
    assert list(table.band.unique()) == ["all", "near", "far"] and len(table) == 3 * len(GRID)
    assert [path.name for path in plot_parameters(runs, formats=["png"], **given)] == [
        "parameters-alpha.png", "parameters-alpha.csv"
    ]  # fmt: skip


def test_defaults_are_those_of_the_class():
    found = defaults_of("infokv")
    assert (found["alpha"], found["tau"], found["k"], found["align"]) == (0.9, 1.0, 256, "self")
    assert defaults_of("infokv.scorers.infokv:InfoKV") == found
    assert defaults_of("entropy")["k"] == 256  # a selector that is a scorer


def test_the_command_draws_parameters(measured, capsys):
    run = measured(n=2).runs[0].path
    for given, message in {
        ("--figure", "parameters"): "needs the parameter on its axis; give one such as --x alpha.",
        ("--figure", "fidelity", "--lines", "k"): "--lines belongs to --figure parameters, and this is fidelity;",
        ("--budget", "0.4"): "--budget belongs to --figure parameters",
        (
            "--figure",
            "parameters",
            "--x",
            "alpha",
            "--selector",
            "a",
        ): "--selector does not go with",
        ("--figure", "parameters", "--x", "alpha", "--method", "infokw"): "did you mean 'infokv'?",
    }.items():
        assert run_command(["plot", str(run), *given]) == 2
        assert message in capsys.readouterr().err
    given = ["--figure", "parameters", "--x", "alpha", "--lines", "k", "--budget", "0.4", "--format", "svg"]
    assert run_command(["plot", str(run), *given]) == 0
    told = capsys.readouterr()
    assert told.out.split() == [str(run / f"parameters-alpha-k.{kind}") for kind in ("svg", "csv")]
    assert "from 2 documents" in told.err
    assert run_command(["plot", str(run), "--figure", "parameters", "--x", "tau", "--format", "svg"]) == 0
    assert list(pandas.read_csv(run / "parameters-tau.csv").value.unique()) == [1.0, 2.0]
