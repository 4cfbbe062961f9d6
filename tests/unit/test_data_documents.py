"""Documents: unique, stable ids, the seeded order, and their tokens."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forward_influence.data import DataError, TokenizedDocument, load_documents
from forward_influence.data.builtin import BuiltinCorpus, leading_special_tokens
from forward_influence.data.documents import seeded_order
from forward_influence.data.names import named_records
from forward_influence.data.records import Record


def encode(text, *, special):
    """A tokenizer with one token a character, token 1 before and token 2 behind."""
    ids = [ord(character) + 10 for character in text]
    return [1, *ids, 2] if special else ids


def encode_bare(text, *, special):
    return [ord(character) + 10 for character in text]


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def texts(corpus):
    return {document.id: document.text for document in corpus}


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


def test_ids_are_the_records_own_or_made_of_file_and_text(tmp_path):
    rows = [
        {"id": "own", "text": "a"},
        {"article_id": 7, "text": "b"},
        {"id": None, "_id": "under", "text": "c"},
        {"id": True, "text": "d"},
        {"id": "", "text": "e"},
    ]
    (tmp_path / "d.txt").write_text("f", encoding="utf-8")
    corpus = load_documents([write(tmp_path / "rows.jsonl", *rows), tmp_path / "d.txt"])
    made = {f"rows-{sha(text)[:8]}": text for text in "de"}
    assert texts(corpus) == {"own": "a", "7": "b", "under": "c", **made, f"d-{sha('f')[:8]}": "f"}


def test_the_same_file_elsewhere_gives_the_same_ids(tmp_path):
    rows = [{"text": f"text {i}"} for i in range(5)]
    here, there = (
        write(tmp_path / "here" / "x.jsonl", *rows),
        write(tmp_path / "there/deep" / "x.jsonl", *rows),
    )
    assert [d.id for d in load_documents(here)] == [d.id for d in load_documents(there.parent)]


def test_an_id_of_two_files_gets_the_files_name(tmp_path):
    write(tmp_path / "one.jsonl", {"id": 1, "text": "a"}, {"id": 2, "text": "b"})
    write(tmp_path / "two.jsonl", {"id": 1, "text": "c"}, {"id": 3, "text": "d"})
    assert texts(load_documents(tmp_path)) == {"one-1": "a", "two-1": "c", "2": "b", "3": "d"}


def test_an_id_of_two_records_in_one_file_gets_the_texts_hash(tmp_path):
    path = write(tmp_path / "one.jsonl", {"id": 1, "text": "a"}, {"id": 1, "text": "b"})
    assert texts(load_documents(path)) == {f"one-1-{sha(text)[:8]}": text for text in "ab"}


def test_identical_documents_are_dropped_and_counted(tmp_path):
    write(tmp_path / "a.jsonl", {"id": 1, "text": "same"}, {"id": 2, "text": "x"})
    write(tmp_path / "b.jsonl", {"id": 1, "text": "same"}, {"text": "x"})
    corpus = load_documents(tmp_path)
    assert texts(corpus) == {"1": "same", "2": "x"}
    assert corpus.notices == ("Corpus 'local': 2 documents from 2 files.", "2 duplicate documents dropped.")


def test_one_text_under_two_own_ids_is_two_documents(tmp_path):
    path = write(tmp_path / "a.jsonl", {"id": 1, "text": "same"}, {"id": 2, "text": "same"})
    assert set(texts(load_documents(path))) == {"1", "2"}


record = st.builds(
    lambda own, stem, text: Record(own, stem, sha(text), lambda: text),
    st.sampled_from([None, "1", "2", "a-1", "b-a-1", f"a-{sha('x')[:8]}", f"a-{sha('x')}", f"a-{sha('x')[:16]}"]),
    st.sampled_from(["a", "b", "b-a"]),
    st.sampled_from(["x", "y", "z"]),
)


@given(st.lists(record, max_size=12), st.randoms())
def test_names_are_unique_and_do_not_depend_on_the_order(records, random):
    named, dropped = named_records(records)
    assert len(named) + dropped == len(records)
    assert {r.sha for r in named.values()} == {r.sha for r in records}
    assert {r.own_id for r in named.values()} - {None} == {r.own_id for r in records} - {None}
    shuffled = list(records)
    random.shuffle(shuffled)
    again, _ = named_records(shuffled)
    assert {(name, r.sha) for name, r in again.items()} == {(name, r.sha) for name, r in named.items()}


@given(st.sets(st.text(max_size=5), max_size=20), st.sets(st.text(max_size=5), max_size=20), st.integers())
def test_more_documents_do_not_reshuffle_the_others(names, more, seed):
    assert [name for name in seeded_order(names | more, seed) if name in names] == seeded_order(names, seed)


def test_the_order_depends_on_the_seed_and_not_on_the_files_order(tmp_path):
    rows = [{"id": i, "text": f"text {i}"} for i in range(30)]
    forth, back = write(tmp_path / "f.jsonl", *rows), write(tmp_path / "b.jsonl", *reversed(rows))
    assert [d.id for d in load_documents(forth)] == [d.id for d in load_documents(back)]
    orders = {tuple(d.id for d in load_documents(forth, seed=seed)) for seed in range(4)}
    assert len(orders) == 4


def test_the_order_is_the_documented_one():
    naive = sorted("abcdef", key=lambda name: hashlib.sha256(f"3\n{name}".encode()).hexdigest())
    assert seeded_order("abcdef", 3) == naive


def test_records_are_tokenised_whole_and_only_when_asked_for(tmp_path):
    seen = []

    def counting(text, *, special):
        seen.append(text)
        return encode(text, special=special)

    path = write(tmp_path / "d.jsonl", *[{"id": i, "text": f"text {i}"} for i in range(10)])
    corpus = load_documents(path, seed=1)
    documents = corpus.tokenized(counting, 4)
    assert len(documents) == corpus.size == 10
    shard = documents[1::3]
    assert shard.ids == documents.ids[1::3] == [d.id for d in corpus][1::3]
    assert seen == []
    assert shard[0] == TokenizedDocument(shard.ids[0], tuple(encode(texts(corpus)[shard.ids[0]], special=True)))
    assert len(seen) == 1
    assert [d.id for d in documents] == documents.ids


def test_sha_of_tokens():
    one, other = TokenizedDocument("x", (1, 23)), TokenizedDocument("x", (12, 3))
    assert one.sha == hashlib.sha256(b"1,23").hexdigest()[:16]
    assert one.sha != other.sha


@given(st.text(min_size=1, max_size=200), st.integers(2, 60), st.sampled_from([encode, encode_bare]))
def test_running_text_is_cut_exactly_and_without_overlap(text, length, encode):
    corpus = BuiltinCorpus("builtin", "builtin:x", text=text)
    head = [1] if encode("", special=True) else []
    pieces, rest = [], [ord(character) + 10 for character in text]
    while len(head) + len(rest) >= length:
        cut = length - len(head)
        pieces.append((*head, *rest[:cut]))
        rest = rest[cut:]
    if not pieces:
        with pytest.raises(DataError, match=f"no document of {length} tokens"):
            corpus.tokenized(encode, length)
        return
    documents = corpus.tokenized(encode, length)
    assert [d.ids for d in sorted(documents, key=lambda d: d.id)] == pieces
    assert sorted(documents.ids) == [f"builtin-{sha(text)[:8]}-{i:04d}" for i in range(len(pieces))]
    assert documents.ids == seeded_order(documents.ids, 0)


def test_a_tokenizer_whose_special_tokens_cannot_be_told_is_refused():
    with pytest.raises(DataError, match="special tokens"):
        leading_special_tokens(lambda text, special: [5, 6] if special else [7], "text")


def test_builtin_is_the_language_reference():
    from pydoc_data.topics import topics

    corpus = load_documents("builtin", offline=True)
    (document,) = corpus
    assert all(topics[name] in document.text for name in topics)
    assert corpus.identity == f"builtin:{sha(document.text)}"
    assert corpus.size is None
    assert len(document.text) > 300_000
    assert len(corpus.tokenized(encode, 16384)) == len(document.text) // 16383
