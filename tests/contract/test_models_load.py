"""Folders and hub caches: what is loaded is what was saved, and what cannot be is refused in a sentence.

Sockets are disabled for this tier, so every load here also proves that no network is needed.
"""

import json
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import ARCHITECTURES, build
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from forward_influence import hub
from forward_influence.context import verify_extension
from forward_influence.errors import UserError
from forward_influence.models import load_model, load_tokenizer, resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TEXT = "Low lowers the lowest, and 12 newer ones are newest."


def save_tokenizer(folder, *, bos=True, size=89):
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", bos_token="<s>" if bos else None
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def original():
    return build("llama")


@pytest.fixture
def folder(tmp_path, original):
    folder = tmp_path / "Tiny Llama"
    original.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def load(model, **options):
    return load_model(model, **{"check": False, "device": "cpu", "notify": lambda message: None, **options})


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_folder_gives_the_saved_model(folder, original):
    loaded = load(folder)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, original(ids).logits)
    assert (loaded.dtype, loaded.device, loaded.attention) == ("float32", "cpu", "sdpa")
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.context_limit == loaded.source.context_limit == 256
    assert (loaded.extend_context, loaded.check, loaded.notices) == (None, {}, [])
    assert loaded.source.name == "tiny-llama"
    assert loaded.source.kind == "folder"


def test_source_knows_the_size_without_weights(folder, original):
    source = resolve_model(folder)
    assert source.parameters == sum(parameter.numel() for parameter in original.parameters())
    assert source.weights_bytes("bf16") == 2 * source.parameters
    assert source.weights_bytes("float64") == 8 * source.parameters
    assert load(source).source is source


def test_identity_is_of_the_weights_not_of_the_path(folder, tmp_path):
    identity = resolve_model(folder).identity
    assert identity.startswith("folder:")
    shutil.copytree(folder, tmp_path / "moved")
    assert resolve_model(tmp_path / "moved").identity == identity
    other = build("llama", seed=1)
    other.save_pretrained(tmp_path / "moved")
    assert resolve_model(tmp_path / "moved").identity != identity


@pytest.mark.parametrize("dtype", ["bf16", "float16", "float64"])
def test_dtype_is_that_of_the_parameters(folder, dtype):
    loaded = load(folder, dtype=dtype)
    assert {str(p.dtype) for p in loaded.model.parameters()} == {f"torch.{loaded.dtype}"}


def test_attention_by_request(folder):
    assert load(folder, attention="eager").attention == "eager"


def test_bin_weights_load(folder, original):
    (folder / "model.safetensors").unlink()
    torch.save(original.state_dict(), folder / "pytorch_model.bin")
    assert torch.equal(load(folder).model.lm_head.weight, original.lm_head.weight)


def test_reference_check_is_called_and_kept(folder, monkeypatch):
    import infokv.modelcheck as modelcheck

    seen = []
    monkeypatch.setattr(modelcheck, "check_model", lambda model: seen.append(model) or {"passed": True})
    loaded = load(folder, check=True)
    assert loaded.check == {"passed": True}
    assert seen == [loaded.model]


def test_missing_weights_abort(folder, original):
    state = {k: v for k, v in original.state_dict().items() if "layers.1.mlp.up_proj" not in k}
    original.save_pretrained(folder, state_dict=state)
    with pytest.raises(UserError, match=r"lacks 1 weights .*model.layers.1.mlp.up_proj.weight.* random"):
        load(folder)


def test_weights_of_another_shape_abort(folder):
    edit_config(folder, intermediate_size=65)
    with pytest.raises(UserError, match=r"lacks|cannot be loaded"):
        load(folder)


def test_unused_weights_are_told(folder, original):
    state = {**original.state_dict(), "model.extra.weight": torch.ones(2)}
    from safetensors.torch import save_file

    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert any("1 tensors" in notice and "model.extra.weight" in notice for notice in load(folder).notices)


def test_tied_head_shares_storage(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=89, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tied")
    save_tokenizer(tmp_path / "tied")
    model = load(tmp_path / "tied").model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert sum(p.numel() for p in model.parameters()) == resolve_model(tmp_path / "tied").parameters


def test_tokenizer_with_bos(folder):
    words = load_tokenizer(resolve_model(folder))
    plain = words.encode(TEXT, special=False)
    assert words.special_prefix == [1]
    assert words.bos
    assert words.encode(TEXT, special=True) == [1, *plain]
    assert words.tokenizer.decode(plain) == TEXT
    assert words.encode("<s>" + TEXT, special=True) == [1, *plain], "never two BOS"
    assert words.encode("<s>" + TEXT, special=False) == [1, *plain]
    assert words.encode("", special=True) == [1]


def test_tokenizer_decodes_what_it_encodes(folder):
    words = load_tokenizer(resolve_model(folder))
    ids = words.encode(TEXT, special=True)
    plain = words.decode(ids, special=False)
    assert plain == TEXT
    for same in (tuple(ids), torch.tensor(ids)):
        assert words.decode(same) == words.decode(ids)
    assert words.decode(ids).startswith("<s>")
    assert words.decode([]) == ""


def test_tokenizer_without_bos(folder):
    save_tokenizer(folder, bos=False)
    words = load_tokenizer(resolve_model(folder))
    assert (words.special_prefix, words.bos) == ([], False)
    assert words.encode(TEXT, special=True) == words.encode(TEXT, special=False)
    assert words.encode("", special=True) == []


def test_tokenizer_identity(folder, tmp_path):
    source = resolve_model(folder)
    first = load_tokenizer(source).identity
    shutil.copytree(folder, tmp_path / "moved")
    assert load_tokenizer(resolve_model(tmp_path / "moved")).identity == first
    seen = {first}
    for options in ({"bos": False}, {"size": 45}):
        save_tokenizer(folder, **options)
        seen.add(load_tokenizer(source).identity)
    assert len(seen) == 3


def test_long_text_gives_no_warning(folder, caplog):
    edit = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**edit, "model_max_length": 16}))
    words = load_tokenizer(resolve_model(folder))
    import transformers

    transformers.utils.logging.enable_propagation()
    try:
        assert len(words.encode(TEXT * 50, special=True)) > 500
    finally:
        transformers.utils.logging.disable_propagation()
    assert caplog.records == []


def test_token_outside_the_vocabulary_is_an_error(folder):
    save_tokenizer(folder, size=120)
    words = load_tokenizer(resolve_model(folder))
    from dataclasses import replace

    with pytest.raises(UserError, match=r"gives id \d+, but the model has 30 tokens"):
        replace(words, vocab_size=30).encode(TEXT, special=True)


def test_another_tokenizer(folder, tmp_path):
    save_tokenizer(tmp_path / "other", bos=False)
    source = resolve_model(folder, tokenizer=tmp_path / "other")
    assert load_tokenizer(source).special_prefix == []
    with pytest.raises(UserError, match="tokenizer 'nowhere' is neither"):
        resolve_model(folder, tokenizer="nowhere")
    with pytest.raises(UserError, match="resolve_model"):
        load(source, tokenizer=tmp_path / "other")


def test_a_tokenizer_that_is_there_is_taken(folder, monkeypatch):
    source = resolve_model(folder)
    words = load_tokenizer(source)
    monkeypatch.setattr("forward_influence.models.load_tokenizer", lambda *_: pytest.fail("loaded again"))
    assert load(source, tokenizer=words).tokenizer is words
    assert load(folder, tokenizer=words).tokenizer is words


def test_no_tokenizer_is_one_sentence(tmp_path, original):
    original.save_pretrained(tmp_path / "bare")
    with pytest.raises(UserError, match="no tokenizer can be loaded .*--tokenizer DIR"):
        load(tmp_path / "bare")


def test_yarn_reaches_the_model(folder, original):
    told = []
    loaded = load(folder, extend_context="yarn", target_length=1000, notify=told.append)
    assert (loaded.context_limit, loaded.extend_context) == (1000, "yarn:256->1000")
    assert told == loaded.notices
    assert "stretched from 256 to 1000" in told[0]
    assert loaded.source.context_limit == 256
    ids = torch.randint(3, 80, (1, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert not torch.allclose(loaded.model(ids).logits, original(ids).logits, atol=1e-3)


def test_a_model_that_ignores_yarn_is_refused(original):
    verify_extension(original, None)
    with pytest.raises(UserError, match="ignores YaRN"):
        verify_extension(original, "yarn:256->1000")


REFUSALS = {
    "state space": ({"model_type": "mamba"}, "running state"),
    "unknown to transformers": ({"model_type": "rwkv7"}, "running state"),
    "brand new": ({"model_type": "never_seen"}, "cannot be used by transformers"),
    "no language model": ({"model_type": "vit"}, "no causal language model"),
    "linear layer": ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_before_weights_load(folder, case):
    changes, reason = REFUSALS[case]
    edit_config(folder, architectures=None, **changes)
    (folder / "model.safetensors").write_bytes(b"never read" * 100)
    with pytest.raises(UserError, match=reason) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


BROKEN_FILES = {
    "cut short": (b'{"model_type": "llama"', "not valid JSON"),
    "empty": (b"", "not valid JSON"),
    "not UTF-8": (b'{"model_type": "\xff"}', "not valid JSON"),
    "too deep": (b"[" * 100_000, "not valid JSON"),
    "a list": (b"[1, 2]", "holds a JSON list where an object is needed"),
    "a number": (b"3", "holds a JSON int"),
    "null": (b"null", "holds a JSON NoneType"),
    "no type": (b"{}", "cannot be used by transformers"),
}


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_broken_configuration_files_are_one_sentence(folder, case):
    content, reason = BROKEN_FILES[case]
    (folder / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=reason) as caught:
        resolve_model(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("num_hidden_layers", -3, "num_hidden_layers -3; it must be a whole number of at least 1"),
        ("num_hidden_layers", 0, "num_hidden_layers 0"),
        ("num_hidden_layers", 10**9, "num_hidden_layers 1000000000; no model has more than"),
        ("hidden_size", -48, "hidden_size -48"),
        ("max_position_embeddings", -1, "max_position_embeddings -1"),
        ("vocab_size", None, "vocab_size"),
        ("model_type", 7, "has model_type 7"),
        ("model_type", ["llama"], "has model_type"),
        ("architectures", "LlamaForCausalLM", "has architectures 'LlamaForCausalLM' where a list of names is needed"),
        ("layer_types", [1, 2, 3], "has layer_types"),
        ("num_key_value_heads", 0, "num_key_value_heads 0"),
    ],
)
def test_sizes_that_no_model_has_are_named(folder, name, value, reason):
    edit_config(folder, **{name: value})
    with pytest.raises(UserError, match=reason) as caught:
        resolve_model(folder)
    assert "\n" not in str(caught.value)


_good = {name: json.loads(ARCHITECTURES[name]()[1].to_json_string(use_diff=False)) for name in ("llama", "gemma3")}
_bad = st.sampled_from([None, -1, 0, 2.5, 1e400, True, "x", "", [], {}, [1], ["a"], {"a": 1}, [None], 10**30])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_key_may_hold_anything(data, tmp_path):
    """A model that resolves, or one sentence; 1 in 3 examples has two wrong keys."""
    config = dict(_good[data.draw(st.sampled_from(sorted(_good)))])
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=2)):
        config[key] = data.draw(_bad)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").touch()
    sentence = ""
    try:
        assert resolve_model(tmp_path).parameters > 0
    except UserError as error:
        sentence = str(error)
    assert "\n" not in sentence


@pytest.mark.parametrize("name", ["x" * 5000, f"{'y' * 300}/z", "a/" * 3000, "nul\0l", "~no-such-user-here/model"])
def test_names_that_no_path_can_have(folder, name):
    for options in ({"model": name}, {"model": folder, "tokenizer": name}):
        with pytest.raises(UserError) as caught:
            resolve_model(**options, offline=True)
        sentence = str(caught.value)
        assert "\n" not in sentence and len(sentence) < 400


def test_broken_tokenizers_and_unreadable_files_are_one_sentence(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="no tokenizer can be loaded") as caught:
        load_tokenizer(resolve_model(folder))
    assert "\n" not in str(caught.value)


def test_objects_of_torch_say_dtype_and_device(folder):
    loaded = load(folder, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (loaded.dtype, loaded.device) == ("bfloat16", "cpu")


def test_what_is_no_model(tmp_path, folder):
    cases = {
        "smolm2-135m": "did you mean 'smollm2-135m'",
        "missing.gguf": "no existing folder",
        str(tmp_path): "has no config.json",
        str(folder / "config.json"): "no GGUF file",
        "a/b/c": "no hub id",
    }
    for name, reason in cases.items():
        with pytest.raises(UserError, match=reason):
            resolve_model(name, offline=True)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        resolve_model(folder)


def test_bad_requests_end_before_the_model_is_looked_for():
    for options in ({"device": "cuda:99"}, {"dtype": "int3"}, {"attention": "none"}):
        with pytest.raises(UserError, match=next(iter(options.values()))):
            load("no-such-model", **options)


@pytest.fixture
def hub_cache(tmp_path, folder, monkeypatch):
    """A hub cache that holds org/tiny."""
    import huggingface_hub.constants as constants

    repository = tmp_path / "hub" / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    shutil.copytree(folder, repository / "snapshots" / COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return repository / "snapshots" / COMMIT


def test_offline_hub_model_comes_from_the_local_cache(hub_cache, original):
    told = []
    loaded = load("org/tiny", offline=True, notify=told.append)
    assert torch.equal(loaded.model.lm_head.weight, original.lm_head.weight)
    assert (loaded.source.kind, loaded.source.name) == ("hub", "tiny")
    assert loaded.source.identity == f"hub:org/tiny@{COMMIT}"
    assert resolve_model(hub_cache).identity == loaded.source.identity, "the same however it was reached"
    assert told == []


def test_environment_asks_for_offline(hub_cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hub, "_answers", lambda *asked: pytest.fail("a network attempt"))
    assert load("org/tiny").source.kind == "hub"
    with pytest.raises(UserError, match="not in the local hub cache"):
        resolve_model("org/absent")


def test_unreachable_hub_falls_back_with_a_notice(hub_cache, monkeypatch):
    monkeypatch.setattr(hub, "_answers", lambda *asked: False)
    told = []
    assert load("org/tiny", notify=told.append).source.kind == "hub"
    assert len(told) == 1
    assert "local cache" in told[0]
    with pytest.raises(UserError, match="cannot be reached"):
        resolve_model("org/absent", notify=told.append)


def test_reachable_hub_is_asked_once_for_small_files_and_once_for_weights(hub_cache, monkeypatch):
    import huggingface_hub

    asked = []

    def download(repo_id, **selection):
        asked.append(selection)
        return str(hub_cache)

    monkeypatch.setattr(hub, "_answers", lambda *asked: True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load("org/tiny").source.identity.endswith(COMMIT)
    small, weights = asked
    assert not any("safetensors" in pattern and "json" not in pattern for pattern in small["allow_patterns"])
    assert (weights["revision"], weights["allow_patterns"][0]) == (COMMIT, "*.safetensors")


def test_hub_refusal_is_one_sentence(monkeypatch):
    import huggingface_hub

    def refuse(repo_id, **selection):
        raise RuntimeError("404: no such repository\nRequest ID: 1")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "_answers", lambda *asked: True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(UserError, match=r"could not be fetched .*404: no such repository\); check") as caught:
        resolve_model("org/absent")
    assert "\n" not in str(caught.value)


def test_a_path_that_exists_wins(folder, hub_cache, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "org" / "tiny")
    assert resolve_model("org/tiny", offline=True).kind == "folder"
    assert resolve_model(str(folder)).identity == resolve_model("org/tiny").identity
