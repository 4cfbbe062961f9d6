"""What a call inside ``compress`` may bring, and its pieces put together again."""

from __future__ import annotations

import torch
from transformers.cache_utils import DynamicCache

from infokv.errors import Refused


def given_tokens(given: dict) -> tuple[str, torch.Tensor]:
    """Takes ids or embeddings ``[rows, new, ...]`` out of a call's arguments: their name, and they themselves."""
    both = {name: given.pop(name, None) for name in ("input_ids", "inputs_embeds")}
    there = {name: one for name, one in both.items() if one is not None}
    if len(there) != 1:
        raise Refused(f"The call brings {' and '.join(there) or 'no tokens'}; pass either input_ids or inputs_embeds.")
    name, tokens = there.popitem()
    if tokens.shape[1] == 0:
        raise Refused("The call brings no tokens; pass at least one.")
    return name, tokens


def check_fresh(cache) -> None:
    """Refuse a cache that cannot be replaced by an empty store without anybody noticing."""
    if cache is None:
        return
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        raise Refused(
            f"The cache is a {type(cache).__name__}{' that offloads' if type(cache) is DynamicCache else ''}; inside "
            "compress() pass none or an empty DynamicCache (in generate(): no cache_implementation)."
        )
    if cache.get_seq_length() > 0:
        raise Refused(
            f"The cache already holds {cache.get_seq_length()} tokens, which were not stored in this compress() block; "
            "start with the whole text, or go on with the cache that a call in this block returned."
        )


def check_generation(given: dict, settings: list) -> None:
    """Refuse ways of generating that reorder rows or take tokens back.

    Parameters
    ----------
    given : dict
        Keywords of generate(), which win over its ``settings``.
    """

    def value(name):
        return given.get(name) or next((one for each in settings if (one := getattr(each, name, None))), None)

    ways = {
        "assistant_model": "assisted decoding",
        "assistant_early_exit": "assisted decoding",
        "prompt_lookup_num_tokens": "prompt lookup",
        "num_beams": "beam search",
    }
    for name, how in ways.items():
        if (value(name) or 1) != 1:
            raise Refused(
                f"{name} asks for {how}, which reorders a cache or takes tokens back, and evicted ones do not return; "
                "inside compress() use sampling or greedy decoding."
            )


def check_mask(mask, tokens: int) -> None:
    """Refuse an attention mask that hides something, or that is not about all ``tokens`` so far."""
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        raise Refused("A ready-made attention mask was passed; inside compress() pass none, or one of ones.")
    if mask.shape[1] != tokens:
        raise Refused(
            f"The attention mask covers {mask.shape[1]} tokens, and with this call {tokens} have passed; pass one over "
            "all of them (evicted ones included), or none."
        )
    if not bool(mask.all()):
        raise Refused("The batch is padded (its attention mask has zeros); use texts of equal length or one at a time.")


def check_positions(given, positions: torch.Tensor) -> None:
    """Refuse positions ``[rows or 1, new]`` other than those that follow the tokens seen."""
    if given is None:
        return
    if given.dim() != 2 or given.shape[1] != positions.shape[1] or not bool((given == positions).all()):
        first, last = int(positions[0, 0]), int(positions[0, -1])
        raise Refused(
            f"position_ids are {given.flatten()[:8].tolist()}...; these tokens are at {first} to {last} of their text, "
            "evicted tokens counted. Leave position_ids out."
        )


def check_same_text(store, given: list) -> None:
    """Refuse a generate() that goes on with the cache of another text.

    Parameters
    ----------
    store : CompressedStore
    given : list
        What generate() was given; the first tensor of ids counts, if it begins from the start.
    """
    ids = next((one for one in given if isinstance(one, torch.Tensor)), None)
    if ids is None or ids.is_floating_point() or ids.shape[1] <= store.seen or None in store.history:
        return
    held = torch.cat(store.history, dim=1)
    store.history[:] = [held]
    if held.shape[0] != ids.shape[0] or not torch.equal(held, ids[:, : held.shape[1]].to(held.device)):
        raise Refused(
            f"The cache holds {store.seen} tokens of another text; evicted tokens do not come back, so start this one "
            "without a cache."
        )


def check_rest(given: dict, *, whole: bool) -> None:
    """Refuse arguments that the store cannot honour."""
    if given.get("return_dict") is False:
        raise Refused("return_dict is False; inside compress() outputs are objects, so leave it out.")
    if given.get("output_attentions"):
        raise Refused("Attention weights are not computed inside compress(); leave output_attentions out.")
    extra = [name for name, value in given.items() if isinstance(value, torch.Tensor) and value.dim() > 1]
    if extra and not whole:
        raise Refused(f"The call brings {extra[0]} and is too long to run in one piece; raise prefill_chunk.")


def joined(outputs: list):
    """The outputs of the pieces of a call as one, states joined along the tokens."""
    whole = outputs[-1]
    if len(outputs) > 1:
        whole.last_hidden_state = torch.cat([one.last_hidden_state for one in outputs], dim=1)
        if getattr(whole, "hidden_states", None) is not None:
            whole.hidden_states = tuple(
                torch.cat(layer, dim=1) for layer in zip(*(one.hidden_states for one in outputs))
            )
    return whole
