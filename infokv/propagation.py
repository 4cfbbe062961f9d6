"""Token-selective propagation: behind one layer, only some tokens of the prompt go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from infokv.calls import decoder_layers
from infokv.recorder import Recorder
from infokv.scorers.fastkv import FastKV, propagated_tokens
from infokv.store import TokenStore


@contextlib.contextmanager
def propagating(model, store: TokenStore, recorder: Recorder, scorer: FastKV, prompt: int) -> Iterator[None]:
    """Inside the block, a call with the whole prompt leaves tokens out behind layer ``scorer.propagate``.

    Deeper layers compute and store the chosen tokens alone, with their own positions and rotations.

    Parameters
    ----------
    store : TokenStore
        Empty, one row.
    recorder : Recorder
        Listens to the call and has the scorer's signals.
    prompt : int
        Tokens of the call.

    Notes
    -----
    Source: FastKV, arXiv 2502.01068, token-selective propagation.
    """
    count = scorer.propagated(prompt)
    blocks = decoder_layers(model)
    chosen: list[torch.Tensor] = []

    def choose(module, args, output):
        index = scorer.propagate
        layer = store.layers[index]
        region = range(max(1, layer.length - scorer.recent))
        signals = recorder.of_layer(0, index, layer, candidates=region)
        tokens = propagated_tokens(scorer.score(signals)[0], count, scorer.window)
        chosen.append(tokens)
        for deeper in store.layers[index + 1 :]:
            deeper.expect(tokens, prompt)
        states = output[0] if isinstance(output, tuple) else output
        left = states[:, tokens]
        return (left, *output[1:]) if isinstance(output, tuple) else left

    def shorten(module, args, kwargs):
        """What the model computed for all tokens, positions and rotations, for the chosen ones."""
        return args, {name: _of_tokens(value, chosen[0], prompt) for name, value in kwargs.items()}

    handles = [blocks[scorer.propagate].register_forward_hook(choose)]
    handles += [block.register_forward_pre_hook(shorten, with_kwargs=True) for block in blocks[scorer.propagate + 1 :]]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _of_tokens(value, tokens: torch.Tensor, prompt: int):
    """Tensors ``[rows, prompt, ...]`` cut to some tokens, in tuples too; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[1] == prompt:
        return value[:, tokens.to(value.device)]
    return tuple(_of_tokens(one, tokens, prompt) for one in value) if type(value) is tuple else value
