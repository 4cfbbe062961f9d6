"""Which model a tuned scorer was made for: sizes, and a fingerprint of some weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

import torch

from infokv.errors import Refused

#: Weights that the fingerprint looks at.
_SAMPLES = 1024

#: Multiples of the golden ratio's fraction are spread evenly over any range, whatever its length.
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class ModelIdentity:
    """What tells a model from others.

    Attributes
    ----------
    architecture : str
        The configuration's ``model_type``.
    layers, heads, kv_heads, vocabulary : int
    weights : str
        Two hashes of 1,024 fixed weights, rounded to bfloat16 and to float16: weights in float32 share one of them
        with the same weights in either. Empty where it is not known yet.
    """

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    weights: str = ""

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping) -> ModelIdentity:
        """Inverse of :meth:`to_dict`.

        Raises
        ------
        Refused
            If a value is missing, unknown or of another kind.
        """
        names = {one.name: str if one.type == "str" else int for one in fields(cls)}
        fits = isinstance(values, Mapping) and set(values) == set(names)
        if not fits or any(type(values[name]) is not kind for name, kind in names.items()):
            raise Refused(
                f"The model of a tuned file is {values!r}; it must have {', '.join(names)}, as tune writes them: tune "
                "again."
            )
        return cls(**values)

    def difference(self, other: ModelIdentity) -> str | None:
        """In what another model differs, in a few words; None if it is the same as far as both are known."""
        mine, its = self.to_dict(), other.to_dict()
        parts = [f"{name} {mine[name]!r} there, {its[name]!r} here" for name in mine if name != "weights"
                 and mine[name] != its[name]]  # fmt: skip
        known = self.weights and other.weights
        if not parts and known and not set(self.weights.split("-")) & set(other.weights.split("-")):
            parts.append("other weights in the same sizes")
        return "; ".join(parts) or None


def sizes_of(config) -> ModelIdentity:
    """The identity of a model whose weights are not loaded yet."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    return ModelIdentity(
        architecture=str(config.model_type),
        layers=int(text.num_hidden_layers),
        heads=int(heads),
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        vocabulary=int(text.vocab_size),
    )


def identity_of(model) -> ModelIdentity:
    """The identity of a loaded model."""
    return ModelIdentity(**sizes_of(model.config).to_dict() | {"weights": weights_fingerprint(model)})


def weights_fingerprint(model) -> str:
    """Hashes of 1,024 weights at fixed places in bfloat16 and in float16, each 16 hex digits."""
    named = sorted((name, one) for name, one in model.named_parameters() if one.is_floating_point())
    sizes = [one.numel() for _, one in named]
    places = sorted({int((sample + 0.5) * _GOLDEN % 1.0 * sum(sizes)) for sample in range(_SAMPLES)})
    digests, first, at = {torch.bfloat16: hashlib.sha256(), torch.float16: hashlib.sha256()}, 0, 0
    for (_, one), size in zip(named, sizes):
        inside = []
        while at < len(places) and places[at] < first + size:
            inside.append(places[at] - first)
            at += 1
        first += size
        if inside:
            index = torch.tensor(inside, device=one.device)
            # Unravelled by hand: flattening a transposed weight would copy it.
            values = one.detach()[torch.unravel_index(index, one.shape)] if one.dim() else one.detach()[None]
            for dtype, digest in digests.items():
                digest.update(values.to(dtype).view(torch.int16).cpu().numpy().tobytes())
    return "-".join(digest.hexdigest()[:16] for digest in digests.values())


def foreign(scorer, model: ModelIdentity) -> str | None:
    """The sentence about a scorer that was tuned for another model; None for any other.

    Parameters
    ----------
    scorer : Scorer
        Its ``tuned_for`` says for what it was tuned, if it came from a tuned file.
    model : ModelIdentity
        The one that it is to be used with.
    """
    made = getattr(scorer, "tuned_for", None)
    difference = None if made is None else made.difference(model)
    return f"{type(scorer).__name__} was tuned for another model ({difference})" if difference else None


def refuse_foreign(scorer, model: ModelIdentity) -> None:
    """Refuse a scorer that was tuned for another model.

    Raises
    ------
    Refused
        In a sentence that says how the models differ.
    """
    if sentence := foreign(scorer, model):
        raise Refused(
            f"{sentence}; tune for this model with `forward-influence tune`, or accept it: --accept-model, or "
            "load(path, accept_model=True)."
        )
