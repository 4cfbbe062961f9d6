"""compress(): the model is left as it was found, and its hooks see what they would see without it."""

from __future__ import annotations

import pytest
import torch
from compress_runs import PROMPT, SCORERS, run
from tiny_models import build, random_ids

from infokv import Budget, InfoKV, Schedule, SnapKV, compress
from infokv.errors import Refused


@pytest.mark.parametrize("error_kind", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_no_trace(error_kind):
    model, ids = build("llama"), random_ids(PROMPT)
    expected = run(model, ids, (20,))
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    state = {id(module): dict(module.__dict__) for module in model.modules()}

    def fail(*args):
        raise error_kind("stop")

    def broken_block():
        with compress(model, SCORERS["mixed"], Budget(keep=0.4)):
            run(model, ids, ())
            trap = model.model.layers[1].register_forward_hook(fail)
            try:
                run(model, ids, ())
            finally:
                trap.remove()

    with pytest.raises(error_kind):
        broken_block()
    assert hooks == sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())
    assert all(dict(module.__dict__) == state[id(module)] for module in model.modules())
    assert model.config._attn_implementation != "infokv_store"
    assert torch.equal(run(model, ids, (20,)), expected)


def test_hooks_of_the_caller_see_the_callers_calls_alone():
    model, ids, seen = build("llama"), random_ids(PROMPT), []
    scorer = InfoKV(window=6, alpha=0)

    def kept():
        with compress(model, scorer, Budget(keep=0.4), prefill_chunk=9, decode=Schedule(every=4, recent=1)) as handle:
            run(model, ids, (30,))
            return handle.kept

    expected = kept()
    hooks = [
        model.register_forward_hook(lambda module, args, output: seen.append(output.logits.mul_(0.05).shape[1])),
        model.register_forward_pre_hook(lambda module, args: None),
        model.model.register_forward_hook(lambda module, args, output: seen.append("base")),
    ]
    with_hooks = kept()
    for hook in hooks:
        hook.remove()
    assert seen == ["base", 30, "base", 10]
    assert all(torch.equal(one, other) for one, other in zip(expected, with_hooks))


def test_a_model_inside_cannot_be_copied():
    import copy

    model = build("llama")
    with compress(model, SnapKV(), Budget(keep=0.5)), pytest.raises(Refused, match="copied"):
        copy.deepcopy(model)
    copy.deepcopy(model)
