"""KL against a 50-digit reference, and its rules for infinities."""

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forward_influence import kl
from forward_influence.errors import UserError
from forward_influence.kl import compare_logits, kl_divergence

INF = float("inf")


def exact(p_logits, q_logits):
    """KL(p || q) and log-likelihood differences with 50 digits, on the given floats."""
    with mpmath.workdps(50):
        p = [mpmath.mpf(float(z)) for z in p_logits]
        q = [mpmath.mpf(float(z)) for z in q_logits]
        log_zp = mpmath.log(mpmath.fsum(mpmath.exp(z) for z in p))
        log_zq = mpmath.log(mpmath.fsum(mpmath.exp(z) for z in q))
        kl = mpmath.fsum(mpmath.exp(a - log_zp) * ((a - log_zp) - (b - log_zq)) for a, b in zip(p, q))
        return kl, [(a - log_zp) - (b - log_zq) for a, b in zip(p, q)]


def pair(scale, vocabulary=2000, seed=0, spread=3.0, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(vocabulary, generator=generator) * spread
    q = p + torch.randn(vocabulary, generator=generator) * scale + shift
    return p, q


@pytest.mark.parametrize("shift", [0.0, 7.5, -300.0])
@pytest.mark.parametrize("scale", [5e-6, 1e-4, 1e-2, 1.0, 10.0])
def test_relative_error_below_a_millionth(scale, shift):
    p, q = pair(scale, shift=shift)
    truth, _ = exact(p, q)
    got = kl_divergence(p, q).item()
    assert abs(got - truth) <= 1e-6 * truth, (got, truth)


def test_range_of_the_promise_is_covered():
    values = [float(exact(*pair(scale))[0]) for scale in (5e-6, 10.0)]
    far = torch.tensor([0.0, 0.0]), torch.tensor([0.0, -210.0])
    values.append(float(exact(*far)[0]))
    assert min(values) < 3e-11
    assert max(values) > 100
    assert abs(kl_divergence(*far).item() / values[-1] - 1) < 1e-6


def test_one_moved_token_in_a_large_vocabulary():
    p = torch.zeros(150_000)
    q = p.clone()
    q[7] = 2e-3  # true value about 1.3e-11
    truth, _ = exact(p, q)
    assert truth < 2e-11
    assert abs(kl_divergence(p, q).item() / float(truth) - 1) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_equal_inputs_give_zero(dtype):
    logits = (torch.randn(5, 4000, generator=torch.Generator().manual_seed(1)) * 10).to(dtype)
    assert (kl_divergence(logits, logits) == 0).all()
    assert (kl_divergence(logits.double(), logits.double() + 0.5).abs() < 1e-13).all()


def test_matched_minus_infinity_contributes_nothing_and_keeps_the_precision():
    p, q = pair(1e-5)
    truth, _ = exact(p, q)
    gap = torch.full((500,), -INF)
    assert abs(kl_divergence(torch.cat([p, gap]), torch.cat([q, gap])).item() / float(truth) - 1) < 1e-6


def test_infinite_where_the_other_rules_a_token_out():
    p = torch.tensor([0.0, 1.0, 2.0])
    assert kl_divergence(p, torch.tensor([0.0, -INF, 2.0])).item() == INF
    assert kl_divergence(torch.tensor([0.0, -900.0]), torch.tensor([0.0, -INF])).item() == INF


def test_token_that_only_the_reference_rules_out():
    p, q = torch.tensor([0.0, 1.0, -INF]), torch.tensor([0.0, 1.0, 1.0])
    expected = torch.log((1 + torch.e + torch.tensor(torch.e)) / (1 + torch.tensor(torch.e)).double())
    assert kl_divergence(p, q).item() == pytest.approx(expected.item(), rel=1e-6)


def test_beyond_the_range_of_exp():
    p, q = torch.tensor([0.0, -2000.0, 3.0]), torch.tensor([0.0, 1500.0, 3.0])
    truth, _ = exact(p, q)
    assert kl_divergence(p, q).item() == pytest.approx(float(truth), rel=1e-9)
    p, q = torch.tensor([0.0, -680.0]), torch.tensor([-680.0, 800.0])
    truth, _ = exact(p, q)
    assert kl_divergence(p, q).item() == pytest.approx(float(truth), rel=1e-9)


@pytest.mark.parametrize("bad", [float("nan"), INF])
@pytest.mark.parametrize("side", [0, 1])
def test_undefined_logits_are_refused(bad, side):
    rows = [torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0])]
    rows[side][1] = bad
    with pytest.raises(UserError, match="no KL divergence is defined"):
        kl_divergence(*rows)


def test_all_impossible_is_refused():
    with pytest.raises(UserError):
        kl_divergence(torch.full((3,), -INF), torch.zeros(3))


def test_comparison_agrees_with_the_definition():
    generator = torch.Generator().manual_seed(3)
    reference = torch.randn(9, 300, generator=generator) * 4
    logits = reference + torch.randn(4, 9, 300, generator=generator)
    targets = torch.randint(0, 300, (9,), generator=generator)
    targets[-1] = -1
    got = compare_logits(reference, logits, targets)
    for row in range(4):
        for token in range(9):
            kl, losses = exact(reference[token], logits[row, token])
            assert got.kl[row, token].item() == pytest.approx(float(kl), rel=1e-9)
            if targets[token] >= 0:
                assert got.delta_nll[row, token].item() == pytest.approx(float(losses[targets[token]]), abs=1e-9)
            else:
                assert got.delta_nll[row, token].isnan()
            assert got.top1_changed[row, token] == (logits[row, token].argmax() != reference[token].argmax())


def test_delta_nll_of_a_ruled_out_target_is_infinite_not_nan():
    reference = torch.zeros(2, 3)
    logits = torch.tensor([[[0.0, -INF, 0.0], [0.0, 1.0, 0.0]]])
    got = compare_logits(reference, logits, torch.tensor([1, 1]))
    assert got.delta_nll[0, 0].item() == INF
    assert got.kl[0, 0].item() == INF
    _, losses = exact(reference[1], logits[0, 1])
    assert got.delta_nll[0, 1].item() == pytest.approx(float(losses[1]), rel=1e-12)


def test_delta_nll_is_nan_only_where_the_target_is_unknown():
    """A target that both rule out is as likely as before; one that only one rules out is infinitely less or more."""
    rows = torch.tensor([[0.0, 1.0], [-INF, 1.0]])  # of the target 0, possible and ruled out
    for before, possible in enumerate((True, False)):
        got = compare_logits(rows[[before]], rows[:, None], torch.tensor([0])).delta_nll[:, 0].tolist()
        assert got == ([0.0, INF] if possible else [-INF, 0.0])
    far = torch.tensor([[-INF, 0.0, -900.0]]), torch.tensor([[[-INF, 800.0, 900.0]]])  # beyond exp's range
    assert compare_logits(*far, torch.tensor([0])).delta_nll.item() == 0
    for unknown in (-1, 2, 100):  # 2 and 100 are no tokens of these logits
        assert compare_logits(rows[:1], rows[:1, None], torch.tensor([unknown])).delta_nll.isnan().all()


@pytest.mark.parametrize(
    ("reference", "other", "sentence"),
    [
        ([1.0], torch.zeros(1), r"reference_logits is \[1.0\]; it must be a float tensor"),
        (torch.zeros(3), None, "logits is None; it must be a float tensor"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.long), r"logits is tensor.*float tensor \[..., vocabulary\]"),
        (torch.tensor(1.0), torch.tensor(1.0), "it must be a float tensor"),
        (torch.zeros(2, 0), torch.zeros(2, 0), "it must be a float tensor"),
        (torch.zeros(4, 1), torch.zeros(4, 9), r"shapes \[4, 1\] and \[4, 9\]; their vocabularies must be equal"),
        (torch.zeros(4, 9), torch.zeros(3, 9), "and the other sizes equal or 1"),
    ],
)
def test_what_are_no_logits_of_one_vocabulary(reference, other, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        kl_divergence(reference, other)
    assert "\n" not in str(caught.value)


def test_blocks_change_no_number(monkeypatch):
    """A GPU takes larger blocks than a CPU; here a block is one token, a few, or all of them."""
    generator = torch.Generator().manual_seed(4)
    reference = torch.randn(9, 300, generator=generator) * 4
    logits = reference + torch.randn(4, 9, 300, generator=generator)
    targets = torch.randint(0, 300, (9,), generator=generator)
    seen = []
    for block in (1, 900, 1 << 22):
        monkeypatch.setattr(kl, "_BLOCK", block)
        seen.append((compare_logits(reference, logits, targets), kl_divergence(reference, logits)))
    for one, alone in seen:
        torch.testing.assert_close(one.kl, seen[0][0].kl, rtol=1e-12, atol=0)
        torch.testing.assert_close(one.delta_nll, seen[0][0].delta_nll, rtol=0, atol=1e-12)
        assert torch.equal(one.top1_changed, seen[0][0].top1_changed)
        torch.testing.assert_close(alone, one.kl, rtol=1e-12, atol=0)


def test_blocks_are_larger_where_a_launch_costs_more_than_its_work():
    here, there = torch.empty(1, 49_152), torch.empty(1, 49_152, device="meta")  # anything but a CPU
    assert 1 <= kl._tokens_per_block(here) * 10 <= kl._tokens_per_block(there)
    assert kl._tokens_per_block(torch.empty(1, 1 << 19)) == 1


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 40),
    st.integers(0, 10**6),
    st.floats(-8, 2),
    st.floats(-500, 500),
)
def test_never_negative_and_shift_invariant(vocabulary, seed, exponent, shift):
    p, q = pair(10.0**exponent, vocabulary, seed)
    p, q = p.double(), q.double()
    value = kl_divergence(p, q)
    assert value >= 0
    assert kl_divergence(p, q + shift).item() == pytest.approx(value.item(), rel=1e-4, abs=1e-20 + 1e-24 * shift**2)


def test_shapes_broadcast():
    p = torch.randn(1, 3, 10)
    q = torch.randn(4, 3, 10)
    assert kl_divergence(p, q).shape == (4, 3)
    assert kl_divergence(p, q).dtype == torch.float64
