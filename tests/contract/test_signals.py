"""Every signal against a naive float64 reference from transformers' own outputs."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import ARCHITECTURES, build, layer_windows, random_ids

from forward_influence.errors import UserError
from forward_influence.signals import token_signals
from infokv.errors import Refused
from infokv.prefill import prefill

LENGTH, WINDOW = 61, 10
NEEDS = ("entropy", "entropy(k=5)", "entropy(k=5,align=next)", "entropy(k=full)", "entropy(k=5,renormalise=False)",
         "entropy(base=2)", "self_information", "representation_evolution", f"window_attention(window={WINDOW})",
         "keys", "values", "queries", "queries(last=10)")  # fmt: skip


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def case(request):
    model = build(request.param)
    ids = random_ids(LENGTH, seed=3)
    twin = copy.deepcopy(model).double()
    twin.set_attn_implementation("eager")
    blocks = []
    handles = [block.register_forward_hook(lambda m, a, out: blocks.append(out)) for block in twin.base_model.layers]
    with torch.no_grad():
        out = twin(ids, use_cache=False, output_attentions=True)
    for handle in handles:
        handle.remove()
    blocks = [one[0] if isinstance(one, tuple) else one for one in blocks]
    return model, ids, out, [one[0] for one in blocks]


def close(got, expected, tolerance=2e-4):
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk", [512, 16, 1])
def test_all_signals(case, chunk):
    model, ids, out, blocks = case
    got = token_signals(model, ids, NEEDS, chunk_size=chunk)
    logits = out.logits[0]
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    full = -(p * log_p).sum(-1)
    top = logits.sort(-1, descending=True).values[:, :5].log_softmax(-1)
    top5 = -(top.exp() * top).sum(-1)
    raw = log_p.sort(-1, descending=True).values[:, :5]
    first = torch.zeros(1, dtype=torch.float64)
    close(got["entropy(k=full)"], torch.cat([first, full[:-1]]))
    close(got.entropy, torch.cat([first, full[:-1]]))  # the vocabulary has fewer than 256 tokens
    close(got["entropy(k=5)"], torch.cat([first, top5[:-1]]))
    close(got["entropy(k=5,align=next)"], top5)
    close(got["entropy(k=5,renormalise=False)"], torch.cat([first, -(raw.exp() * raw).sum(-1)[:-1]]))
    close(got["entropy(base=2)"], torch.cat([first, full[:-1]]) / torch.log(torch.tensor(2.0)).double())
    close(got.self_information, torch.cat([first, -log_p[torch.arange(LENGTH - 1), ids[0, 1:]]]))
    expected = torch.stack([1 - torch.cosine_similarity(one, blocks[-1], dim=-1) for one in blocks])
    close(got.representation_evolution, expected)
    assert (got.representation_evolution[-1] == 0).all()
    attentions = torch.stack([one[0, :, -WINDOW:].mean(1) for one in out.attentions])
    close(got[f"window_attention(window={WINDOW})"], attentions)
    assert got[f"window_attention(window={WINDOW})"].dtype == torch.float32


def test_queries_keys_and_values_give_the_attention(case):
    """Softmax of queries and keys, with what the layer adds, is the model's own attention."""
    model, ids, out, _ = case
    got = token_signals(model, ids, ("queries", "keys", "values", "queries(last=10)"), chunk_size=16)
    config = model.config
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None]
    scaling = model.base_model.layers[0].self_attn.scaling
    softcap = getattr(config, "attn_logit_softcapping", None)
    for layer, window in enumerate(layer_windows(config)):
        keys = got.keys[layer].double().repeat_interleave(config.num_attention_heads // got.kv_heads, 0)
        scores = got.queries[layer].double() @ keys.transpose(1, 2) * scaling
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        seen = (distance >= 0) & (distance < (window or LENGTH))
        close(scores.masked_fill(~seen, float("-inf")).softmax(-1), out.attentions[layer][0], 1e-3)
        assert got.values[layer].shape == got.keys[layer].shape
        assert torch.equal(got["queries(last=10)"][layer], got.queries[layer][:, -10:])


def test_only_what_was_asked_for_is_there(case):
    model, ids, _, _ = case
    got = token_signals(model, ids, ("entropy",))
    with pytest.raises(Refused, match="was not asked for"):
        _ = got.self_information
    with pytest.raises(Refused, match="no signal 'entropie'"):
        token_signals(model, ids, ("entropie",))
    with pytest.raises(Refused, match="no parameter 'kk'"):
        token_signals(model, ids, ("entropy(kk=3)",))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"needs": "entropy"}, r"needs is 'entropy'; write a tuple of signals, such as \('entropy',\)"),
        ({"needs": None}, "needs is None; write a tuple"),
        ({"chunk_size": 2.5}, "chunk_size is 2.5; it must be a whole number of at least 1"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"total_length": 8}, "total_length is 8; it must be a whole number of at least 9"),
        ({"total_length": "12"}, "total_length is '12'"),
        ({"total_length": 300}, "The text has 300 tokens, and LlamaForCausalLM has a context of 256"),
    ],
)
def test_arguments_that_cannot_be(options, sentence):
    with pytest.raises(UserError, match=sentence):
        token_signals(build("llama"), random_ids(9), **options)


def test_window_longer_than_the_text_takes_all_queries():
    model, ids = build("llama"), random_ids(9)
    got = token_signals(model, ids, ("window_attention",))
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    attentions = twin(ids, output_attentions=True).attentions
    close(got.window_attention, torch.stack([one[0].mean(1) for one in attentions]).double())


def elements_alive(model, length: int, monkeypatch) -> int:
    """Most elements of float tensors that are alive at once during a prefill, weights included."""
    import gc

    import infokv.prefill as module

    plain, peak = module.forward_chunks, 0

    class Watch:
        def on_block(self, layer, states):
            nonlocal peak
            storages = {}
            for one in gc.get_objects():
                if issubclass(type(one), torch.Tensor) and one.is_floating_point():
                    storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes() // one.element_size()
            peak = max(peak, sum(storages.values()))

    def watched(*args, **kwargs):
        kwargs["block_listeners"] = (*kwargs.get("block_listeners", ()), Watch())
        return plain(*args, **kwargs)

    monkeypatch.setattr(module, "forward_chunks", watched)
    gc.collect()
    prefill(model, random_ids(length), NEEDS[:9], chunk_size=8)
    monkeypatch.undo()
    return peak


def test_memory_holds_no_vocabulary_by_tokens_and_no_states_of_the_text(monkeypatch):
    """What a longer text adds per token is keys, values, and a few numbers for each signal."""
    model = build("llama")
    short, long = (elements_alive(model, length, monkeypatch) for length in (120, 240))
    config = model.config
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    mask = 8 * config.num_attention_heads // config.num_key_value_heads  # one chunk's, a row per query and group
    per_token = (long - short) / 120
    assert cache <= per_token <= cache + mask + 30  # the states of one layer would add 48, logits 89
