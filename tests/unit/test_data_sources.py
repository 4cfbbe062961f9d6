"""Which corpus is taken for what was named, and what the user is told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forward_influence.data import DataError, describe_corpora, load_documents

SHARED = Path(os.environ.get("FI_SHARED", Path(__file__).parents[3] / "shared"))


@pytest.fixture(autouse=True)
def no_offline_switches(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def texts(corpus):
    return {document.id: document.text for document in corpus}


def no_network():
    raise AssertionError("the hub was asked for")


def test_without_data_offline_takes_builtin_and_says_why():
    corpus = load_documents(offline=True, hub_reachable=no_network)
    assert corpus.name == "builtin"
    assert "offline" in corpus.notices[0]
    assert "builtin" in corpus.notices[0]


def test_without_data_and_hub_takes_builtin_and_says_why():
    corpus = load_documents(hub_reachable=lambda: False)
    assert corpus.name == "builtin"
    assert "does not answer" in corpus.notices[0]


def test_the_libraries_own_switch_is_offline_too(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert load_documents(hub_reachable=no_network).name == "builtin"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("artxiv", ["'artxiv'", "builtin, arxiv", ".jsonl, .parquet, .txt", "did you mean 'arxiv'?"]),
        ("nowhere/file.jsonl", ["nowhere/file.jsonl", "builtin, arxiv", "check the path"]),
        ("", ["''", "builtin"]),
        ("x" * 5000, ["builtin"]),
        (["builtin", "x.txt"], ["'builtin'", "./builtin"]),
        ([], ["empty", "builtin"]),
    ],
)
def test_unknown_data_is_one_sentence_with_what_is_allowed(name, words):
    with pytest.raises(DataError) as error:
        load_documents(name)
    message = str(error.value)
    assert all(word in message for word in words)
    assert "\n" not in message


def test_unusable_paths_say_so(tmp_path):
    (tmp_path / "empty.jsonl").write_bytes(b"\n \n")
    (tmp_path / "notes.md").write_text("text", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "other.csv").write_text("text", encoding="utf-8")
    (tmp_path / "good.txt").write_text("text", encoding="utf-8")
    bad = write(tmp_path / "bad.jsonl", {"title": "t"})
    for name, word in [("empty.jsonl", "is empty"), ("notes.md", "'.md'"), ("folder", "holds no .jsonl")]:
        for data in (tmp_path / name, [tmp_path / "good.txt", tmp_path / name]):
            with pytest.raises(DataError, match=word):
                load_documents(data)
    with pytest.raises(DataError, match=r"line 1 \(from byte 0\) has text in none .*title"):
        load_documents(bad)


def test_a_folder_is_read_to_its_depth_without_hidden_and_other_files(tmp_path):
    for name in [
        "a.txt",
        "sub/b.TXT",
        "sub/deep/c.txt",
        ".hidden.txt",
        ".git/d.txt",
        "readme.md",
        "sub/e.csv",
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    corpus = load_documents(str(tmp_path))
    assert sorted(texts(corpus).values()) == ["a.txt", "sub/b.TXT", "sub/deep/c.txt"]
    assert (corpus.name, corpus.identity, corpus.size) == ("local", "local", 3)
    assert corpus.notices == ("Corpus 'local': 3 documents from 3 files.",)


def test_problems_are_told_in_the_order_of_the_files(tmp_path, monkeypatch):
    for name in "dbac":
        (tmp_path / f"{name}.txt").write_bytes(b"\xff" if name != "c" else b"fine")
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda *a, **o: ((p, d, sorted(f, reverse=True)) for p, d, f in walk(*a, **o)))
    assert [Path(text.split(" ")[0]).name for text in load_documents(tmp_path).problems] == [
        "a.txt",
        "b.txt",
        "d.txt",
    ]


def test_a_name_wins_over_a_file_unless_written_as_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "builtin").mkdir()
    (tmp_path / "builtin" / "a.txt").write_text("mine", encoding="utf-8")
    assert load_documents("builtin").name == "builtin"
    assert load_documents(["builtin"]).name == "builtin"
    assert load_documents("./builtin").name == load_documents(Path("builtin")).name == "local"


def test_describe_corpora_names_all_three(socket_disabled, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    found = {corpus["name"]: corpus for corpus in describe_corpora()}
    assert {name: corpus["available"] for name, corpus in found.items()} == {
        "builtin": True,
        "arxiv": False,
        "local": True,
    }
    assert all(set(corpus) == {"name", "available", "note"} and corpus["note"] for corpus in found.values())


def test_import_is_light():
    code = "import sys, forward_influence.data; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "datasets", "pyarrow", "pandas"} & set(modules)


def test_real_documents():
    if not (SHARED / "data").is_dir():
        pytest.skip(f"no shared documents at {SHARED} (FI_SHARED)")
    theses = load_documents(SHARED / "data/arxiv/arxiv_long_16k.jsonl")
    both = load_documents([SHARED / "data/longdocs", SHARED / "data/arxiv"])
    assert (theses.size, theses.problems) == (80, ())
    assert both.size == 12 + 80 + 65 + 52
    assert all("1 file left out, such as SOURCE.md" in problem for problem in both.problems)
    names = [document.id for document in theses]
    assert [d.id for d in both if d.id in set(names)] == names
    assert all(len(document.text) >= 50_000 for document in theses)
