"""Self-information of tokens against Selective Context's code.

Its lexical units and its percentile compress text, not a cache: they are not part of the scorer and not compared.
"""

from __future__ import annotations

import pytest
import torch
from golden_cases import load, names

from infokv.collectors import SelfInformationCollector

pytestmark = pytest.mark.golden


@pytest.mark.parametrize("name", names("selective_context"))
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_every_token(name, chunk):
    case, _, inputs = next(one for one in load("selective_context") if one[0]["name"] == name)
    found = []
    for sentence in case["sentences"]:
        logits, ids = inputs[sentence["logits"]], inputs[sentence["ids"]]
        collector = SelfInformationCollector()
        for start in range(0, len(ids), chunk):
            collector.on_logits(logits[start : start + chunk], ids[start : start + chunk])
        assert collector.table()[0] == 0
        found.append(collector.table()[1:])
    found = torch.cat(found)
    wanted = torch.tensor([float(one) for one in case["expected"]["token"]["self_info"]])
    finite = wanted.isfinite()
    # Below e^-87 the peer's float32 softmax is subnormal and loses digits; at infinity it has lost them all.
    exact = finite & (wanted < 80)
    torch.testing.assert_close(found[exact], wanted[exact], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[finite], wanted[finite], rtol=1e-2, atol=0)
    assert bool((found[~finite] > 100).all())
    assert bool(found.isfinite().all())
