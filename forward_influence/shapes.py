"""Sizes of each layer from a configuration: some architectures have other ones in every layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a decoder block.

    Attributes
    ----------
    queries, heads, width : int
        Query heads, key-value heads, numbers of a head.
    inner : int
        Width of the feed-forward part, of all experts that a token takes together.
    """

    queries: int
    heads: int
    width: int
    inner: int


def layer_shapes(config) -> list[LayerShape]:
    """Sizes of all layers.

    A value that differs by layer is a list, or transformers offers a configuration of each layer and
    refuses to tell the common value.

    Parameters
    ----------
    config : PretrainedConfig
    """
    text = config.get_text_config()
    layers = getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers
    return [_shape(layers[index], index) for index in range(text.num_hidden_layers)]


def _shape(layer, index: int) -> LayerShape:
    def value(name: str) -> int | None:
        found = getattr(layer, name, None)
        return found[index] if isinstance(found, list | tuple) else found

    queries, hidden = value("num_attention_heads"), layer.hidden_size
    inner = value("moe_intermediate_size") or value("intermediate_size") or 4 * hidden
    return LayerShape(
        queries=queries,
        heads=value("num_key_value_heads") or queries,
        width=value("head_dim") or hidden // queries,
        inner=inner * (value("num_experts_per_tok") or 1),
    )
