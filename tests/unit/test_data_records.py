"""Reading files: what is text, what is left out and what is said about it."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forward_influence.data import DataError, load_documents
from forward_influence.data.records import scan_file


def texts(corpus):
    return {document.id: document.text for document in corpus}


def write(path, *lines, end=b"\n"):
    path.write_bytes(b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + end for line in lines))
    return path


def test_records_split_at_newline_alone(tmp_path):
    odd = "one\u0085two\u2028three\u2029four\x0bfive\x1csix"
    line = json.dumps({"id": "a", "text": odd}, ensure_ascii=False).encode()
    corpus = load_documents(write(tmp_path / "d.jsonl", line, {"id": "b", "text": "second"}))
    assert texts(corpus) == {"a": odd, "b": "second"}
    assert corpus.problems == ()


def test_carriage_returns_and_blank_lines_are_tolerated(tmp_path):
    path = write(tmp_path / "d.jsonl", {"id": "a", "text": "x"}, b"", b"   ", {"id": "b", "text": "y"}, end=b"\r\n")
    corpus = load_documents(path)
    assert texts(corpus) == {"a": "x", "b": "y"}
    assert corpus.problems == ()


def test_last_line_needs_no_newline(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"id": 1, "text": "x"}\n{"id": 2, "text": "y"}')
    assert texts(load_documents(path)) == {"1": "x", "2": "y"}


@pytest.mark.parametrize("ending", [".jsonl", ".txt"])
def test_byte_order_mark_is_not_text(tmp_path, ending):
    body = b'{"text": "word"}' if ending == ".jsonl" else b"word"
    plain, marked = tmp_path / "plain" / f"d{ending}", tmp_path / "marked" / f"d{ending}"
    for path, start in ((plain, b""), (marked, b"\xef\xbb\xbf")):
        path.parent.mkdir()
        path.write_bytes(start + body)
    assert texts(load_documents(marked)) == texts(load_documents(plain))
    assert list(texts(load_documents(marked)).values()) == ["word"]


def test_a_mark_inside_the_text_stays(tmp_path):
    (tmp_path / "d.txt").write_bytes("a\ufeffb".encode())
    assert list(texts(load_documents(tmp_path / "d.txt")).values()) == ["a\ufeffb"]


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_a_bad_byte_names_file_and_offset_and_the_others_go_on(tmp_path, start):
    first = b'{"id": "a", "text": "good"}\n'
    bad = b'{"id": "b", "text": "ba\xffd"}\n'
    last = '{"id": "c", "text": "gööd"}\n'.encode()
    path = tmp_path / "d.jsonl"
    path.write_bytes(start + first + bad + last)
    corpus = load_documents(path)
    assert texts(corpus) == {"a": "good", "c": "gööd"}
    (problem,) = corpus.problems
    offset = path.read_bytes().index(b"\xff")
    assert str(path) in problem
    assert f"0xff at offset {offset} " in problem
    assert "line 2" in problem


def test_a_bad_byte_in_the_first_record_after_a_mark(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "\xfe"}\n{"id": "b", "text": "x"}\n')
    (problem,) = load_documents(path).problems
    assert f"0xfe at offset {path.read_bytes().index(0xFE)} " in problem


def test_a_bad_byte_in_a_text_file_leaves_out_that_file(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"\xef\xbb\xbfab\xff")
    (tmp_path / "good.txt").write_text("fine", encoding="utf-8")
    corpus = load_documents(tmp_path)
    assert list(texts(corpus).values()) == ["fine"]
    (problem,) = corpus.problems
    assert "bad.txt" in problem
    assert "0xff at offset 5 " in problem


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (b'{"text": "torn', "JSON"),
        (b"[1, 2]", "list"),
        (b'"text"', "str"),
        (b'{"title": "t", "n": 1}', "title, n"),
        (b'{"text": 5}', "int"),
        (b'{"text": " \\n "}', "no text"),
        (b'{"text": null}', "none of the fields"),
        (b'{"text": "half \\ud800 pair"}', "surrogate"),
        (b'{"id": "\\udfff", "text": "x"}', "surrogate"),
        (b"[" * 200_000, "JSON"),
    ],
)
def test_a_bad_line_is_named_and_left_out(tmp_path, line, word):
    path = write(tmp_path / "d.jsonl", {"id": "a", "text": "x"}, line, {"id": "c", "text": "z"})
    corpus = load_documents(path)
    assert texts(corpus) == {"a": "x", "c": "z"}
    (problem,) = corpus.problems
    assert problem.startswith(f"{path}, line 2 (from byte 25) ")
    assert word in problem
    assert "\n" not in problem


def test_the_list_of_problems_of_a_file_is_bounded(tmp_path):
    path = write(tmp_path / "d.jsonl", {"text": "x"}, *[b"no"] * 50)
    corpus = load_documents(path)
    assert len(corpus.problems) == 21
    assert "30 more" in corpus.problems[-1]


def test_text_fields_in_order_of_preference(tmp_path):
    rows = [
        {"id": 1, "body": "e", "document": "d", "content": "c", "text": "b", "article": "a"},
        {"id": 2, "body": "e", "document": "d", "content": "c", "text": "b", "article": None},
        {"id": 3, "body": "e", "document": "d", "content": "c"},
        {"id": 4, "body": "e", "document": "d"},
        {"id": 5, "body": "e"},
    ]
    corpus = load_documents(write(tmp_path / "d.jsonl", *rows))
    assert texts(corpus) == {"1": "a", "2": "b", "3": "c", "4": "d", "5": "e"}


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=8))
def test_any_text_comes_back_as_it_was(tmp_path_factory, contents):
    path = tmp_path_factory.mktemp("d") / "d.jsonl"
    path.write_bytes(
        b"".join(json.dumps({"id": i, "text": t}, ensure_ascii=False).encode() + b"\n" for i, t in enumerate(contents))
    )
    problems = []
    found = {record.own_id: record.read() for record in scan_file(path, problems.append)}
    assert found == {str(i): t for i, t in enumerate(contents) if t.strip()}
    assert len(problems) == len(contents) - len(found)


def test_parquet_rows_of_several_groups(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table(
        {
            "n": list(range(150)),
            "article_id": [f"p{i}" for i in range(150)],
            "article": [None if i == 70 else f"text {i}" for i in range(150)],
        }
    )
    pq.write_table(table, tmp_path / "d.parquet", row_group_size=100)
    corpus = load_documents(tmp_path / "d.parquet")
    assert texts(corpus) == {f"p{i}": f"text {i}" for i in range(150) if i != 70}
    (problem,) = corpus.problems
    assert "row 70 of row group 0" in problem


def test_parquet_with_invalid_utf8_loses_that_row_only(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    raw = pa.array([b"good", b"b\xffd", b"fine"], pa.binary())
    strings = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"id": ["a", "b", "c"], "text": strings}), tmp_path / "d.parquet")
    corpus = load_documents(tmp_path / "d.parquet")
    assert texts(corpus) == {"a": "good", "c": "fine"}
    assert "row 1" in corpus.problems[0]


@pytest.mark.parametrize("content", [b"PAR1 not a parquet file", b""])
def test_a_corrupt_parquet_file_does_not_stop_a_folder(tmp_path, content):
    (tmp_path / "bad.parquet").write_bytes(content)
    (tmp_path / "good.txt").write_text("fine", encoding="utf-8")
    corpus = load_documents(tmp_path)
    assert list(texts(corpus).values()) == ["fine"]
    assert "bad.parquet" in corpus.problems[0]


def test_parquet_without_a_text_field_lists_its_fields(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"title": ["x"], "abstract": ["y"]}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match="title, abstract"):
        load_documents(tmp_path / "d.parquet")


@pytest.mark.parametrize("ending", [".jsonl", ".txt", ".parquet"])
@pytest.mark.parametrize("change", ["other text", "gone"])
def test_a_file_that_changes_after_loading_is_an_error(tmp_path, ending, change):
    path = tmp_path / f"d{ending}"

    def fill(text):
        if ending == ".parquet":
            pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            pq.write_table(pa.table({"text": [text]}), path)
        elif ending == ".jsonl":
            write(path, {"text": text})
        else:
            path.write_text(text, encoding="utf-8")

    fill("first")
    corpus = load_documents(path)
    path.unlink() if change == "gone" else fill("other")
    with pytest.raises(DataError, match="changed while it was in use"):
        list(corpus)


def test_reading_does_not_follow_the_locale(tmp_path):
    path = tmp_path / "d.txt"
    path.write_bytes("Grüße 你好".encode())
    code = "import sys; from forward_influence.data import load_documents as l; "
    code += "print(ascii(next(iter(l(sys.argv[1]))).text))"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, str(path)]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == ascii("Grüße 你好")
