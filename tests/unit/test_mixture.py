"""The mixture is the sum of its terms, and InfoKV, SnapKV and single signals are mixtures."""

from __future__ import annotations

import pytest
import torch

from infokv import InfoKV, Mixture, SnapKV, get_scorer
from infokv.checks import synthetic_signals
from infokv.errors import Refused
from infokv.scorers.mixture import KINDS, SCALES

ALL = "+".join(f"{kind}*0.1" for kind in KINDS)


def told(*scorers):
    return synthetic_signals([need for one in scorers for need in one.needs], tokens=150)


def inside(scores, signals):
    scores = scores.expand(signals.layers, signals.kv_heads, -1)
    return scores[..., signals.candidates.start : signals.candidates.stop]


@pytest.mark.parametrize(("alpha", "tau", "temperature"), [(0.9, 1.0, 1.0), (0.3, 0.0, 2.0), (0.0, 2.5, 0.5)])
def test_infokv_is_a_mixture(alpha, tau, temperature):
    infokv = InfoKV(alpha=alpha, tau=tau, temperature=temperature, k=64)
    terms = f"attention*{alpha}+evolving-entropy*{1 - alpha}"
    mixture = Mixture(terms=terms, tau=tau, temperature=temperature, k=64)
    signals = told(infokv, mixture)
    torch.testing.assert_close(inside(mixture.score(signals), signals), inside(infokv.score(signals), signals))


def test_attention_alone_is_snapkv():
    mixture = Mixture(terms="attention*1")
    signals = told(mixture, SnapKV())
    torch.testing.assert_close(inside(mixture.score(signals), signals), inside(SnapKV().score(signals), signals))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", SCALES)
def test_a_single_term_ranks_as_its_signal(kind, scale):
    mixture = Mixture(terms=f"{kind}/{scale}*0.5")
    signals = told(mixture)
    got = inside(mixture.score(signals), signals)
    raw = mixture._values(kind, signals).expand_as(got)
    if (raw > 0).all() or scale in ("softmax", "rank"):
        assert (got.gather(-1, raw.argsort(dim=-1)).diff(dim=-1) >= 0).all()
    if scale in ("softmax", "rank") or ((raw > 0).all() and scale == "sum1"):
        torch.testing.assert_close(got.sum(dim=-1), torch.full(got.shape[:2], 0.5))


def test_terms_add_up():
    whole = Mixture(terms=ALL)
    signals = told(whole)
    parts = sum(inside(Mixture(terms=f"{kind}*0.1").score(signals), signals) for kind in KINDS)
    torch.testing.assert_close(inside(whole.score(signals), signals), parts)


def test_only_what_has_weight_is_computed():
    assert Mixture(terms="attention*0+self-information*1").needs == ("self_information",)


def test_text_and_back():
    from infokv.scorer import SCORERS

    made = get_scorer("mixture:terms=attention*0.5+self-information/rank*0.5,window=32")
    assert made == Mixture(terms="attention*0.5+self-information/rank*0.5", window=32)
    assert get_scorer(SCORERS.canonical(made)) == made


@pytest.mark.parametrize(
    "terms",
    ["", "attention", "attention*", "attention*-1", "attention*0", "noise*1", "entropy/log*1",
     "entropy*0.1+entropy*0.2", "entropy*nan", "entropy*1e999"],
)  # fmt: skip
def test_terms_that_are_none(terms):
    with pytest.raises(Refused, match="term"):
        Mixture(terms=terms)
