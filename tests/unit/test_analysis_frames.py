"""One or several run folders as one run, and its tidy table."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pandas
import pyarrow.parquet
import pytest

from forward_influence.analysis import open_runs
from forward_influence.analysis.frames import PARQUET_KEY
from forward_influence.errors import UserError
from forward_influence.rows import ROW_FIELDS, RunSpec, row_key
from forward_influence.runs import RunFolder

SPEC = RunSpec(model="m", dtype="float32", tokenizer="t", data="local", prefix=100, horizon=5, chunk=2)


def make_row(document: str, selector: str = "entropy", *, spec: RunSpec = SPEC, **change) -> dict:
    row = dict.fromkeys(ROW_FIELDS) | {"key": row_key(spec.hash(), document, selector), "mode": "remove"}
    row |= {"document": document, "document_sha": f"sha-{document}", "selector": selector, "status": "ok"}
    row |= {"removed": [5], "n_removed": 1, "removed_fraction": 0.01, "kept_fraction": 0.99, "n_tokens": 105}
    row |= {
        "chunk_start": [0, 2, 4],
        "chunk_count": [2, 2, 1],
        "kl_mean": [0.2, math.inf, 0.5],
        "seconds": 0.5,
    }
    row |= {"kl": [0.1, 0.3, 0.5, math.inf, 0.5], "delta_nll": [0.0, 0.1, None], "nll_count": [2, 2, 0]}
    return row | {"top1_changed": [0.0, 0.5, 1.0]} | change


def skipped(document: str, status: str = "skipped", **change) -> dict:
    lists = ("removed", "chunk_start", "chunk_count", "kl_mean", "kl", "delta_nll", "nll_count")
    nothing = {name: [] for name in lists}
    nothing |= {"top1_changed": [], "n_removed": None, "removed_fraction": None, "kept_fraction": None}
    return make_row(document, status=status, reason="too short", n_tokens=60, **nothing) | change


def write(path, rows, spec: RunSpec = SPEC):
    with RunFolder.open(path, spec, {"command": f"measure --out {path.name}"}) as folder:
        folder.append(rows)
    return path


def test_the_frame_has_a_line_per_document_selector_and_chunk(tmp_path):
    runs = open_runs(write(tmp_path / "run", [make_row("a"), make_row("a", "none"), skipped("b")]))
    frame = runs.frame()
    assert len(frame) == 6
    assert not frame.duplicated(["document", "selector", "chunk_start"]).any()
    line = frame.iloc[2].to_dict()
    expected = {"document": "a", "selector": "entropy", "mode": "remove", "status": "ok", "chunk_start": 4}
    expected |= {"chunk_stop": 5, "chunk_count": 1, "kl_mean": 0.5, "nll_count": 0, "top1_changed": 1.0}
    expected |= {"n_removed": 1, "removed_fraction": 0.01, "kept_fraction": 0.99, "n_tokens": 105}
    expected |= {"seconds": 0.5, "model": "m", "dtype": "float32", "prefix": 100, "horizon": 5}
    assert {name: line[name] for name in expected} == expected
    assert math.isnan(line["delta_nll"])
    assert line["hash"] == SPEC.hash()
    assert frame.kl_mean[1] == math.inf
    assert frame.chunk_start.dtype == frame.chunk_stop.dtype == frame.n_removed.dtype == "int64"


def test_rows_without_a_curve_are_counted_and_shown_on_request(tmp_path):
    runs = open_runs(write(tmp_path / "run", [make_row("a"), skipped("b"), skipped("c", "failed")]))
    assert [runs.count(status) for status in ("ok", "skipped", "failed")] == [1, 1, 1]
    assert [curve.document for curve in runs.curves()] == ["a"]
    assert runs.curves()[0].spec_hash == SPEC.hash()
    rest = runs.frame(status=("skipped", "failed"))
    assert rest.document.tolist() == ["b", "c"]
    assert rest.reason.tolist() == ["too short"] * 2
    assert (rest.chunk_count == 0).all()
    assert rest.kl_mean.isna().all()


def test_an_empty_run_has_an_empty_frame(tmp_path):
    frame = open_runs(write(tmp_path / "run", [])).frame()
    assert len(frame) == 0
    assert "kl_mean" in frame


def test_shards_are_one_run(tmp_path):
    one = write(tmp_path / "shards" / "1-of-2", [make_row("a"), make_row("c", seconds=1.0)])
    two = write(tmp_path / "shards" / "2-of-2", [make_row("b"), make_row("c", seconds=2.0)])
    for paths in ([one, two], [tmp_path / "shards"], [one, two, one]):
        runs = open_runs(*paths)
        assert [row["document"] for row in runs.rows] == ["a", "c", "b"]
        assert len(runs.runs) == 2


def test_no_path_means_the_newest_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="measure"):
        open_runs()
    write(tmp_path / "runs" / "it", [make_row("a")])
    assert open_runs().runs[0].path.name == "it"


def test_runs_with_different_choices_are_not_joined(tmp_path):
    other = replace(SPEC, seed=3, dtype="bfloat16")
    one, two = write(tmp_path / "1", []), write(tmp_path / "2", [make_row("a", spec=other)], other)
    with pytest.raises(UserError, match="seed 0 there, 3 here") as caught:
        open_runs(one, two)
    assert "prefix" not in str(caught.value)


def test_two_different_results_for_one_key_are_refused(tmp_path):
    one = write(tmp_path / "1", [make_row("a")])
    two = write(tmp_path / "2", [make_row("a", kl_mean=[0.2, math.inf, 0.6])])
    with pytest.raises(UserError, match="different results"):
        _ = open_runs(one, two).rows


def test_a_finished_row_replaces_a_failed_one_in_any_order(tmp_path):
    one, two = write(tmp_path / "1", [skipped("a", "failed")]), write(tmp_path / "2", [make_row("a")])
    for paths in ([one, two], [two, one]):
        assert [row["status"] for row in open_runs(*paths).rows] == ["ok"]


def test_one_document_with_two_texts_is_refused(tmp_path):
    one = write(tmp_path / "1", [make_row("a")])
    two = write(tmp_path / "2", [make_row("a", "none", document_sha="edited")])
    with pytest.raises(UserError, match="other tokens"):
        _ = open_runs(one, two).rows


def test_parquet_and_csv_give_the_frame_back(tmp_path):
    runs = open_runs(write(tmp_path / "run", [make_row("a"), make_row("b")]))
    parquet, csv = runs.export(tmp_path / "out")
    assert (parquet.name, csv.name) == ("frame.parquet", "frame.csv")
    pandas.testing.assert_frame_equal(pandas.read_parquet(parquet), runs.frame())
    assert pandas.read_csv(csv).kl_mean.tolist() == runs.frame().kl_mean.tolist()
    metadata = pyarrow.parquet.read_schema(parquet).metadata
    assert json.loads(metadata[PARQUET_KEY]) == runs.provenance()
    assert runs.provenance()["runs"][0]["provenance"] == {"command": "measure --out run"}
    assert RunSpec.from_dict(runs.provenance()["spec"]) == SPEC
    assert runs.export(tmp_path / "one.csv") == [tmp_path / "one.csv"]


def test_an_export_that_cannot_be_is_named(tmp_path):
    runs = open_runs(write(tmp_path / "run", [make_row("a")]))
    with pytest.raises(UserError, match=r"frame\.xlsx"):
        runs.export(tmp_path / "frame.xlsx")
    with pytest.raises(UserError, match="Cannot write"):
        runs.export(tmp_path / "run" / "rows.jsonl" / "frame.csv")


def test_analysis_loads_no_torch():
    code = (
        "import sys, forward_influence.analysis as a; assert 'pandas' not in sys.modules; "
        "a.open_runs; assert 'pandas' not in sys.modules; a.plot_runs, a.crossover; "
        "assert 'torch' not in sys.modules; assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
