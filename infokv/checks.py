"""Contract checks that anybody can run on an own scorer: ``check_scorer(MyScorer)``."""

from __future__ import annotations

import dataclasses

import torch

from infokv.errors import Refused
from infokv.kernels import LayerFacts
from infokv.scorer import SCORERS
from infokv.scorer import check_facts as scorer_facts
from infokv.signals import TokenSignals, parse_signal, signal


def require(holds: object, sentence: str) -> None:
    """Raise AssertionError with `sentence` unless something holds.

    Not an assert statement, which ``python -O`` strips: these checks are for users.
    """
    if not holds:
        raise AssertionError(sentence)


def synthetic_signals(needs=(), *, tokens: int = 96, layers: int = 3, query_heads: int = 4, kv_heads: int = 2,
                      head_dim: int = 8, seed: int = 0) -> TokenSignals:  # fmt: skip
    """Random signals of plausible size and sign, without a model.

    Parameters
    ----------
    needs : iterable of str
        Names of the signals to make.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def make(kind, parameters):
        if kind in ("entropy", "self_information"):
            return normal(tokens).abs() * 2
        if kind == "representation_evolution":
            return torch.cat([torch.rand(layers - 1, tokens, generator=generator), torch.zeros(1, tokens)])
        if kind in ("window_attention", "attention_mass"):
            return (normal(layers, query_heads, tokens) * 2).softmax(dim=-1)
        if kind == "future_queries":
            return [normal(query_heads, 1 + head_dim, head_dim) for _ in range(layers)]
        heads = query_heads if kind in ("queries", "unrotated_queries") else kv_heads
        length = min(tokens, parameters.get("last") or tokens)
        return [normal(heads, length, head_dim) for _ in range(layers)]

    values = {}
    for name in needs:
        kind, parameters = parse_signal(name)
        values[signal(kind, **parameters)] = make(kind, parameters)
    return TokenSignals(
        input_ids=torch.randint(0, 1000, (tokens,), generator=generator),
        layers=layers, query_heads=query_heads, kv_heads=kv_heads,
        facts=(LayerFacts(head_dim**-0.5, None, None),) * layers,
        candidates=range(4, tokens - 16), seed=seed, values_by_name=values,
    )  # fmt: skip


def check_scorer(given) -> None:
    """Run all checks on a scorer's class (with its default parameters) or on an instance.

    Raises
    ------
    AssertionError
        With a sentence about what does not hold.
    """
    scorer = given() if isinstance(given, type) else given
    check_scoring(scorer)
    check_facts(scorer)


def check_scoring(scorer) -> None:
    """The checks of anything with ``needs`` and ``score``, such as a selector that ranks tokens."""
    for check in (
        check_is_frozen_dataclass, check_says_what_it_is, check_needs, check_shape, check_deterministic,
        check_pure, check_survives_its_text,
    ):  # fmt: skip
        check(scorer)


def check_is_frozen_dataclass(scorer) -> None:
    """Its fields are its parameters, and nothing changes them."""
    cls = type(scorer)
    name = cls.__name__
    require(dataclasses.is_dataclass(cls), f"{name} is no dataclass; decorate it with @dataclass(frozen=True).")
    require(cls.__dataclass_params__.frozen, f"{name} is not frozen; decorate it with @dataclass(frozen=True).")


def check_says_what_it_is(scorer) -> None:
    """Its docstring starts with the line that lists show."""
    doc = type(scorer).__doc__ or ""
    made_by_dataclass = doc.startswith(f"{type(scorer).__name__}(")
    require(doc.strip() and not made_by_dataclass, f"{type(scorer).__name__} has no docstring to show in lists.")


def check_facts(scorer) -> None:
    """What it declares about sinks, recent tokens, allocation and schedule is there and says something."""
    try:
        scorer_facts(scorer)
    except Refused as error:
        raise AssertionError(str(error)) from None


def check_needs(scorer) -> None:
    """It asks for signals that exist, and reads no others."""
    for name in scorer.needs:
        parse_signal(name)
    scorer.score(synthetic_signals(scorer.needs))


def check_shape(scorer) -> None:
    """Float32 scores ``[layers or 1, kv_heads or 1, tokens]`` without NaN, for several shapes of model."""
    for layers, query_heads, kv_heads, tokens in ((3, 4, 2, 96), (2, 3, 1, 131), (1, 2, 2, 100)):
        signals = synthetic_signals(
            scorer.needs, layers=layers, query_heads=query_heads, kv_heads=kv_heads, tokens=tokens
        )
        scores = scorer.score(signals)
        shape = tuple(scores.shape)
        heads = query_heads if getattr(scorer, "heads", "kv") == "query" else kv_heads
        fits = len(shape) == 3 and shape[0] in (1, layers) and shape[1] in (1, heads) and shape[2] == tokens
        require(fits, f"score gave {list(shape)}; it must be [{layers} or 1, {heads} or 1, {tokens}].")
        require(
            scores.dtype == torch.float32, f"score gave {scores.dtype}; it must be float32 whatever the model's dtype."
        )
        require(not scores[..., signals.candidates].isnan().any(), "score gave NaN for a candidate.")


def check_deterministic(scorer) -> None:
    """The same signals give the same scores, whatever was drawn in between."""
    signals = synthetic_signals(scorer.needs)
    first = scorer.score(signals).clone()
    torch.randn(7)
    require(torch.equal(first, scorer.score(signals)), "score gave other numbers for the same signals.")


def check_pure(scorer) -> None:
    """Scoring changes neither the signals nor torch's global generator."""
    signals, twin = synthetic_signals(scorer.needs), synthetic_signals(scorer.needs)
    torch.randn(7)  # away from any state that an earlier call may have set by a fixed seed
    state = torch.random.get_rng_state()
    scorer.score(signals)
    require(
        torch.equal(state, torch.random.get_rng_state()),
        "score draws from torch's global generator; make one from signals.seed.",
    )
    for name, value in twin.values_by_name.items():
        now = signals.values_by_name[name]
        pairs = zip(now, value) if isinstance(value, list) else [(now, value)]
        require(all(torch.equal(a, b) for a, b in pairs), f"score changed the signal {name!r}.")


def check_survives_its_text(scorer) -> None:
    """Its canonical text makes an equal object, so that a run can be repeated from its record."""
    text = SCORERS.canonical(scorer)
    if "<locals>" in text:
        return  # a class inside a function has no importable path; a registered one is found by name
    again = SCORERS.create(text)
    require(again == scorer, f"{text!r} gives {again!r}, not {scorer!r}.")
