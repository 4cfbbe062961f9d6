"""What a scorer is, and where scorers are registered."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from infokv.errors import Refused
from infokv.registry import Registry, construct, read_json
from infokv.signals import TokenSignals

#: What a tuned file holds.
TUNED_KEYS = ("method", "parameters", "model", "provenance")


class Scorer:
    """How much each cached token matters. The contract; subclassing it only brings the defaults.

    A scorer is a frozen dataclass whose fields are its parameters. It holds no state: the same signals give
    the same scores.

    Attributes
    ----------
    needs : tuple of str
        Names of the signals that ``score`` reads (see :data:`infokv.signals.SIGNALS`).
    sinks, recent : int
        Positions at the start and at the end that compression keeps by rule, inside the budget.
    allocation : str
        How compression spreads its budget over layers: ``"uniform"``, ``"pyramid"``, ``"entropy"``, or as other
        code counts (see :mod:`infokv.allocation`).
    heads : str
        ``"query"``: the scores are per query head, which a selector can average but no cache of KV heads can hold.
        Any other value: per KV head or shared.
    schedule : Schedule or None
        When generated tokens are cut; None: never.
    tuned_for : ModelIdentity or None
        The model for which its parameters were tuned, where they come from a tuned file; it is refused with others.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    sinks: ClassVar[int] = 0
    recent: ClassVar[int] = 0
    allocation: ClassVar[str] = "uniform"
    heads: ClassVar[str] = "kv"
    schedule: ClassVar[Any] = None
    tuned_for: ClassVar[Any] = None

    def score(self, signals: TokenSignals) -> torch.Tensor:
        """Importance of each token, float32 ``[layers or 1, kv_heads or 1, tokens]``; higher = more important.

        It depends on the signals alone. At cuts of generated tokens they describe the tokens that one layer still
        has (``layers`` is 1): ``signals.positions`` says where they were, ``signals.seen`` where the next one goes.
        Only positions in ``signals.candidates`` are compared; the others may hold anything but NaN.
        """
        raise TypeError(f"{type(self).__name__} does not say how it scores; give it a method score(signals).")

    @classmethod
    def load(cls, path: str, *, accept_model: bool = False) -> Scorer:
        """From a JSON file: an object of parameters, or a tuned file, as ``forward-influence tune`` writes it.

        Parameters
        ----------
        path : str
        accept_model : bool
            Forget for which model the parameters were tuned.

        Raises
        ------
        Refused
            If the file is unreadable, about another method, or has an unknown or unfit key or parameter.
        """
        from infokv.identity import ModelIdentity

        content = read_json(path)
        name = SCORERS.name_of(cls)
        if "parameters" not in content:
            return construct(cls, name, content)
        if unknown := sorted(set(content) - set(TUNED_KEYS)):
            raise Refused(f"{path!r} has an unknown key {unknown[0]!r}; a tuned file has {', '.join(TUNED_KEYS)}.")
        if content.get("method") != name:
            other = content.get("method")
            raise Refused(
                f"{path!r} is about the method {other!r}, not {name!r}; write {other}:{path}, or load it with the "
                "class of that method."
            )
        if not isinstance(content["parameters"], dict):
            raise Refused(f"{path!r} has parameters that are no object; write them like {{'alpha': 0.8}}.")
        made = construct(cls, name, content["parameters"])
        model = None if content.get("model") is None else ModelIdentity.from_dict(content["model"])
        if model is not None and not accept_model:
            # No field: equal parameters are equal scorers, whoever chose them, and a changed copy was not tuned.
            object.__setattr__(made, "tuned_for", model)
        return made

    def for_decoding(self) -> Scorer:
        """The scorer that is asked at cuts of generated tokens; by default the same one."""
        return self


#: Built-in and added scorers.
SCORERS = Registry(
    "scorer",
    "infokv.scorers",
    {
        "infokv": "infokv.scorers.infokv:InfoKV",
        "snapkv": "infokv.scorers.snapkv:SnapKV",
        "snapkv-kvpress": "infokv.scorers.snapkv:SnapKVKvpress",
        "snapkv-official": "infokv.scorers.snapkv:SnapKVOfficial",
        "pyramidkv": "infokv.scorers.pyramidkv:PyramidKV",
        "pyramidkv-kvpress": "infokv.scorers.pyramidkv:PyramidKVKvpress",
        "pyramidkv-official": "infokv.scorers.pyramidkv:PyramidKVOfficial",
        "fastkv": "infokv.scorers.fastkv:FastKV",
        "fastkv-official": "infokv.scorers.fastkv:FastKVOfficial",
        "expected-attention": "infokv.scorers.expected_attention:ExpectedAttention",
        "rpc": "infokv.scorers.rpc:RPC",
        "rpc-official": "infokv.scorers.rpc:RPCOfficial",
        "rkv": "infokv.scorers.rkv:RKV",
        "tova": "infokv.scorers.tova:TOVA",
        "h2o": "infokv.scorers.h2o:H2O",
        "observed-attention": "infokv.scorers.observed_attention:ObservedAttention",
        "streaming-llm": "infokv.scorers.streaming_llm:StreamingLLM",
        "knorm": "infokv.scorers.knorm:KNorm",
        "keydiff": "infokv.scorers.keydiff:KeyDiff",
        "lagkv": "infokv.scorers.lagkv:LagKV",
        "mixture": "infokv.scorers.mixture:Mixture",
        "self-information": "infokv.scorers.self_information:SelfInformation",
        "random": "infokv.scorers.random:Random",
        "full": "infokv.scorers.full_cache:FullCache",
    },
)


def register(name: str):
    """Class decorator: ``@register("mine")`` makes a scorer available by name in commands and in Python."""
    return SCORERS.register(name)


def check_facts(scorer) -> None:
    """Refuse a scorer without the declared facts, or with ones that say nothing.

    Raises
    ------
    Refused
        In a sentence that names the fact.
    """
    from infokv.allocation import ALLOCATIONS  # it counts for scorers, so it stands above this file
    from infokv.budget import Schedule

    name = type(scorer).__name__
    facts = [fact for fact in vars(Scorer) if not fact.startswith("_") and fact != "tuned_for"]
    missing = [fact for fact in facts if not hasattr(scorer, fact)]
    if missing:
        raise Refused(f"{name} has no {missing[0]}; derive it from infokv.Scorer, which has defaults.")
    for fact in ("sinks", "recent"):
        value = getattr(scorer, fact)
        if type(value) is not int or value < 0:
            raise Refused(f"{fact} of {name} is {value!r}; it must be a whole number of at least 0.")
    if scorer.allocation not in ALLOCATIONS:
        raise Refused(f"allocation of {name} is {scorer.allocation!r}; it must be one of {', '.join(ALLOCATIONS)}.")
    if not (scorer.schedule is None or isinstance(scorer.schedule, Schedule)):
        raise Refused(f"schedule of {name} is {scorer.schedule!r}; it must be a Schedule or None.")


def kv_head_method(scorer) -> str:
    """The name of the nearest method of the same family that has a set for each KV head."""
    family = (cls() for cls in type(scorer).__mro__ if issubclass(cls, Scorer) and cls is not Scorer)
    fitting = (one for one in family if getattr(one, "heads", "kv") != "query")
    return SCORERS.canonical(next(fitting, SCORERS.create("snapkv")))


def get_scorer(text: str) -> Scorer:
    """A scorer from its text, such as ``"infokv:alpha=0.5"``; see :mod:`infokv.registry` for the grammar."""
    return SCORERS.create(text)


def usable_scorer(scorer: Scorer | str) -> Scorer:
    """A scorer that a cache of KV heads can follow, from an instance or a text."""
    if isinstance(scorer, str):
        scorer = get_scorer(scorer)
    if isinstance(scorer, type) or not hasattr(scorer, "score"):
        raise Refused(f"The scorer is {scorer!r}; pass an instance, such as SnapKV(), or a name, such as 'snapkv'.")
    check_facts(scorer)
    if scorer.heads == "query":
        raise Refused(
            f"{SCORERS.canonical(scorer)} chooses tokens for each query head, and a cache holds KV heads; use "
            f"{kv_head_method(scorer)}, which chooses them for each KV head."
        )
    return scorer
