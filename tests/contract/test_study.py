"""Whole studies on a tiny model: every number of every row against a float64 forward."""

import hashlib
import json
import math

import pytest
import torch
from tiny_models import reference_logits
from tiny_runs import (
    ALL,
    CHUNK,
    HORIZON,
    LONG_ENOUGH,
    PREFIX,
    REMOVED,
    STUDY,
    TOKENS,
    by_name,
    read_rows,
    token_ids,
    words,
    write_documents,
)

from forward_influence import open_runs, register_selector
from forward_influence.data import DataError
from forward_influence.errors import UserError
from forward_influence.models import load_model
from forward_influence.rows import ROW_FIELDS, RunSpec, row_key
from forward_influence.selectors import SELECTORS, Selector


def test_every_number_of_every_row(study_folder, whole):
    _, network = study_folder
    rows = by_name(read_rows(whole.path))
    assert [selector for document, selector in rows if document == "d0"] == ALL
    spec_hash = open_runs(whole.path).hash
    references = {}
    for index in LONG_ENOUGH:
        ids = torch.tensor([token_ids(words(TOKENS[index] - 1, index))])
        used = ids[:, : PREFIX + HORIZON]
        horizon = used.shape[1] - PREFIX
        references[index] = reference_logits(network, used)[PREFIX:].log_softmax(-1)
        for selector in ALL:
            row = rows[f"d{index}", selector]
            assert list(row) == list(ROW_FIELDS)
            assert row["key"] == row_key(spec_hash, f"d{index}", selector)
            text = ",".join(str(token) for token in ids[0].tolist())
            assert row["document_sha"] == hashlib.sha256(text.encode()).hexdigest()[:16]
            assert (row["n_tokens"], row["mode"], row["status"], row["reason"]) == (TOKENS[index], "remove", "ok", None)
            assert row["chunk_start"] == list(range(0, horizon, CHUNK))
            assert row["chunk_count"] == [min(CHUNK, horizon - start) for start in row["chunk_start"]]
            assert row["nll_count"] == [*row["chunk_count"][:-1], row["chunk_count"][-1] - 1]
            assert row["n_removed"] == len(row["removed"]) == len(set(row["removed"]))
            assert row["removed_fraction"] == pytest.approx(row["n_removed"] / PREFIX)
            assert row["removed_fraction"] + row["kept_fraction"] == pytest.approx(1)
            assert row["seconds"] >= 0
            if row["removed"]:
                check_numbers(network, used, references[index], row, horizon)


def check_numbers(network, used, reference, row, horizon):
    flags = torch.zeros(1, 1, PREFIX, dtype=torch.bool)
    flags[..., row["removed"]] = True
    ablated = reference_logits(network, used, flags, PREFIX)[PREFIX:].log_softmax(-1)
    kl = (reference.exp() * (reference - ablated)).sum(-1).tolist()
    following = used[0, PREFIX + 1 :].tolist()
    nll = [(reference[o, token] - ablated[o, token]).item() for o, token in enumerate(following)]
    top = (reference.argmax(-1) != ablated.argmax(-1)).tolist()
    assert row["kl"] == pytest.approx(kl, rel=1e-3, abs=1e-5)
    assert any(value > 0.01 for value in kl)
    for chunk, start in enumerate(row["chunk_start"]):
        part = range(start, min(start + CHUNK, horizon))
        known = [nll[o] for o in part if o < len(nll)]
        assert row["kl_mean"][chunk] == pytest.approx(math.fsum(kl[o] for o in part) / len(part), rel=1e-3, abs=1e-5)
        if known:
            assert row["delta_nll"][chunk] == pytest.approx(math.fsum(known) / len(known), rel=1e-3, abs=1e-4)
        else:
            assert row["delta_nll"][chunk] is None
        assert row["top1_changed"][chunk] == pytest.approx(sum(top[o] for o in part) / len(part))


def test_selections_and_controls(whole):
    rows = by_name(read_rows(whole.path))
    for index in LONG_ENOUGH:
        for selector in ("attention:window=8", "entropy", "random"):
            removed = rows[f"d{index}", selector]["removed"]
            assert len(removed) == REMOVED
            assert removed == sorted(removed)
            assert removed[0] >= 2 and removed[-1] < PREFIX - 8
        assert rows[f"d{index}", "positions:at=5+9"]["removed"] == [5, 9]
        none, floor = rows[f"d{index}", "none"], rows[f"d{index}", "recompute"]
        assert none["removed"] == floor["removed"] == []
        assert set(none["kl"]) == {0.0}
        assert set(none["top1_changed"]) == {0.0}
        assert max(floor["kl"]) < 1e-8
    chosen = {tuple(rows[f"d{index}", "random"]["removed"]) for index in LONG_ENOUGH}
    assert len(chosen) == len(LONG_ENOUGH)


def test_none_is_run_as_a_row_of_its_own(study, monkeypatch):
    from forward_influence import document

    seen = []
    usual = document.compare_rows

    def watched(model, store, continuation, flags, **options):
        seen.append([int(one.sum()) for one in flags])
        return usual(model, store, continuation, flags, **options)

    monkeypatch.setattr(document, "compare_rows", watched)
    study(selector=["none", "random"], limit=1)
    assert seen == [[0, REMOVED]]


def test_short_documents_are_skipped_with_a_reason(whole):
    skipped = [row for row in read_rows(whole.path) if row["status"] == "skipped"]
    assert {(row["document"], row["n_tokens"]) for row in skipped} == {("d3", 75), ("d4", 60)}
    assert len(skipped) == 2 * len(ALL)
    assert {row["reason"] for row in skipped} == {f"shorter than {PREFIX + CHUNK} tokens"}
    assert (whole.ok, whole.skipped, whole.failed, whole.failed_rows) == (6, 2, 0, 0)
    assert whole.sentence() == f"6 documents measured, 2 skipped, 0 failed: {whole.path}"


def test_full_horizon(study, whole):
    outcome = study(selector="random", full_horizon=True)
    assert (outcome.ok, outcome.skipped) == (4, 4)
    rows = outcome.runs().rows
    assert {row["reason"] for row in rows if row["status"] == "skipped"} == {"shorter than 100 tokens"}
    assert {sum(row["chunk_count"]) for row in rows if row["status"] == "ok"} == {HORIZON}
    assert outcome.runs().hash != open_runs(whole.path).hash


def test_run_json_says_where_numbers_come_from(whole, study_folder):
    header = json.loads((whole.path / "run.json").read_text())
    spec, facts = RunSpec.from_dict(header["spec"]), header["provenance"]
    assert (spec.prefix, spec.horizon, spec.chunk, spec.fraction, spec.seed) == (PREFIX, HORIZON, CHUNK, "0.09", 0)
    assert (spec.sinks, spec.recent, spec.dtype, spec.data, spec.extend_context) == (2, 8, "float32", "local", None)
    assert spec.model.startswith("folder:") and spec.tokenizer.startswith("tokenizer:")
    assert header["hash"] == spec.hash()
    assert facts["requested"] == {"horizon": HORIZON, "limit": None, "skip": 0, "fraction": "0.09", "shard": None}
    assert facts["model"] == {"name": "model", "path": str(study_folder[0] / "model")}
    assert (facts["device"], facts["dtype"], facts["attention"]) == ("cpu", "float32", "sdpa")
    assert facts["reference_check"]["error_masked"] < 1e-3
    assert facts["planned_rows"] == len(read_rows(whole.path)) == 8 * len(ALL)
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["notices"] == ["Corpus 'local': 8 documents from 1 file."]
    assert facts["tokenizer_adds_bos"] is True


def test_a_text_under_two_ids_counts_once(study, tmp_path, capsys):
    data = write_documents(tmp_path / "mine.jsonl", [100, 100])
    lines = data.read_text().splitlines()
    twin = lines[0].replace('"d0"', '"twin"')
    data.write_text("\n".join([*lines, twin]))
    outcome = study(selector="none", data=data, quiet=False)
    told = capsys.readouterr().err
    assert outcome.ok == 2
    kept, left = ("d0", "twin") if "('d0' is kept)" in told else ("twin", "d0")
    sentence = f"Left out, because another document has the same text: '{left}' ('{kept}' is kept)."
    assert sentence in told.splitlines()
    assert {row["document"] for row in read_rows(outcome.path)} == {kept, "d1"}
    assert sentence in json.loads((outcome.path / "run.json").read_text())["provenance"]["notices"]
    data.write_text(
        "\n".join(line.replace(f'"{kept}"', f'"{left}"') for line in [*lines, twin]).replace("\n" * 2, "\n")
    )
    with pytest.raises(UserError, match=rf"Document '{left}' has the text that 'run' holds as document '{kept}'"):
        study(selector="random", data=data)


def test_horizon_is_cut_to_the_context(study, tmp_path, capsys):
    data = write_documents(tmp_path / "long.jsonl", [300, 256])
    outcome = study(selector="none", data=data, horizon=1000, quiet=False)
    assert "Horizon cut from 1000 to 196: model has a context of 256 tokens" in capsys.readouterr().err
    header = json.loads((outcome.path / "run.json").read_text())
    assert (header["spec"]["horizon"], header["provenance"]["requested"]["horizon"]) == (196, 1000)
    assert {sum(row["chunk_count"]) for row in read_rows(outcome.path)} == {196}


def test_context_can_be_extended_by_request(study, tmp_path, capsys):
    data = write_documents(tmp_path / "long.jsonl", [300, 360])
    outcome = study(selector="random", data=data, horizon=300, extend_context="yarn", quiet=False)
    told = capsys.readouterr().err
    assert told.count("stretched from 256 to 360 tokens with YaRN") == 1
    assert {sum(row["chunk_count"]) for row in read_rows(outcome.path)} == {240, 300}
    assert outcome.runs().spec.extend_context == "yarn:256->360"
    fits = study("fits", selector="random", horizon=40, extend_context="yarn", quiet=False)
    assert capsys.readouterr().err.count("The context was not extended") == 1
    assert fits.runs().spec.extend_context is None
    with pytest.raises(UserError, match="extend_context 'stretch' is unknown; the one method is 'yarn'"):
        study("no", selector="random", extend_context="stretch")


def test_too_few_documents_are_told(study, capsys):
    study(selector="none", limit=7, quiet=False)
    assert "7 documents were asked for; 6 of this corpus are long enough." in capsys.readouterr().err
    with pytest.raises(UserError, match=r"at least 401 tokens are needed \(prefix 240\).* the longest has 300"):
        study(selector="none", prefix=240, chunk=161, horizon=161, extend_context="yarn")


def test_an_explicit_file_skips_documents_that_it_does_not_list(study, tmp_path):
    file = tmp_path / "chosen.json"
    file.write_text(json.dumps({"d0": [3, 30], "d1": [7]}))
    outcome = study(selector=[f"positions:{file}", "none"])
    rows = {document: row for (document, name), row in by_name(read_rows(outcome.path)).items() if name != "none"}
    assert rows["d0"]["removed"] == [3, 30] and rows["d1"]["removed"] == [7]
    assert rows["d2"]["status"] == "skipped"
    assert rows["d2"]["reason"].endswith("lists no positions for it")
    assert outcome.ok == 6
    file.write_text('{"other-0": [3]}')
    with pytest.raises(UserError, match="lists none of the 6 documents; their ids look like 'd.', .* like 'other-0'"):
        study("other", selector=[f"positions:{file}", "none"])


# People's own


def test_an_own_selector_in_ten_lines(study, whole):
    @register_selector("rare-tokens")
    class RareTokens(Selector):
        """Tokens that come once in the prefix."""

        def select(self, signals, count, document):
            ids = signals.input_ids.tolist()
            rare = [place for place in signals.candidates if ids.count(ids[place]) == 1]
            return rare[:count]

    try:
        outcome = study(selector=["rare-tokens", "random"])
    finally:
        del SELECTORS._classes["rare-tokens"]
    assert {row["selector"] for row in read_rows(outcome.path)} == {"rare-tokens", "random"}
    from forward_influence.analysis.bands import band_table

    table = band_table(outcome.runs())
    assert {(a, b) for a, b in zip(table.a, table.b)} == {("rare-tokens", "random")}
    assert (table.n_documents >= 4).all()


def test_a_loaded_model_and_classes_and_objects(study, model_folder, whole):
    class Mine(Selector):
        def select(self, signals, count, document):
            return [5, 9]

    notices = []
    loaded = load_model(model_folder, notify=notices.append)
    state = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    outcome = study(model=loaded, selector=[Mine, Mine(), "none"])
    assert open_runs(outcome.path).hash == open_runs(whole.path).hash
    mine = [row for row in read_rows(outcome.path) if row["selector"].endswith("Mine") and row["status"] == "ok"]
    theirs = by_name(read_rows(whole.path))
    assert len(mine) == 6
    for row in mine:
        assert row["kl"] == pytest.approx(theirs[row["document"], "positions:at=5+9"]["kl"], rel=1e-4, abs=1e-6)
    assert all(torch.equal(value, state[name]) for name, value in loaded.model.state_dict().items())
    for name, value in {"dtype": "bfloat16", "device": "cpu", "tokenizer": "x", "extend_context": "yarn"}.items():
        with pytest.raises(UserError, match=f"{name} is '{value}', but the model is loaded already"):
            study(model=loaded, selector="none", **{name: value})
    with pytest.raises(UserError, match="model is a LlamaForCausalLM; give a name, a path, or what load_model"):
        study(model=loaded.model, selector="none")


@pytest.mark.parametrize(
    "change",
    [
        lambda network: network.lm_head.weight.data[3].mul_(2),
        lambda network: network.model.layers[1].mlp.up_proj.weight.data.zero_(),
        lambda network: network.bfloat16(),
    ],
)
def test_a_loaded_model_that_was_changed_is_refused(study, model_folder, change):
    loaded = load_model(model_folder, check=False, notify=lambda sentence: None)
    assert study(model=loaded, selector="none", limit=1).ok == 1
    change(loaded.model)
    for dry_run in (False, True):
        with pytest.raises(UserError, match="weights of model 'model', or their dtype, were changed .* load it again"):
            study(model=loaded, selector="none", limit=1, dry_run=dry_run)


# Dry runs


def test_dry_run_writes_nothing_and_loads_nothing(study, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("forward_influence.models.load_model", None)
    outcome = study(selector=ALL, dry_run=True)
    told = capsys.readouterr()
    assert told.err == ""
    assert "6 documents to measure, 2 too short" in told.out
    assert "36 to measure, 0 there already" in told.out
    assert "Expected: about 1 s; memory" in told.out
    assert told.out.endswith("Dry run: no weights were loaded and nothing was written.\n")
    assert (outcome.ok, outcome.failed) == (0, 0)
    assert list(tmp_path.iterdir()) == []


def test_dry_run_of_a_run_that_has_begun(study, capsys):
    before = (study(selector=["random", "none"], limit=4).path / "rows.jsonl").read_bytes()
    outcome = study(selector=["random", "entropy"], dry_run=True)
    assert "8 to measure, 4 there already" in capsys.readouterr().out
    assert outcome.ok == 4
    assert (outcome.path / "rows.jsonl").read_bytes() == before
    study(selector=["random", "none"], limit=4, dry_run=True)
    told = capsys.readouterr().out
    assert "0 to measure, 8 there already" in told
    assert "Expected" not in told
    study(selector=["random", "none"], limit=4, dry_run=True, fresh=True)
    assert "8 to measure, 0 there already" in capsys.readouterr().out


def test_the_estimate_of_the_disk_is_near_the_truth(study, model_folder, tmp_path):
    from forward_influence.estimate import estimate
    from forward_influence.open_study import pending
    from forward_influence.plan import make_plan

    data = write_documents(tmp_path / "long.jsonl", [256, 256])
    options = {**STUDY, "horizon": 196, "selector": ["random", "entropy"], "data": data, "out": "run"}
    plan = make_plan(model=model_folder, **options)
    expected = estimate(plan, pending(plan, set()), chunk_size=256).disk
    size = (study(**options).path / "rows.jsonl").stat().st_size
    assert 0.8 * size < expected < 1.4 * size


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"batch": 0}, UserError, "batch is 0; it must be a whole number of at least 1"),
        ({"data": "no/such.jsonl"}, DataError, "no/such.jsonl"),
        ({"selector": []}, UserError, "No selector was given"),
        ({"prefix": 256}, UserError, "prefix is 256, but model has a context of 256 tokens"),
        ({"shard": "4/3"}, UserError, "shard '4/3' is not of the form 3/16"),
        ({"out": "x" * 300}, UserError, "out 'xx.*x...' cannot be looked at .File name too long.; give another path"),
        ({"out": "a/" * 3000}, UserError, "cannot be looked at .File name too long."),
        ({"fraction": 0.0}, UserError, "fraction '0.0' is not a number above 0"),
    ],
)
def test_requests_that_cannot_be_met_leave_nothing(study, tmp_path, changes, error, sentence):
    with pytest.raises(error, match=sentence):
        study(**changes)
    assert list(tmp_path.iterdir()) == []
