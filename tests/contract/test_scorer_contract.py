"""Every registered scorer and selector keeps the contract, the checks catch those that do not.

Also: InfoKV and SnapKV are their formulas.

Nothing is listed by hand: what is registered is checked, also by a plug-in that happens to be installed.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from tiny_models import build, random_ids

from forward_influence.checks import check_selector
from forward_influence.selectors import SELECTORS, Selector, TopScore, make_selector, register_selector
from forward_influence.signals import token_signals
from infokv.checks import check_facts, check_scorer, synthetic_signals
from infokv.errors import Refused
from infokv.scorer import SCORERS, Scorer, get_scorer
from infokv.scorers.infokv import InfoKV
from infokv.scorers.snapkv import SnapKV
from infokv.signals import signal


@pytest.mark.parametrize("name", SCORERS.names())
def test_registered_scorers_keep_the_contract(name):
    check_scorer(SCORERS.get(name))


#: All but those that are nothing without a file; they have tests of their own.
SELF_CONTAINED = [name for name in SELECTORS.names() if not getattr(SELECTORS.get(name), "needs_file", False)]


@pytest.mark.parametrize("name", SELF_CONTAINED)
def test_registered_selectors_keep_the_contract(name):
    check_selector(SELECTORS.get(name))


@pytest.mark.parametrize("name", SCORERS.names())
def test_registered_scorers_are_selectors(name):
    check_selector(name)


@pytest.mark.parametrize("name", [*SCORERS.names(), *SELECTORS.names()])
def test_each_states_what_lists_show(name):
    cls = (SELECTORS if name in SELECTORS else SCORERS).get(name)
    first = (cls.__doc__ or "").strip().split("\n")[0]
    assert 15 < len(first) < 110
    assert first.endswith(".")


# Deliberately broken scorers: one for each check


@dataclass(frozen=True)
class Sound(Scorer):
    """Twice the entropy."""

    factor: float = 2.0
    needs = ("entropy",)

    def score(self, signals):
        return self.factor * signals.entropy[None, None]


class NoDataclass(Scorer):
    """Not a dataclass."""

    def score(self, signals):
        return torch.zeros(1, 1, signals.tokens)


@dataclass
class NotFrozen(Scorer):
    """Not frozen."""

    def score(self, signals):
        return torch.zeros(1, 1, signals.tokens)


@dataclass(frozen=True)
class NoDocstring(Scorer):
    def score(self, signals):
        return torch.zeros(1, 1, signals.tokens)


@dataclass(frozen=True)
class UnknownSignal(Sound):
    """Wants what does not exist."""

    needs = ("entropi",)


@dataclass(frozen=True)
class Undeclared(Sound):
    """Reads what it did not ask for."""

    def score(self, signals):
        return signals.self_information[None, None]


@dataclass(frozen=True)
class Flat(Sound):
    """Gives one dimension only."""

    def score(self, signals):
        return signals.entropy


@dataclass(frozen=True)
class PerQueryHead(Sound):
    """Gives query heads instead of KV heads."""

    def score(self, signals):
        return signals.entropy.expand(signals.layers, signals.query_heads, -1)


@dataclass(frozen=True)
class CandidatesOnly(Sound):
    """Gives scores of the candidates alone."""

    def score(self, signals):
        return signals.entropy[None, None, signals.candidates.start : signals.candidates.stop]


@dataclass(frozen=True)
class Float64(Sound):
    """Gives float64."""

    def score(self, signals):
        return signals.entropy.double()[None, None]


@dataclass(frozen=True)
class NotANumber(Sound):
    """Gives NaN."""

    def score(self, signals):
        scores = signals.entropy.clone()
        scores[signals.candidates.start] = math.nan
        return scores[None, None]


@dataclass(frozen=True)
class GlobalRandom(Sound):
    """Draws from torch's generator."""

    def score(self, signals):
        return torch.rand(1, 1, signals.tokens)


@dataclass(frozen=True)
class Reseeding(Sound):
    """Seeds torch's generator, so it repeats, and so does everybody else."""

    def score(self, signals):
        torch.manual_seed(signals.seed)
        return torch.rand(1, 1, signals.tokens)


@dataclass(frozen=True)
class Overwriting(Sound):
    """Changes the entropy, though what it gives is the same each time."""

    def score(self, signals):
        signals.entropy.clamp_(max=1.0)
        return signals.entropy[None, None].clone()


@dataclass(frozen=True)
class Forgetful(Sound):
    """Its text leaves a parameter out."""

    factor: float = 2.0

    def canonical(self):
        return f"{type(self).__module__}:{type(self).__qualname__}"


def test_a_sound_scorer_passes():
    check_scorer(Sound)
    check_scorer(Sound(3.0))
    check_selector(Sound)


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (NoDataclass, "is no dataclass"),
        (NotFrozen, "is not frozen"),
        (NoDocstring, "has no docstring"),
        (UnknownSignal, "no signal 'entropi'"),
        (Undeclared, "was not asked for"),
        (Flat, "it must be .3 or 1, 2 or 1, 96"),
        (PerQueryHead, "score gave .3, 4, 96.; it must be"),
        (CandidatesOnly, "it must be"),
        (Float64, "it must be float32"),
        (NotANumber, "score gave NaN"),
        (GlobalRandom, "other numbers for the same signals"),
        (Reseeding, "draws from torch's global generator"),
        (Overwriting, "score changed the signal 'entropy'"),
        (Forgetful(3.0), "gives .*factor=2.0.*, not .*factor=3.0"),
    ],
)
def test_each_check_catches_its_fault(broken, sentence):
    with pytest.raises((AssertionError, Refused), match=sentence):
        check_scorer(broken)


@dataclass(frozen=True)
class Chooses(Selector):
    """Makes the mistake named by its parameter."""

    fault: str = ""
    needs = ("entropy",)

    def select(self, signals, count, document):
        if self.fault == "outside":
            return [signals.tokens]
        if self.fault == "negative":
            return [-1]
        if self.fault == "random":
            return torch.randperm(signals.tokens)[:count].tolist()
        if self.fault == "overwrites":
            signals.entropy.zero_()
        return range(4, 4 + count)

    def canonical(self):
        return "two words" if self.fault == "name" else f"{type(self).__module__}:Chooses"


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("outside", "leave the prefix"),
        ("negative", "leave the prefix"),
        ("random", "draw from signals.seed alone"),
        ("overwrites", "select changed the signal 'entropy'"),
        ("name", "'two words' is no single word"),
    ],
)
def test_each_selector_check_catches_its_fault(fault, sentence):
    check_selector(Chooses())
    with pytest.raises(AssertionError, match=sentence):
        check_selector(Chooses(fault))


def test_a_name_has_to_lead_back():
    @register_selector("leads-elsewhere")
    @dataclass(frozen=True)
    class Elsewhere(Chooses):
        """Calls itself with a parameter that it does not have."""

        def canonical(self):
            return "leads-elsewhere:fault=other" if not self.fault else "leads-elsewhere"

    try:
        with pytest.raises(AssertionError, match="does not name itself again"):
            check_selector(Elsewhere())
    finally:
        del SELECTORS._classes["leads-elsewhere"]


# What the scorers compute


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def signals(request):
    needs = {
        need
        for text in ("infokv", "infokv:k=none", "infokv:k=500", "infokv:k=8,align=next", "snapkv:window=16", "rpc")
        for need in get_scorer(text).needs
    } | {"window_attention", "window_attention(window=16)"}
    found = token_signals(build(request.param), random_ids(120, seed=3), sorted(needs))
    return found.with_candidates(range(4, 104))


def naive_attention(signals, window, kernel):
    """Pool over neighbours that are candidates too (divided by the full width), mean of the group, sum 1."""
    found = signals[signal("window_attention", window=window)].double()
    group = signals.query_heads // signals.kv_heads
    out = torch.zeros(signals.layers, signals.kv_heads, len(signals.candidates), dtype=torch.float64)
    for layer in range(signals.layers):
        for head in range(signals.kv_heads):
            for index, place in enumerate(signals.candidates):
                for near in range(place - kernel // 2, place + kernel // 2 + 1):
                    if near in signals.candidates:
                        for query in range(head * group, (head + 1) * group):
                            out[layer, head, index] += found[layer, query, near] / kernel / group
            out[layer, head] /= out[layer, head].sum()
    return out


def naive_infokv(signals, alpha, tau, entropy, window=64, kernel=9):
    attention = naive_attention(signals, window, kernel)
    evolution = signals.representation_evolution.double()
    out = torch.zeros(signals.layers, signals.kv_heads, signals.tokens, dtype=torch.float64)
    for layer in range(signals.layers):
        mixed = {p: (evolution[layer, p] + tau) * entropy[p].double() for p in signals.candidates}
        total = sum(math.exp(value) for value in mixed.values())
        for head in range(signals.kv_heads):
            for index, place in enumerate(signals.candidates):
                share = math.exp(mixed[place]) / total
                out[layer, head, place] = alpha * attention[layer, head, index] + (1 - alpha) * share
    return out


def relative(found, expected):
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize(("alpha", "tau"), [(0.9, 1.0), (0.0, 0.3), (0.5, 0.0)])
def test_infokv_is_its_formula(signals, alpha, tau):
    found = InfoKV(alpha=alpha, tau=tau).score(signals)
    assert found.dtype == torch.float32
    assert relative(found, naive_infokv(signals, alpha, tau, signals.entropy)) < 1e-5
    assert found.sum(dim=-1) == pytest.approx(torch.ones(signals.layers, signals.kv_heads), abs=1e-5)


def test_infokv_with_other_options_is_its_formula(signals):
    scorer = InfoKV(alpha=0.4, k=8, align="next", kernel=3)
    entropy = signals["entropy(k=8,align=next)"]
    assert relative(scorer.score(signals), naive_infokv(signals, 0.4, 1.0, entropy, kernel=3)) < 1e-5


def test_snapkv_is_its_formula(signals):
    found = SnapKV(window=16, kernel=5).score(signals)[..., 4:104]
    assert relative(found, naive_attention(signals, 16, 5)) < 1e-5


def test_alpha_1_is_snapkv_exactly(signals):
    assert torch.equal(InfoKV(alpha=1.0).score(signals), SnapKV().score(signals))
    assert torch.equal(InfoKV(alpha=1.0).score(signals), make_selector("attention").scorer.score(signals))


@pytest.mark.parametrize("heads", ["kv", "layer", "query"])
@pytest.mark.parametrize("norm", ["sum1", "mean", "sum", "max"])
def test_alpha_1_is_snapkv_with_the_same_options(signals, heads, norm):
    found = InfoKV(alpha=1.0, heads=heads, attn_norm=norm).score(signals)
    assert torch.equal(found, SnapKV(heads=heads, norm=norm).score(signals))


def test_norms_scale_alone(signals):
    mean = SnapKV(norm="mean").score(signals)
    inside = mean[..., 4:104].double()
    assert relative(SnapKV(norm="sum").score(signals), mean.double() * 64) < 1e-5
    assert relative(SnapKV(norm="sum1").score(signals)[..., 4:104], inside / inside.sum(-1, keepdim=True)) < 1e-5
    assert relative(SnapKV(norm="max").score(signals)[..., 4:104], inside / inside.amax(-1, keepdim=True)) < 1e-5


def entropy_term(scorer, signals):
    """What InfoKV adds to attention, from its own words."""
    entropy, evolution = (signals[name].double() for name in scorer.entropy_needs)
    return (evolution + scorer.tau) * entropy / scorer.temperature


def test_the_softmax_of_the_entropy_term_over_all_tokens(signals):
    scorer = InfoKV(alpha=0.0, entropy_support="all", temperature=2.0)
    wanted = entropy_term(scorer, signals).softmax(-1)[:, None, 4:104].expand(-1, signals.kv_heads, -1)
    assert relative(scorer.score(signals)[..., 4:104], wanted) < 1e-5
    assert scorer.score(signals)[..., 4:104].sum(-1).max() < 1 - 1e-4


def test_bits_sharpen_the_entropy_term(signals):
    """log_base and entropy_renorm change the signal that is asked for, and nothing else."""
    bits, raw = InfoKV(log_base="2"), InfoKV(entropy_renorm=False)
    assert bits.entropy_needs[0] == "entropy(base=2)" and raw.entropy_needs[0] == "entropy(renormalise=False)"
    values = {**signals.values_by_name, "entropy(base=2)": signals.entropy / math.log(2)}
    found = bits.score(replace(signals, values_by_name=values))
    assert relative(found, InfoKV(temperature=math.log(2)).score(signals).double()) < 1e-5


@pytest.mark.parametrize("target", ["score", "both"])
def test_pooling_the_mixed_score(signals, target):
    plain = InfoKV(alpha=0.5, kernel=1 if target == "score" else 9).score(signals)[..., 4:104].double()
    wanted = torch.zeros_like(plain)
    for index in range(100):
        wanted[..., index] = plain[..., max(0, index - 4) : index + 5].sum(-1) / 9
    assert relative(InfoKV(alpha=0.5, pool_target=target).score(signals)[..., 4:104], wanted) < 1e-5


def test_tau_0_leaves_attention_alone_in_the_last_layer(signals):
    found, attention = InfoKV(tau=0.0).score(signals)[-1, :, 4:104], SnapKV().score(signals)[-1, :, 4:104]
    assert found == pytest.approx(0.9 * attention + 0.1 / 100, rel=1e-5)
    top = lambda scores: scores.topk(20).indices.sort().values  # noqa: E731
    assert torch.equal(top(found), top(attention))


def test_tau_0_makes_the_entropy_term_of_the_last_layer_flat(signals):
    assert bool((signals.representation_evolution[-1] == 0).all())
    last = InfoKV(alpha=0.0, tau=0.0).score(signals)[-1, :, 4:104]
    assert last == pytest.approx(torch.full_like(last, 1 / 100), rel=1e-6)
    first = InfoKV(alpha=0.0, tau=0.0).score(signals)[0, :, 4:104]
    assert (first.max() / first.min()).item() > 1.5


def test_k_beyond_the_vocabulary_is_full_entropy(signals):
    assert torch.equal(signals["entropy(k=500)"], signals["entropy(k=full)"])
    assert torch.equal(InfoKV(k=500).score(signals), InfoKV(k=None).score(signals))
    assert not torch.equal(signals["entropy(k=8,align=next)"], signals["entropy(k=full)"])


def test_the_shared_set_averages_over_layers_and_heads(signals):
    expected = naive_infokv(signals, 0.9, 1.0, signals.entropy).mean(dim=(0, 1))
    inside = expected[4:104]
    chosen = make_selector("infokv").select(signals, 9, "d")
    assert chosen == sorted((inside.argsort(descending=True)[:9] + 4).tolist())


def test_uniform_attention_gives_the_pools_edges_less():
    """Padding counts in the divisor, as in the original code."""
    made = synthetic_signals(SnapKV().needs)
    for queries in made[SnapKV().needs[0]]:
        queries.zero_()
    made = replace(made, seen=1000)  # every query sees every key
    scores = SnapKV().score(made)[0, 0, made.candidates.start : made.candidates.stop]
    assert scores[0].item() == pytest.approx(scores[10].item() * 5 / 9, rel=1e-6)


@dataclass(frozen=True)
class RankingSelector(Selector):
    """A selector that scores instead of selecting."""

    needs = ("entropy",)

    def score(self, signals):
        return signals.entropy[None, None]


def test_a_selector_may_score_instead_of_selecting():
    check_selector(RankingSelector)
    signals = synthetic_signals(("entropy",))
    got = RankingSelector().select(signals, 5, "d")
    assert got == TopScore(RankingSelector()).select(signals, 5, "d")
    assert len(got) == 5


def test_a_ranking_selector_is_checked_like_a_scorer():
    @dataclass(frozen=True)
    class Wrong(Selector):
        """Gives scores of the wrong type."""

        def score(self, signals):
            return torch.zeros(1, 1, signals.tokens, dtype=torch.float64)

    with pytest.raises(AssertionError, match="must be float32"):
        check_selector(Wrong)


@pytest.mark.parametrize(("fact", "value"), [("allocation", "bogus"), ("recent", -3), ("sinks", "four"),
                                             ("schedule", 100)])  # fmt: skip
def test_declared_facts_are_checked(fact, value):
    cls = dataclass(frozen=True)(type("Odd", (Sound,), {"__doc__": "Odd facts about itself.", fact: value}))
    with pytest.raises(AssertionError, match=fact):
        check_facts(cls())
