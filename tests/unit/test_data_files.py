"""Which files below a path are read: regular ones, also behind links; what is passed over is named."""

import json
import os
import socket

import pytest

from forward_influence.data import DataError, load_documents


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def texts(corpus):
    return sorted(document.text for document in corpus)


def make_pipe(path):
    os.mkfifo(path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def make_dangling(path):
    path.symlink_to("nowhere")


def make_device(path):
    path.symlink_to("/dev/zero")


ODD = {
    "a named pipe": make_pipe,
    "a socket": make_socket,
    "a link that leads nowhere": make_dangling,
    "a device": make_device,
}


@pytest.mark.parametrize("ending", [".jsonl", ".txt", ".parquet"])
@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_regular_file_is_named_and_never_waited_for(tmp_path, monkeypatch, kind, ending):
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    write(tmp_path / "docs/good.jsonl", {"text": "good"})
    odd = tmp_path / "docs" / f"odd{ending}"
    ODD[kind](odd.relative_to(tmp_path))
    corpus = load_documents(tmp_path / "docs")
    assert texts(corpus) == ["good"]
    (problem,) = corpus.problems
    assert problem.startswith(f"{odd} is {kind}") and "left out" in problem
    (tmp_path / "docs/good.jsonl").unlink()
    with pytest.raises(DataError, match=f"holds no .jsonl.*odd{ending} is {kind}"):
        load_documents(tmp_path / "docs")


def test_files_of_other_kinds_in_a_folder_are_told(tmp_path):
    write(tmp_path / "docs/one.jsonl", {"text": "one"})
    for name in ("LICENCE", "paper.pdf", ".hidden"):
        (tmp_path / "docs" / name).touch()
    (problem,) = load_documents(tmp_path / "docs").problems
    assert problem == f"{tmp_path / 'docs'}: 2 files left out, such as LICENCE: no .jsonl, .parquet or .txt."
    (tmp_path / "docs/one.jsonl").write_bytes(b"\xff\xfe no utf-8\n")
    with pytest.raises(DataError, match="holds no usable document: .*one.jsonl"):
        load_documents(tmp_path / "docs")


@pytest.mark.parametrize("kind", ["a named pipe", "a device"])
def test_named_alone_it_is_refused(tmp_path, kind):
    ODD[kind](tmp_path / "odd.jsonl")
    with pytest.raises(DataError, match=f"odd.jsonl' is {kind}.*regular file"):
        load_documents(tmp_path / "odd.jsonl")


def test_links_to_files_and_folders_are_followed(tmp_path):
    write(tmp_path / "far/deep/one.jsonl", {"text": "one"})
    write(tmp_path / "away/two.jsonl", {"text": "two"})
    write(tmp_path / "docs/three.jsonl", {"text": "three"})
    (tmp_path / "docs/folder").symlink_to(tmp_path / "far")
    (tmp_path / "docs/file.jsonl").symlink_to(tmp_path / "away/two.jsonl")
    corpus = load_documents(tmp_path / "docs")
    assert texts(corpus) == ["one", "three", "two"]
    assert corpus.problems == ()
    (tmp_path / "docs-link").symlink_to(tmp_path / "docs")
    assert texts(load_documents(tmp_path / "docs-link")) == ["one", "three", "two"]


def test_links_in_a_circle_end(tmp_path):
    write(tmp_path / "docs/a/one.jsonl", {"text": "one"})
    (tmp_path / "docs/a/up").symlink_to(tmp_path / "docs")
    (tmp_path / "docs/b").symlink_to(tmp_path / "docs/a")
    corpus = load_documents(tmp_path / "docs")
    assert texts(corpus) == ["one"]
    assert corpus.notices == ("Corpus 'local': 1 document from 1 file.",)


@pytest.mark.parametrize("empty", ["", "  \n", None])
def test_an_empty_field_hides_no_other(tmp_path, empty):
    file = write(
        tmp_path / "a.jsonl",
        {"article": empty, "text": "abstract"},
        {"article": empty, "text": empty, "body": "body"},
        {"article": ["no", "string"], "text": "words"},
        {"article": "first", "text": "second"},
    )
    corpus = load_documents(file)
    assert texts(corpus) == ["abstract", "body", "first", "words"]
    assert corpus.problems == ()
    with pytest.raises(DataError, match="holds no usable document"):
        load_documents(write(tmp_path / "b.jsonl", {"article": empty, "text": empty}))


def test_an_empty_field_hides_no_other_in_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"article": ["", "long"], "text": ["abstract", "short"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert texts(load_documents(tmp_path / "a.parquet")) == ["abstract", "long"]


@pytest.mark.parametrize("name", ["x" * 5000, "a/" * 3000, "no\0where", f"{'y' * 300}.jsonl"])
def test_names_that_no_file_can_have_are_one_short_sentence(name):
    with pytest.raises(DataError) as caught:
        load_documents(name)
    sentence = str(caught.value)
    assert "is neither a corpus" in sentence and len(sentence) < 400 and "\n" not in sentence


@pytest.mark.parametrize("data", [3, [3], [["a"]], [None], {"a": 1}.values()])
def test_data_of_another_type_is_one_sentence(data):
    with pytest.raises(DataError, match=r"is a \w+; name a corpus"):
        load_documents(data)
