"""Speed and memory of the masking engine and of compressed generation on the default model: ``make bench``.

Everything is measured in one run, because machines are noisy: compare ratios, not runs. The parts take
turns, and each number is the best of its turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import time
from pathlib import Path

from compression import PROMPT, measure_compression
from compression import table as compression_table
from tuning import measure_tuning

ROWS, PREFIX, HORIZON, CHUNK = 5, 2048, 1024, 256
TOKEN_STEPS = 64
MEMORY_HORIZONS = (1024, 2048, 4096)


def text_ids(tokenizer, length: int):
    """The first tokens of the embedded corpus."""
    import torch

    from forward_influence.data import load_documents

    document = load_documents("builtin").tokenized(tokenizer.encode, length)[0]
    return torch.tensor([document.ids[:length]])


def removed_sets(rows: int) -> list[list[int]]:
    """Distinct sets of 20 positions: none of the rows is merged with another."""
    return [list(range(100 + 300 * row, 120 + 300 * row)) for row in range(rows)]


def time_engine(model, ids) -> float:
    """Seconds from the finished prefix to the last number, for the reference and four ablated rows."""
    from forward_influence.engine import compare_rows
    from forward_influence.removal import removal_flags
    from infokv.prefill import prefill

    store, _ = prefill(model, ids[:, :PREFIX], total_length=ids.shape[1])
    flags = [removal_flags(one, PREFIX) for one in removed_sets(ROWS - 1)]
    began = time.perf_counter()
    compare_rows(model, store, ids[:, PREFIX:], flags, chunk_size=CHUNK, batch=ROWS - 1)
    return time.perf_counter() - began


def plain_cache(model, ids, rows: int):
    """transformers' own cache with the prefix of each row, and the name under which it is passed."""
    import torch
    from transformers import DynamicCache

    from infokv.calls import cache_argument

    name = cache_argument(model)
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        model(ids[:, :PREFIX].expand(rows, -1), use_cache=True, logits_to_keep=1, **{name: cache})
    return cache, name


def time_plain_forward(model, ids) -> float:
    """Seconds of ``ROWS`` continuations, one after the other, in chunks of 256; logits, no KL."""
    import torch

    total = 0.0
    for _ in range(ROWS):
        cache, name = plain_cache(model, ids, 1)
        began = time.perf_counter()
        with torch.inference_mode():
            for start in range(PREFIX, ids.shape[1], CHUNK):
                model(ids[:, start : start + CHUNK], use_cache=True, **{name: cache}).logits  # noqa: B018
        total += time.perf_counter() - began
    return total


def time_token_by_token(model, ids) -> float:
    """Seconds of ``ROWS`` continuations as a batch, a token a step; extrapolated from ``TOKEN_STEPS``."""
    import torch

    cache, name = plain_cache(model, ids, ROWS)
    began = time.perf_counter()
    with torch.inference_mode():
        for step in range(TOKEN_STEPS):
            token = ids[:, PREFIX + step : PREFIX + step + 1].expand(ROWS, -1)
            model(token, use_cache=True, **{name: cache}).logits  # noqa: B018
    return (time.perf_counter() - began) * HORIZON / TOKEN_STEPS


def peak_memory(horizon: int) -> int:
    """Peak resident bytes of a fresh process that measures this horizon, above the loaded model."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_peak_of, (horizon,))


def _peak_of(horizon: int) -> int:
    from forward_influence.engine import influence
    from forward_influence.models import load_model

    loaded = load_model(check=False, offline=True)
    ids = text_ids(loaded.tokenizer, PREFIX + horizon)
    influence(loaded.model, ids[:, :64], [[1]], prefix_length=32)  # weights are mapped from disk: touch them first
    before = resident("VmRSS")
    influence(loaded.model, ids, removed_sets(ROWS - 1), prefix_length=PREFIX, batch=ROWS - 1)
    return resident("VmHWM") - before


def resident(which: str) -> int:
    """Bytes of this process that are (``VmRSS``) or were at most (``VmHWM``) resident; Linux only.

    Not getrusage, whose maximum a child inherits from the process that started it.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {which}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=2, help="how often each part is timed")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of the prompt that is compressed")
    parser.add_argument("--no-memory", action="store_true", help="leave the peak memory out")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "latest.json")
    options = parser.parse_args()

    import torch

    from forward_influence.cli.malloc import keep_memory
    from forward_influence.estimate import matrix_rate, multiply_adds
    from forward_influence.models import load_model

    keep_memory()
    loaded = load_model(check=False, offline=True)
    model, ids = loaded.model, text_ids(loaded.tokenizer, PREFIX + HORIZON)
    work = multiply_adds(model.config, PREFIX + HORIZON / 2)
    parts = {"engine": time_engine, "plain_forward": time_plain_forward, "token_by_token": time_token_by_token}
    best = dict.fromkeys(parts, float("inf"))
    rate = 0.0
    for turn in range(options.turns):
        for name, part in parts.items():
            rate = max(rate, matrix_rate("cpu", "float32"))
            seconds = part(model, ids)
            best[name] = min(best[name], seconds)
            print(f"turn {turn + 1}, {name}: {ROWS * HORIZON / seconds:.1f} row-tokens/s", file=sys.stderr)
    speeds = {name: ROWS * HORIZON / seconds for name, seconds in best.items()}
    result = {
        "row_tokens_per_s": speeds["engine"],
        "plain_forward_row_tokens_per_s": speeds["plain_forward"],
        "token_by_token_row_tokens_per_s": speeds["token_by_token"],
        "floor_row_tokens_per_s": rate / work,
        "matrix_gflops": 2 * rate / 1e9,
        "multiply_adds_per_row_token": work,
        "ratio_to_plain_forward": speeds["engine"] / speeds["plain_forward"],
        "ratio_to_token_by_token": speeds["engine"] / speeds["token_by_token"],
        "share_of_floor": speeds["engine"] * work / rate,
        "rows": ROWS,
        "prefix": PREFIX,
        "horizon": HORIZON,
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "torch": torch.__version__,
    }
    result["compression"] = measure_compression(model, text_ids(loaded.tokenizer, options.prompt), options.turns)
    result |= {name: value for name, value in result["compression"].items() if "ratio" in name}
    result |= measure_tuning(model, text_ids(loaded.tokenizer, 2560))
    if not options.no_memory:
        result["peak_memory_bytes"] = {str(horizon): peak_memory(horizon) for horizon in MEMORY_HORIZONS}
        text = model.config
        token = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * 4
        result["cache_bytes"] = {str(h): (ROWS * (PREFIX + h) + PREFIX) * token for h in MEMORY_HORIZONS}
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(table(result))
    print()
    print(compression_table(result["compression"]))
    print(
        f"\n{result['settings_that_differ']} of {result['settings']} settings on one document: "
        f"{result['tuning_share_of_separate']:.2f} of the time of measuring each alone"
    )
    print(f"written to {options.out}")


def table(result: dict) -> str:
    """The result for a person."""
    lines = [
        f"{'':<28}{'row-tokens/s':>13}{'engine is':>12}",
        f"{'engine, KL included':<28}{result['row_tokens_per_s']:>13.1f}",
        f"{'plain forward, chunks of 256':<28}{result['plain_forward_row_tokens_per_s']:>13.1f}"
        f"{result['ratio_to_plain_forward']:>11.2f}x",
        f"{'token by token':<28}{result['token_by_token_row_tokens_per_s']:>13.1f}"
        f"{result['ratio_to_token_by_token']:>11.2f}x",
        f"{'floor (matrix products)':<28}{result['floor_row_tokens_per_s']:>13.1f}{result['share_of_floor']:>11.2f}x",
    ]
    for horizon, peak in result.get("peak_memory_bytes", {}).items():
        cache = result["cache_bytes"][horizon] / 2**20
        lines.append(f"peak memory, horizon {horizon:>5}: {peak / 2**20:>6.0f} MiB, of which KV cache {cache:.0f} MiB")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
