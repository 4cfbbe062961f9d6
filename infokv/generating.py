"""What a running generate() says about the text that it is about."""

from __future__ import annotations

import threading

import torch

from infokv.compressed import CompressedStore

#: Length of the prompt, and of the whole text where it is known.
Lengths = tuple[int, int | None]


def asked_for(args: tuple, kwargs: dict, settings: list) -> tuple[list, Lengths | None]:
    """What generate() was given, ids or embeddings, and the lengths that follow; None where it was given neither.

    Parameters
    ----------
    settings : list
        Configurations of generation, the first one that says something wins; keywords win over them.
    """
    given = [*args[:1], *(kwargs.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))]
    prompt = next((one.shape[1] for one in given if isinstance(one, torch.Tensor)), None)
    new, total = (
        kwargs.get(name) or next((value for one in settings if (value := getattr(one, name, None))), None)
        for name in ("max_new_tokens", "max_length")
    )
    return given, None if prompt is None else (prompt, prompt + new if new else total)


class OfThread(threading.local):
    """What one thread's generate() and calls tell each other.

    Attributes
    ----------
    lengths : Lengths or None
        Of the text that generate() will begin.
    text : CompressedStore or None
        What the running generate() began with.
    ran : CompressedStore or None
        What the base model has just run on.
    own : bool
        Whether the next call is generate()'s own.
    depth : int
        How many generate() are running, each inside the one before.
    """

    lengths: Lengths | None = None
    text: CompressedStore | None = None
    ran: CompressedStore | None = None
    own: bool = False
    depth: int = 0
