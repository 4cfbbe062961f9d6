"""KL divergence that survives cancellation, and what comes with it: delta NLL and top-1 changes.

With d = z_q - z_p, the difference of two rows of logits, and any constant m,

    KL(p || q) = log(1 + sum p * expm1(d - m)) - sum p * (d - m).

Neither term needs the two log-partition functions, whose difference would drown a KL of 1e-11 in the
rounding of values near 20. With m = sum p * d the sums hold small numbers only, and float64 is enough.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from forward_influence.errors import UserError
from forward_influence.inputs import shown

#: Below this probability, p * expm1(d) is formed from its two terms instead: p may have underflowed.
_TINY = 1e-280

#: Elements of float64 work per block: a few blocks fit a CPU's cache; on a GPU the work outlasts its launch.
_BLOCK = 1 << 18
_GPU_BLOCK = 1 << 22


@dataclass(frozen=True)
class Comparison:
    """Differences of next-token distributions from the reference.

    Attributes
    ----------
    kl : float64 Tensor ``[...]``
        ``KL(reference || other)``, nats, over the whole vocabulary.
    delta_nll : float64 Tensor ``[...]``
        Change of the negative log-likelihood of the target, nats, other minus reference. 0 where both rule
        the target out; NaN where the target is unknown (negative, or no token of these logits), and only there.
    top1_changed : bool Tensor ``[...]``
        Whether the reference's most likely token is no longer a most likely one.
    """

    kl: torch.Tensor
    delta_nll: torch.Tensor
    top1_changed: torch.Tensor


@torch.no_grad()
def kl_divergence(reference_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """``KL(reference || other)`` in nats over the whole vocabulary.

    Parameters
    ----------
    reference_logits, logits : Tensor ``[..., vocabulary]``
        Any float dtype, taken as they are; shapes broadcast. ``-inf`` means probability 0. No gradient flows.

    Returns
    -------
    Tensor ``[...]``, float64
        Never negative, never NaN; ``inf`` where the reference gives probability to a token that the other
        rules out. A token ruled out by both contributes 0.

    Raises
    ------
    UserError
        If a row has NaN, ``+inf``, or no possible token, or the two are not logits of one vocabulary.
    """
    shape = _common_shape(reference_logits, logits)
    reference = reference_logits.to(logits.device).expand(shape).reshape(-1, shape[-1])
    other = logits.expand(shape).reshape(-1, shape[-1])
    out = torch.empty(len(reference), dtype=torch.float64, device=other.device)
    step = _tokens_per_block(other)
    for start in range(0, len(reference), step):
        part = slice(start, start + step)
        out[part] = _Reference(reference[part]).compare(other[part])[0]
    return out.reshape(shape[:-1])


def _common_shape(reference: torch.Tensor, other: torch.Tensor) -> torch.Size:
    """The broadcast shape of two rows of logits, whose vocabulary must be the same."""
    for name, one in (("reference_logits", reference), ("logits", other)):
        if not isinstance(one, torch.Tensor) or not one.is_floating_point() or not one.dim() or not one.shape[-1]:
            raise UserError(f"{name} is {shown(one)}; it must be a float tensor [..., vocabulary].")
    fits = reference.shape[-1] == other.shape[-1]  # a vocabulary of one token is not broadcast
    with contextlib.suppress(RuntimeError):
        if fits:
            return torch.broadcast_shapes(reference.shape, other.shape)
    raise UserError(
        f"The logits have shapes {list(reference.shape)} and {list(other.shape)}; their vocabularies must be equal, "
        "and the other sizes equal or 1."
    )


def _tokens_per_block(logits: torch.Tensor) -> int:
    elements = _BLOCK if logits.device.type == "cpu" else _GPU_BLOCK
    return max(1, elements // logits.shape[-1])


@torch.no_grad()
def compare_logits(reference: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> Comparison:
    """Compare several rows with one reference; its part of the work is shared.

    Parameters
    ----------
    reference : Tensor ``[tokens, vocabulary]``
    logits : Tensor ``[rows, tokens, vocabulary]``
    targets : int Tensor ``[tokens]``
        The real next token, or a negative number where it is unknown.

    Returns
    -------
    Comparison
        Tensors ``[rows, tokens]``.
    """
    rows, tokens, _ = logits.shape
    targets = targets.to(logits.device)
    kl = torch.empty(rows, tokens, dtype=torch.float64, device=logits.device)
    nll, changed = torch.empty_like(kl), torch.empty(rows, tokens, dtype=torch.bool, device=logits.device)
    step = _tokens_per_block(logits)
    for start in range(0, tokens, step):
        part = slice(start, start + step)
        shared = _Reference(reference[part], targets[part])
        for row in range(rows):
            kl[row, part], nll[row, part], changed[row, part] = shared.compare(logits[row, part])
    return Comparison(kl, nll, changed)


class _Reference:
    """The reference's share of a comparison, for a block of tokens ``[tokens, vocabulary]``."""

    def __init__(self, logits: torch.Tensor, targets: torch.Tensor | None = None):
        self.logits = logits.double()
        low, high = self.logits.aminmax(dim=-1)
        if not bool((high.isfinite() & ~low.isnan()).all()):
            raise UserError(
                "The reference logits hold NaN, +inf or a row without any possible token; no KL divergence is "
                "defined. Check the model's dtype: float32 or bfloat16 do not overflow where float16 does."
            )
        self.log_partition = self.logits.logsumexp(dim=-1, keepdim=True)
        self.probability = (self.logits - self.log_partition).exp_()
        self.top1 = logits.argmax(dim=-1, keepdim=True)
        self.targets = targets
        self.tiny = self.probability < _TINY if bool((low - high < -600).any()) else None

    def compare(self, logits: torch.Tensor):
        """``(kl, delta_nll or None, top1_changed)`` of one other row of the block."""
        other = logits.double()
        difference = other - self.logits
        top1_changed = logits.gather(-1, self.top1)[:, 0] != logits.amax(dim=-1)
        if self.tiny is not None:
            difference.masked_fill_(self.tiny, 0.0)
        mean = _dot(self.probability, difference)[:, None]
        centred = difference.sub_(mean)
        rest = _dot(self.probability, centred)
        excess = _dot(self.probability, torch.expm1(centred))
        if self.tiny is not None:
            # Tokens that the reference (all but) rules out count with the other's mass alone.
            mass = (other - self.log_partition - mean).exp().masked_fill(~self.tiny, 0.0).sum(dim=-1)
            excess = excess + mass
        growth = torch.log1p(excess)  # log Z_q - log Z_p - mean
        kl = growth - rest
        if self.tiny is not None:
            possible = self.logits > float("-inf")
            kl.masked_fill_((possible & (other == float("-inf"))).any(dim=-1), float("inf"))
        if not bool(kl.isfinite().all()):
            kl, growth = self._without_shortcut(other, kl, growth, mean[:, 0])
        return kl.clamp_(min=0.0), self._delta_nll(other, growth + mean[:, 0]), top1_changed

    def _without_shortcut(self, other, kl, growth, mean):
        """Rows with infinities or differences beyond exp's range, by the plain definition."""
        self._check(other)
        partition = other.logsumexp(dim=-1, keepdim=True)
        log_ratio = (self.logits - self.log_partition) - (other - partition)
        possible = self.logits > float("-inf")
        plain = torch.where(possible, self.probability * log_ratio, 0.0).nan_to_num(nan=0.0, posinf=torch.inf)
        ruled_out = (possible & (other == float("-inf"))).any(dim=-1)
        plain = plain.sum(dim=-1).masked_fill(ruled_out, float("inf"))
        bad = ~kl.isfinite()
        true_growth = (partition - self.log_partition)[:, 0]
        # growth is used with mean added; where mean is not finite, delta NLL needs the difference itself
        mean.masked_fill_(bad, 0.0)
        return torch.where(bad, plain, kl), torch.where(bad, true_growth, growth)

    @staticmethod
    def _check(other: torch.Tensor) -> None:
        high = other.amax(dim=-1)
        if not bool(high.isfinite().all()):
            raise UserError(
                "The logits hold NaN, +inf or a row without any possible token; no KL divergence is defined. "
                "Check the model's dtype: float32 or bfloat16 do not overflow where float16 does."
            )

    def _delta_nll(self, other: torch.Tensor, partition_growth: torch.Tensor):
        if self.targets is None:
            return None
        known = (self.targets >= 0) & (self.targets < other.shape[-1])
        index = self.targets.masked_fill(~known, 0)[:, None]
        before, after = self.logits.gather(-1, index)[:, 0], other.gather(-1, index)[:, 0]
        change = before - after + partition_growth
        change.masked_fill_((before == float("-inf")) & (after == float("-inf")), 0.0)
        return change.masked_fill_(~known, float("nan"))


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sum of products over the last dimension."""
    return torch.linalg.vecdot(a, b, dim=-1)
