"""The corpus of the paper: from the cache first, one split, never from the network when offline."""

import os

import pytest

from forward_influence.data import DataError, load_documents


@pytest.fixture(autouse=True)
def no_offline_switches(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def texts(corpus):
    return {document.id: document.text for document in corpus}


def no_network():
    raise AssertionError("the hub was asked for")


def cache(root, configuration, revision, split, rows, shards=1):
    """What `datasets` leaves in its cache for one split."""
    datasets = pytest.importorskip("datasets")
    from datasets.arrow_writer import ArrowWriter

    folder = root / "ccdv___arxiv-summarization" / configuration / "0.0.0" / revision
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dataset_info.json").write_text("{}", encoding="utf-8")
    features = datasets.Features({"article": datasets.Value("string"), "abstract": datasets.Value("string")})
    size = -(-len(rows) // shards)
    for shard in range(shards):
        part = f"-{shard:05d}-of-{shards:05d}" if shards > 1 else ""
        with ArrowWriter(path=str(folder / f"arxiv-summarization-{split}{part}.arrow"), features=features) as writer:
            for text in rows[shard * size : (shard + 1) * size]:
                writer.write({"article": text, "abstract": "short"})
            writer.finalize()
    return folder


@pytest.fixture
def arxiv_cache(tmp_path, monkeypatch, socket_disabled):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    return tmp_path


@pytest.mark.parametrize("configuration", ["section", "section-0123abcd"])
@pytest.mark.parametrize("shards", [1, 3])
def test_arxiv_comes_from_the_cache_without_network(arxiv_cache, configuration, shards):
    rows = [f"article {i}" for i in range(7)]
    cache(arxiv_cache, configuration, "abc123", "train", rows, shards)
    corpus = load_documents("arxiv:train", hub_reachable=no_network)
    assert texts(corpus) == {f"arxiv-train-{i}": text for i, text in enumerate(rows)}
    assert (corpus.name, corpus.identity, corpus.size) == ("arxiv", "arxiv:abc123", 7)
    assert "7 documents" in corpus.notices[-1]


def test_arxiv_takes_the_newest_complete_copy(arxiv_cache):
    old = cache(arxiv_cache, "section", "old", "test", ["a"])
    newer = cache(arxiv_cache, "section", "newer", "test", ["b", None])
    torn = cache(arxiv_cache, "section", "torn", "test", ["c", "d"], shards=2)
    sorted(torn.glob("*.arrow"))[0].unlink()
    cache(arxiv_cache, "document", "other", "test", ["e"])
    for age, folder in enumerate([torn, newer, old]):
        os.utime(folder, (1e9 - age, 1e9 - age))
    corpus = load_documents("arxiv", offline=True)
    assert corpus.identity == "arxiv:newer"
    assert texts(corpus) == {"arxiv-test-0": "b", "arxiv-test-1": ""}


@pytest.mark.parametrize("options", [{"offline": True}, {"hub_reachable": lambda: False}])
def test_arxiv_absent_and_out_of_reach_says_what_to_do(arxiv_cache, options):
    cache(arxiv_cache, "section", "abc", "train", ["a"])
    with pytest.raises(DataError, match=r"test split .*not in the cache.*'builtin'") as error:
        load_documents("arxiv", **options)
    assert "\n" not in str(error.value)


def test_without_data_a_reachable_hub_takes_arxiv(arxiv_cache):
    cache(arxiv_cache, "section", "abc", "test", ["a"])
    corpus = load_documents(hub_reachable=lambda: True)
    assert corpus.name == "arxiv"
    assert "arxiv" in corpus.notices[0]


def test_arxiv_downloads_one_split_and_wraps_what_fails(arxiv_cache, monkeypatch):
    import datasets

    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        raise RuntimeError("went wrong.\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"\(RuntimeError: went wrong\); name another corpus"):
        load_documents("arxiv", hub_reachable=lambda: True)
    ((arguments, options),) = asked
    assert arguments == ("ccdv/arxiv-summarization", "section")
    assert options == {"data_files": {"test": "section/test-*.parquet"}, "split": "test"}
