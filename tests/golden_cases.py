"""Numbers made by the peers' own code: the subset beside the tests, and the folder of shared data if there is one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file

from infokv.kernels import LayerFacts
from infokv.signals import TokenSignals, signal

_HERE = Path(__file__).resolve()
_SHARED = Path(os.environ.get("FI_SHARED", _HERE.parents[2] / "shared")) / "golden"

#: Folders of cases.
FOLDERS = [folder for folder in (_HERE.parent / "golden", _SHARED) if folder.is_dir()]


def load(group: str) -> list[tuple[dict, dict, dict]]:
    """Every case of a group with its expected and input tensors, each name once."""
    found = {}
    for folder in (one / group for one in FOLDERS):
        tensors = folder / "expected.safetensors"
        expected = load_file(tensors) if tensors.exists() else {}
        inputs = load_file(folder / "inputs.safetensors")
        for case in json.loads((folder / "expected.json").read_text())["cases"]:
            found[case["name"]] = (case, expected, inputs)
    return list(found.values())


def names(group: str) -> list[str]:
    return [case["name"] for case, _, _ in load(group)]


def layer_signals(queries, keys, window: int, candidates: range, positions=None, seen=None) -> TokenSignals:
    """Signals of one layer, from tensors ``[heads, tokens, head_dim]``."""
    return TokenSignals(
        input_ids=torch.zeros(keys.shape[1], dtype=torch.long),
        layers=1,
        query_heads=queries.shape[0],
        kv_heads=keys.shape[0],
        candidates=candidates,
        facts=(LayerFacts(queries.shape[-1] ** -0.5, None, None),),
        positions=positions,
        seen=seen,
        values_by_name={signal("queries", last=window): [queries[:, -window:]], "keys": [keys]},
    )


def assert_same_set(got, want, ambiguous: dict | None = None, what=None, tied: str = "tied") -> None:
    """Equal as sets; of an ambiguous row the tied ones only in number."""
    got, want = set(got), set(want)
    if ambiguous is None:
        assert got == want, what
        return
    free = set(ambiguous[tied])
    assert got - free == want - free, what
    assert len(got & free) == ambiguous["n_from_tied"], what
