"""How long a text a model takes, and the request to go past it."""

from __future__ import annotations

import copy
import numbers
import operator
from dataclasses import dataclass
from typing import Any

from forward_influence.errors import UserError

#: How configurations call the number of tokens that a model was made for.
LIMIT_NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")


@dataclass(frozen=True)
class ContextPlan:
    """The configuration to load a model with.

    Attributes
    ----------
    config : object
        The model's own configuration, or a changed copy.
    limit : int or None
        Tokens that fit; None where the model states no limit.
    method : str or None
        What was changed, such as ``"yarn:8192->16048"``; part of a run's identity.
    notice : str or None
    """

    config: Any
    limit: int | None
    method: str | None = None
    notice: str | None = None


def context_limit(config: Any) -> int | None:
    """Tokens that the model was made for, or None if it states no limit."""
    values = (getattr(config, name, None) for name in LIMIT_NAMES)
    return next((int(value) for value in values if value), None)


def plan_context(config: Any, extend_context: str | None = None, target_length: int | None = None) -> ContextPlan:
    """Decide how the model is loaded so that `target_length` tokens fit. Nothing is changed unasked.

    ``"yarn"`` rescales the rotary frequencies by target / limit (YaRN, arXiv 2309.00071, sections 3.2
    to 3.4; transformers' implementation with its default ramp and temperature). Layers with a sliding
    window keep theirs: they never look that far back.

    Raises
    ------
    UserError
        If the method is unknown, the length is missing, or the model has no plain RoPE to rescale.
    """
    limit = context_limit(config)
    if extend_context is None:
        return ContextPlan(config, limit)
    if extend_context != "yarn":
        raise UserError(f"extend_context {extend_context!r} is unknown; the one method is 'yarn'.")
    if target_length is None:
        raise UserError("extend_context='yarn' needs target_length, the number of tokens that must fit.")
    if not isinstance(target_length, numbers.Integral) or isinstance(target_length, bool):
        raise UserError(f"target_length is {target_length!r}; it must be a whole number of tokens.")
    target_length = operator.index(target_length)  # a number of numpy has no place in a configuration
    if limit is None or target_length <= limit:
        fits = f"{target_length} tokens fit into the model's {limit or 'unlimited'} tokens of context"
        return ContextPlan(config, limit, notice=f"The context was not extended: {fits}.")
    extended = copy.deepcopy(config)
    parameters = _plain_rope(extended)
    parameters.update(rope_type="yarn", factor=target_length / limit, original_max_position_embeddings=limit)
    extended.max_position_embeddings = target_length
    return ContextPlan(
        extended,
        target_length,
        f"yarn:{limit}->{target_length}",
        f"The model's context is stretched from {limit} to {target_length} tokens with YaRN, "
        "which changes its predictions at every length.",
    )


def verify_extension(model: Any, method: str | None) -> None:
    """Check on the loaded model that a requested extension took effect.

    Raises
    ------
    UserError
        If no rotary embedding of the model uses it.
    """
    if method is None:
        return
    kinds: list[str] = []
    for module in model.modules():
        kind = getattr(module, "rope_type", ())
        kinds += kind.values() if isinstance(kind, dict) else [kind]
    if "yarn" not in kinds:
        raise UserError(f"{type(model).__name__} ignores YaRN; leave out --extend-context and take a shorter horizon.")


def _plain_rope(config: Any) -> dict:
    """The rotary parameters of full-attention layers, inside `config`."""
    parameters = getattr(config, "rope_parameters", None)
    if parameters and "full_attention" in parameters:
        parameters = parameters["full_attention"]
    kind = parameters.get("rope_type", parameters.get("type")) if parameters else None
    if kind != "default":
        what = f"already scales its rotary embedding ({kind})" if kind else "has no rotary embedding to rescale"
        raise UserError(
            f"The context of a {config.model_type!r} model cannot be extended, because it {what}; "
            "leave out --extend-context and take a shorter horizon."
        )
    return parameters
