"""Runs of compression methods that are written by hand."""

import itertools
import math

import numpy as np

from forward_influence.analysis import open_runs
from forward_influence.rows import ROW_FIELDS, RunSpec, row_key
from forward_influence.runs import RunFolder

CHUNK, HORIZON = 32, 200
FIXED = {"model": "tiny@1", "dtype": "float32", "tokenizer": "t", "data": "local", "prefix": 100}
SPEC = RunSpec(**FIXED, horizon=HORIZON, chunk=CHUNK, fraction="1", sinks=0, recent=0, mode="keep")
inf = math.inf

METHODS = {"snapkv": 0.02, "infokv:alpha=0.8": 0.01, "random": 0.2}
SELECTORS = {
    **{f"{name}@{keep}": (level / keep, keep) for name, level in METHODS.items() for keep in (0.4, 0.2)},
    "snapkv@0.4,pyramid": (0.04, 0.41),
    "snapkv@10 tokens": (0.3, 0.1),
}


def make_row(document: str, selector: str, kept: float, kl: list[float], seed: int, spec: RunSpec) -> dict:
    """A row with a random delta NLL and top-1 share in each chunk; the token after the last offset is not known."""
    rng = np.random.default_rng(seed)
    chunks = [kl[start : start + spec.chunk] for start in range(0, len(kl), spec.chunk)]
    counts = [len(c) for c in chunks]
    row = dict.fromkeys(ROW_FIELDS) | {"key": row_key(spec.hash(), document, selector), "mode": spec.mode}
    row |= {"document": document, "document_sha": f"sha-{document}", "selector": selector, "status": "ok"}
    row |= {"n_tokens": 300, "n_removed": 60, "removed_fraction": 1 - kept, "kept_fraction": kept}
    row |= {"kept_counts": [round(100 * kept)] * 2, "chunk_start": list(range(0, len(kl), spec.chunk))}
    row |= {"chunk_count": counts, "kl": kl, "kl_mean": [sum(c) / len(c) for c in chunks]}
    row |= {"delta_nll": rng.normal(0.1, 1, len(chunks)).tolist(), "nll_count": [*counts[:-1], counts[-1] - 1]}
    if spec.mode == "remove":
        row |= {"removed": [5], "n_removed": 1, "kept_counts": None}
    return row | {"top1_changed": rng.uniform(0, 1, len(chunks)).tolist(), "seconds": 0.5}


def write_rate_run(folder, selectors=SELECTORS, lengths=(200, 200, 200, 200, 150), missing=(), change=None, spec=SPEC):
    """A run of methods in documents of given lengths."""
    seeds = itertools.count()
    rows = []
    for number, length in enumerate(lengths):
        scale = np.random.default_rng(number).lognormal(0, 1)
        for selector, (level, kept) in selectors.items():
            seed = next(seeds)
            kl = (scale * level * np.random.default_rng(seed).lognormal(0, 1, length)).tolist()
            if (f"d{number}", selector) not in missing:
                rows.append(make_row(f"d{number}", selector, kept, kl, seed, spec))
    if change is not None:
        change(rows)
    with RunFolder.open(folder, spec, {}) as run:
        run.append(rows)
    return open_runs(folder)


def words(figure) -> str:
    """The caption of a figure in one line."""
    return figure.get_supxlabel().replace("\n", " ")
