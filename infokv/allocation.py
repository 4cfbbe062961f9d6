"""How many tokens each layer keeps, and how many generated ones: the one place that counts.

Our own counts (``uniform``, ``pyramid``, ``entropy``) are exact: they sum to layers x ``Budget.resolve(n)``. The
other allocations count as the code does that a preset follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from infokv.budget import Budget, Schedule
from infokv.errors import Refused
from infokv.scorers.infokv import InfoKV
from infokv.signals import TokenSignals

#: Mean budget over that of the last layer of a pyramid, for scorers that do not say.
_BETA = 20

#: A weight that is smaller than this share of the largest one counts as none.
_NOTHING = 1e-9


def layer_counts(n: int, layers: int, budget: Budget, scorer, weights: Sequence[float] | None = None) -> list[int]:
    """Tokens that each layer keeps of ``n``, those kept by rule included.

    Parameters
    ----------
    n : int
        Tokens of the prompt, at least 1.
    layers : int
    budget : Budget
        Its ``layers`` wins over the scorer's ``allocation``.
    scorer : Scorer
    weights : sequence of float, optional
        One per layer, for the allocation ``entropy``; see :func:`layer_weights`.

    Returns
    -------
    list of int
        Each from 1 to ``n``.

    Raises
    ------
    Refused
        If the allocation is unknown, or its weights are missing or unfit.
    """
    kind = layer_allocation(budget, scorer)
    counts = _COUNTS[kind](n, layers, budget, scorer, weights)
    return [min(n, max(1, count)) for count in counts]


def layer_allocation(budget: Budget, scorer) -> str:
    """The allocation of a budget and a scorer: the budget's ``layers``, or else the scorer's own."""
    kind = scorer.allocation if scorer.allocation == "full" else budget.layers or scorer.allocation
    if kind not in _COUNTS:
        raise Refused(f"The allocation is {kind!r}; it must be one of {', '.join(_COUNTS)}.")
    return kind


def generated_count(cuts: int, schedule: Schedule, budget: Budget, scorer) -> int:
    """Generated tokens that the ``cuts``-th cut leaves, the recent ones aside.

    ``floor(cuts * every * keep)``, exact on the decimal that was typed. RPC's own code leaves a whole number of
    tokens for each period instead.

    Parameters
    ----------
    cuts : int
        Which cut this is, from 1.
    schedule : Schedule
        Its ``keep`` wins over the budget's.
    budget : Budget
        With ``keep``, unless the schedule has it.
    scorer : Scorer
    """
    share = (budget if schedule.keep is None else Budget(keep=schedule.keep)).share
    if scorer.allocation == "rpc-official":
        ratio = 1 / float(share)  # a whole number in that code; typed as a share it may be off by a rounding
        whole = round(ratio)
        return cuts * int(schedule.every / (whole if math.isclose(ratio, whole, rel_tol=1e-9) else ratio))
    return int(cuts * schedule.every * share)


def budget_needs(scorer, budget: Budget) -> tuple[str, ...]:
    """Signals for cutting a prompt: the scorer's, and those of layer weights if the allocation asks for them."""
    by_entropy = layer_allocation(budget, scorer) == "entropy"
    return (*scorer.needs, *(weight_needs(scorer) if by_entropy else ()))


def weight_needs(scorer) -> tuple[str, ...]:
    """Signals that :func:`layer_weights` reads."""
    return _source(scorer).entropy_needs


def layer_weights(scorer, signals: TokenSignals) -> list[float]:
    """Mean entropy term of each layer over the candidates, for the allocation ``entropy``.

    InfoKV's ``(D + tau) * H`` with the scorer's own parameters if it is InfoKV, else with the defaults.
    """
    uncertain = _source(scorer).uncertainty(signals)[..., signals.candidates]
    return uncertain.double().mean(dim=(1, 2)).tolist()


def _source(scorer) -> InfoKV:
    return scorer if isinstance(scorer, InfoKV) else InfoKV()


def _uniform(n, layers, budget, scorer, weights) -> list[int]:
    return [budget.resolve(n)] * layers


def _full(n, layers, budget, scorer, weights) -> list[int]:
    return [n] * layers


def _pyramid(n, layers, budget, scorer, weights) -> list[int]:
    """Tokens beside those kept by rule fall evenly from the first layer to the last, which has 1 / beta of the mean."""
    mean, room = _beside_rules(n, budget, scorer)
    if mean <= 0 or layers == 1:
        return _uniform(n, layers, budget, scorer, weights)
    first = min(room, 2 * mean - mean / _beta(scorer))
    step = 2 * (first - mean) / (layers - 1)
    return _with_rules(n, budget, mean, room, [first - index * step for index in range(layers)])


def _entropy(n, layers, budget, scorer, weights) -> list[int]:
    """Tokens beside those kept by rule in proportion to the weights, none below 1 / beta of the mean."""
    if weights is None or len(weights) != layers:
        found = "none" if weights is None else len(weights)
        raise Refused(f"The allocation 'entropy' needs a weight for each of {layers} layers; there are {found}.")
    if not all(math.isfinite(one) and one >= 0 for one in weights):
        raise Refused(f"Layer weights are {list(weights)}; each must be a finite number of at least 0.")
    mean, room = _beside_rules(n, budget, scorer)
    if mean <= 0 or not any(weights):
        return _uniform(n, layers, budget, scorer, weights)
    low = min(room, mean / _beta(scorer))
    largest = max(weights)
    weights = [one / largest if one > _NOTHING * largest else 0.0 for one in weights]
    # The common factor at which the clipped shares have the right sum; the sum grows with it.
    below, above = 0.0, room / min(one for one in weights if one > 0)
    for _ in range(200):
        factor = (below + above) / 2
        total = math.fsum(min(room, max(low, factor * one)) for one in weights)
        below, above = (factor, above) if total < layers * mean else (below, factor)
    return _with_rules(n, budget, mean, room, [min(room, max(low, above * one)) for one in weights])


def _beside_rules(n: int, budget: Budget, scorer) -> tuple[int, int]:
    """Of the tokens that stay, and of all: how many are beside those kept by rule (at least one, in each layer)."""
    by_rule = min(n, max(1, scorer.sinks + scorer.recent))
    return budget.resolve(n) - by_rule, n - by_rule


def _beta(scorer) -> int:
    return getattr(scorer, "beta", _BETA)


def _with_rules(n: int, budget: Budget, mean: int, room: int, shares: list[float]) -> list[int]:
    """Whole numbers near the shares that sum to layers x mean, none above ``room``; plus those kept by rule."""
    counts = [min(room, math.floor(share + 1e-9)) for share in shares]
    missing = mean * len(shares) - sum(counts)
    order = sorted(range(len(shares)), key=lambda index: (counts[index] - shares[index], index))
    while missing > 0:
        for index in [one for one in order if counts[one] < room][:missing]:
            counts[index] += 1
            missing -= 1
    return [count + budget.resolve(n) - mean for count in counts]


def _kvpress(n, layers, budget, scorer, weights) -> list[int]:
    """The float product with one minus the removed share, truncated."""
    return [int(_kvpress_product(n, budget))] * layers


def _pyramid_kvpress(n, layers, budget, scorer, weights) -> list[int]:
    """Rounded floats; the window inside; the same for all layers where the last would have less than the window."""
    mean = _kvpress_product(n, budget)
    last = mean / scorer.beta
    first = 2 * mean - last
    if first >= n - scorer.window:
        first = n - scorer.window
        last = 2 * mean - first
    if layers == 1 or not n >= first >= last >= scorer.window:
        return [round(mean)] * layers
    step = (first - last) / (layers - 1)
    return [round(first - index * step) for index in range(layers)]


def _kvpress_product(n: int, budget: Budget) -> float:
    return min(n, budget.tokens) if budget.keep is None else n * (1 - float(1 - budget.share))


def _fastkv_official(n, layers, budget, scorer, weights) -> list[int]:
    return [budget.resolve(n) if budget.keep is None else int(n * float(budget.share))] * layers


def _pyramid_official(n, layers, budget, scorer, weights) -> list[int]:
    """Whole-number steps; the window comes on top of a layer's share, so that the sum is a little above the budget.

    No pyramid for prompts shorter than twice the budget beside the window.
    """
    capacity = budget.resolve(n) if budget.keep is not None else budget.tokens
    if n < capacity:
        return [n] * layers
    mean = capacity - scorer.window
    if mean < 1 or layers == 1 or n < 2 * mean:
        return [capacity] * layers
    last = mean // scorer.beta
    first = 2 * mean - last
    if first >= n - scorer.window:
        first = n - scorer.window
        last = 2 * mean - first
    step = (first - last) // (layers - 1)
    return [first - index * step + scorer.window for index in range(layers)]


_COUNTS = {
    "uniform": _uniform,
    "pyramid": _pyramid,
    "entropy": _entropy,
    "full": _full,
    "kvpress": _kvpress,
    "pyramid-kvpress": _pyramid_kvpress,
    "pyramid-official": _pyramid_official,
    "fastkv-official": _fastkv_official,
    "rpc-official": _uniform,
}

#: Every allocation that a scorer may declare.
ALLOCATIONS = tuple(_COUNTS)
