"""What a request must look like, and which documents a plan takes; no model is involved."""

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forward_influence.data import TokenizedDocument
from forward_influence.errors import UserError
from forward_influence.plan import (
    choose_documents,
    default_out,
    describe_twins,
    document_seed,
    effective_horizon,
    least_length,
)
from forward_influence.request import check_candidates, check_numbers, check_positions, check_writable, parse_shard
from forward_influence.rows import RunSpec
from forward_influence.selectors import make_selectors

SPEC = RunSpec(model="m", dtype="float32", tokenizer="t", data="local", prefix=20, horizon=30, chunk=8)


def spec(**changes):
    return RunSpec(**{**SPEC.to_dict(), **changes})


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("prefix", 0, 1),
        ("horizon", 0, 1),
        ("horizon", -5, 1),
        ("chunk", 0, 1),
        ("limit", 0, 1),
        ("batch", 0, 1),
        ("batch", True, 1),
        ("sinks", -1, 0),
        ("recent", -1, 0),
        ("seed", -1, 0),
        ("seed", 1.5, 0),
        ("prefix", "64", 1),
        ("prefix", None, 1),
    ],
)
def test_numbers_that_make_no_study(name, value, least):
    with pytest.raises(
        UserError, match=rf"^{name} is {value}; it must be a whole number of at least {least} \(.+\)\.$"
    ):
        check_numbers(**{name: value})


def test_numbers_that_do():
    check_numbers(prefix=1, horizon=1, chunk=1, sinks=0, recent=0, limit=None, batch=None, seed=0)
    check_numbers(limit=1, batch=3)


def test_shards():
    assert parse_shard(None) is None
    assert parse_shard("3/16") == (3, 16)
    assert parse_shard(" 1/1 ") == (1, 1)


@pytest.mark.parametrize("bad", ["0/3", "4/3", "3", "a/b", "-1/3", "1/3/2", "1.5/3", "", "²/3", 3])
def test_shards_that_are_none(bad):
    with pytest.raises(UserError, match=r"is not of the form 3/16; with 16 shards it goes from 1/16 to 16/16"):
        parse_shard(bad)


def test_more_removed_than_there_are_candidates():
    selectors = make_selectors(["random"]).values()
    check_candidates(10, 20, 4, 6, selectors)
    with pytest.raises(UserError, match="11 of 20 prefix positions are to be removed, but 10 are candidates"):
        check_candidates(11, 20, 4, 6, selectors)
    with pytest.raises(UserError, match="but 0 are candidates after 4 sinks and 64 recent ones"):
        check_candidates(1, 20, 4, 64, selectors)
    with pytest.raises(UserError, match="one must stay"):
        check_candidates(20, 20, 0, 0, selectors)


def test_selectors_that_choose_nothing_need_no_candidates():
    check_candidates(1, 20, 4, 64, make_selectors(["none", "recompute", "positions:at=3"]).values())


def test_explicit_positions_outside_the_prefix(tmp_path):
    check_positions(make_selectors(["positions:at=0+19", "random"]), 20)
    with pytest.raises(UserError, match=r"positions:at=3\+20 has position 20, .* from 0 to 19\."):
        check_positions(make_selectors("positions:at=20+3"), 20)
    file = tmp_path / "chosen.json"
    file.write_text('{"a": [3], "b": [4, -1]}')
    with pytest.raises(UserError, match=r"positions:chosen.json@\w{8} has position -1, which is outside"):
        check_positions(make_selectors(f"positions:{file}"), 20)


def test_folders_that_cannot_be_made(tmp_path):
    check_writable(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError, match="which is a file; give a folder"):
        check_writable(file)
    with pytest.raises(UserError, match=r"cannot be made, because .*file' is a file; give another --out"):
        check_writable(file / "below")


def test_folders_that_no_system_has():
    with pytest.raises(UserError, match="holds a character that no path has; give another --out"):
        check_writable(Path("a\0b"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folders_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(UserError, match="is not writable.; give another --out"):
            check_writable(tmp_path / "run")
    finally:
        tmp_path.chmod(0o700)


def test_default_folder_says_model_hash_and_shard():
    short = SPEC.hash()[:8]
    assert default_out("smollm2-135m", SPEC) == Path("runs", f"smollm2-135m-{short}")
    assert default_out("a/b c", SPEC, (3, 16)) == Path("runs", f"a-b-c-{short}-shard-3-of-16")
    assert default_out("///", SPEC) == Path("runs", f"model-{short}")
    assert default_out("m" * 255, SPEC, (100, 100)).name == f"{'m' * 50}-{short}-shard-100-of-100"


@given(st.integers(0, 2**63), st.text())
def test_document_seed_is_a_hash_of_seed_and_id(seed, name):
    expected = int(hashlib.sha256(f"{seed}\n{name}".encode()).hexdigest()[:12], 16)
    assert document_seed(seed, name) == expected < 2**48


def test_document_seeds_differ():
    seeds = {document_seed(seed, name) for seed in range(20) for name in ("a", "b", "1", "11")}
    assert len(seeds) == 80
    assert document_seed(0, "\udcff") != document_seed(0, "\udcfe")  # from file names that are not UTF-8


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, 28), ({"chunk": 64}, 50), ({"full_horizon": True}, 50), ({"horizon": 5}, 25), ({"chunk": 1}, 21)],
)
def test_least_length(changes, expected):
    assert least_length(spec(**changes)) == expected


def test_horizon_is_cut_to_the_context_with_a_notice():
    notices = []
    assert effective_horizon("tiny", 256, 60, 196, notices.append) == 196
    assert effective_horizon("tiny", None, 60, 10**6, notices.append) == 10**6
    assert notices == []
    assert effective_horizon("tiny", 256, 60, 197, notices.append) == 196
    assert notices == [
        "Horizon cut from 197 to 196: tiny has a context of 256 tokens (--extend-context yarn goes past it)."
    ]
    with pytest.raises(UserError, match="prefix is 256, but tiny has a context of 256 tokens; use a smaller prefix"):
        effective_horizon("tiny", 256, 256, 10, notices.append)


class Lengths:
    """A corpus of documents with these many tokens, and a count of those that were asked for."""

    def __init__(self, *lengths, texts=None):
        self.lengths, self.read, self.texts = lengths, 0, texts or range(len(lengths))

    def tokenized(self, encode, length):
        self.length = length
        for index, tokens in enumerate(self.lengths):
            self.read += 1
            yield tokenized(index, tokens, self.texts[index])


def tokenized(index, tokens, text):
    return TokenizedDocument(f"d{index}", tuple(range(1000 * text, 1000 * text + tokens)))


def test_the_first_long_enough_documents_are_taken_and_the_short_ones_met_are_told():
    corpus = Lengths(100, 27, 28, 50, 49)
    found, short, twins = choose_documents(corpus, Words(), SPEC, 2, print)
    assert [one.id for one in found] == ["d0", "d2"]
    assert short == [("d1", 27, tokenized(1, 27, 1).sha)]
    assert twins == []
    assert corpus.read == 3  # no more than needed
    assert corpus.length == 50


def test_a_full_horizon_asks_for_more():
    found, short, _ = choose_documents(Lengths(100, 28, 50, 49), Words(), spec(full_horizon=True), 9, print)
    assert [one.id for one in found] == ["d0", "d2"]
    assert [name for name, _, _ in short] == ["d1", "d3"]


def test_a_text_under_several_ids_is_taken_once():
    """What lies beyond the horizon (50 tokens) is not measured and makes no other text."""
    corpus = Lengths(100, 50, 60, 49, 70, 20, 20, texts=[0, 1, 0, 0, 1, 2, 2])
    found, short, twins = choose_documents(corpus, Words(), SPEC, 9, print)
    assert [one.id for one in found] == ["d0", "d1", "d3"]
    assert twins == [("d2", "d0"), ("d4", "d1")]
    assert [name for name, _, _ in short] == ["d5", "d6"]
    sentence = "Left out, because another document has the same text: 'd2' ('d0' is kept), 'd4' ('d1' is kept)"
    assert describe_twins(twins) == f"{sentence}."
    assert describe_twins([*twins, ("d8", "d0"), ("d9", "d0")]).endswith("'d8' ('d0' is kept) and 1 more.")


def test_a_limit_counts_texts_not_ids():
    corpus = Lengths(60, 60, 60, 60, texts=[0, 0, 1, 2])
    found, _, _ = choose_documents(corpus, Words(), SPEC, 2, print)
    assert [one.id for one in found] == ["d0", "d2"]
    assert corpus.read == 3


@pytest.mark.parametrize(("full", "least", "hint"), [(False, 28, "prefix, or"), (True, 50, "prefix or horizon, or")])
def test_no_document_is_long_enough(full, least, hint):
    message = (
        rf"at least {least} tokens are needed \(prefix 20\), and the longest has 27; use a smaller {hint} other data"
    )
    with pytest.raises(UserError, match=message):
        choose_documents(Lengths(3, 27, 26), Words(), spec(full_horizon=full), 9, print)


def test_long_tokenisation_shows_signs_of_life(monkeypatch):
    now = iter(range(0, 1000, 7))
    monkeypatch.setattr("forward_influence.plan.time.monotonic", lambda: next(now))
    told = []
    choose_documents(Lengths(*[28, 5] * 4), Words(), SPEC, 9, told.append)
    assert told[0].startswith("3 documents tokenised, 2 of them long enough")
    assert 1 < len(told) < 4


class Words:
    def encode(self, text, special):
        raise AssertionError("the corpus of this test has its tokens")
