"""A ``config.json`` that may be broken in any way: what it must hold before anybody works with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forward_influence.context import LIMIT_NAMES
from forward_influence.errors import UserError

#: Lists of names that are relied on before transformers sees the file.
_LISTS = ("architectures", "layer_types", "layers_block_type")

_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "intermediate_size", "num_experts_per_tok", *LIMIT_NAMES)

#: More layers than any model has; far beyond, building the model would never end.
_MOST_LAYERS = 10_000


def read_config(file: Path) -> dict[str, Any]:
    """The contents of ``config.json``.

    Raises
    ------
    UserError
        If it cannot be read, is no JSON object, or names the model's type or layers by something that is no name.
    """
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{str(file)!r} cannot be read ({error.strerror}); check its permissions.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{str(file)!r} is not valid JSON ({error}); fetch it again.") from error
    if not isinstance(config, dict):
        raise _unfit(file, f"holds a JSON {type(config).__name__}", "an object")
    if not isinstance(kind := config.get("model_type"), str | None):
        raise _unfit(file, f"has model_type {_short(kind)}", "a name such as 'llama'")
    for name in _LISTS:
        value = config.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
            raise _unfit(file, f"has {name} {_short(value)}", "a list of names")
    return config


def check_sizes(config: Any, label: str) -> None:
    """Refuse sizes that no model has: transformers builds a model of -3 layers without a word.

    Parameters
    ----------
    config : PretrainedConfig
        Values that differ by layer may be lists.
    label : str
        How the user named the model.

    Raises
    ------
    UserError
        Names the key and its value.
    """
    text = config.get_text_config()
    values = text.to_dict()
    names = getattr(text, "attribute_map", {})
    for name in (*_SIZES, *_OPTIONAL_SIZES):
        value = values.get(names.get(name, name))
        if value is None and (name in _OPTIONAL_SIZES or names.get(name, name) not in values):
            continue
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, bool) or not isinstance(one, int) or one < 1:
                raise UserError(
                    f"the configuration of model {label!r} has {name} {_short(value)}; it must be a whole number of at "
                    "least 1, so fetch config.json again or correct it."
                )
    if (layers := getattr(text, "num_hidden_layers", 0)) > _MOST_LAYERS:
        raise UserError(
            f"the configuration of model {label!r} has num_hidden_layers {layers}; no model has more than "
            f"{_MOST_LAYERS}, so fetch config.json again or correct it."
        )


def _unfit(file: Path, what: str, wanted: str) -> UserError:
    return UserError(f"{str(file)!r} {what} where {wanted} is needed; fetch the file again or correct it.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
