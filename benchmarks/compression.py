"""Speed and bytes of a compressed ``generate()`` on the default model; part of ``make bench``."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext

PROMPT, NEW_TOKENS, KEEP, SMALL_CACHE = 6000, 48, 0.25, 64

#: Longer pieces of the prompt run faster; the default of 512 holds fewer states.
CHUNK = 1024


class Clock:
    """A stopping criterion that never stops, and notes when each token was there."""

    def __init__(self):
        self.began = time.perf_counter()
        self.times: list[float] = []

    def __call__(self, input_ids, scores, **kwargs):
        import torch

        self.times.append(time.perf_counter() - self.began)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def generate(model, ids, block) -> tuple[float, float, object]:
    """Seconds of the prefill, tokens per second after it, and what ``block`` yields."""
    from transformers import StoppingCriteriaList

    clock = Clock()
    with block as handle:
        model.generate(
            ids, do_sample=False, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
        )  # fmt: skip
    first, last = clock.times[0], clock.times[-1]
    return first, (len(clock.times) - 1) / (last - first), handle


def ways(model, ids):
    """Name, prompt and block of each way to generate."""
    from infokv import Budget, FullCache, InfoKV, SnapKV, compress

    quarter = Budget(keep=KEEP)
    yield "plain", ids, nullcontext()
    yield "full_store", ids, compress(model, FullCache(), quarter, prefill_chunk=CHUNK)
    yield "infokv", ids, compress(model, InfoKV(), quarter, prefill_chunk=CHUNK)
    yield "snapkv", ids, compress(model, SnapKV(), quarter, prefill_chunk=CHUNK)
    yield "infokv_default_chunk", ids, compress(model, InfoKV(), quarter)
    yield "snapkv_default_chunk", ids, compress(model, SnapKV(), quarter)
    yield "ceiling", ids[:, :SMALL_CACHE], nullcontext()


def measure_compression(model, ids, turns: int) -> dict:
    """The best of some turns for each way, as numbers for ``latest.json``.

    Parameters
    ----------
    ids : int Tensor ``[1, tokens]``
        The prompt, real text.
    """
    prefill, decode, handles = {}, {}, {}
    for turn in range(turns):
        for name, prompt, block in ways(model, ids):
            seconds, rate, handles[name] = generate(model, prompt, block)
            prefill[name] = min(prefill.get(name, float("inf")), seconds)
            decode[name] = max(decode.get(name, 0.0), rate)
            print(f"turn {turn + 1}, {name}: prefill {seconds:.2f} s, {rate:.1f} tokens/s", file=sys.stderr)
    stores = ("full_store", "infokv", "snapkv")
    return {
        "prompt_tokens": ids.shape[1],
        "new_tokens": NEW_TOKENS,
        "keep": KEEP,
        "prefill_chunk": CHUNK,
        "prefill_seconds": prefill,
        "decode_tokens_per_s": decode,
        "prefill_ratio_full_store": prefill["full_store"] / prefill["plain"],
        "prefill_ratio_infokv": prefill["infokv"] / prefill["plain"],
        "prefill_ratio_snapkv": prefill["snapkv"] / prefill["plain"],
        "prefill_ratio_infokv_default_chunk": prefill["infokv_default_chunk"] / prefill["plain"],
        "prefill_ratio_snapkv_default_chunk": prefill["snapkv_default_chunk"] / prefill["plain"],
        "decode_ratio_infokv": decode["infokv"] / decode["plain"],
        "decode_ratio_snapkv": decode["snapkv"] / decode["plain"],
        "full_store_decode_ratio": decode["full_store"] / decode["plain"],
        "decode_ceiling_ratio": decode["ceiling"] / decode["plain"],
        "stored_bytes": {name: handles[name].stored_bytes for name in stores},
        "peak_cache_bytes": {name: handles[name].peak_bytes for name in stores},
        "scoring_share_of_prefill": {
            name: handles[name].scoring_seconds / prefill[name] for name in ("infokv", "snapkv")
        },
    }


def table(result: dict) -> str:
    """The result for a person."""
    lines = [
        f"generate(), {result['prompt_tokens']} tokens of prompt, budget {result['keep']}",
        f"{'':<22}{'prefill':>9}{'':>7}{'decode':>12}{'':>7}{'stored':>10}{'peak':>10}",
    ]
    plain_prefill, plain_decode = result["prefill_seconds"]["plain"], result["decode_tokens_per_s"]["plain"]
    labels = {
        "ceiling": f"plain, {SMALL_CACHE} tokens",
        "infokv_default_chunk": "infokv, chunks of 512",
        "snapkv_default_chunk": "snapkv, chunks of 512",
    }
    for name, seconds in result["prefill_seconds"].items():
        rate = result["decode_tokens_per_s"][name]
        prefill = f"{seconds:>7.2f} s{seconds / plain_prefill:>6.2f}x" if name != "ceiling" else " " * 16
        held = [result[kind].get(name) for kind in ("stored_bytes", "peak_cache_bytes")]
        bytes_held = "".join(f"{one / 2**20:>6.0f} MiB" if one else " " * 10 for one in held)
        lines.append(f"{labels.get(name, name):<22}{prefill}{rate:>8.1f} t/s{rate / plain_decode:>6.2f}x{bytes_held}")
    share = result["scoring_share_of_prefill"]
    lines.append(f"share of prefill spent on scoring: infokv {share['infokv']:.1%}, snapkv {share['snapkv']:.1%}")
    return "\n".join(lines)


def export(folder) -> None:
    """The default model and the prompt in files that any transformers version reads."""
    import json

    from bench import text_ids

    from forward_influence.models import load_model

    loaded = load_model(check=False, offline=True)
    loaded.model.save_pretrained(folder)
    (folder / "prompt.json").write_text(json.dumps(text_ids(loaded.tokenizer, PROMPT)[0].tolist()))
    print(f"written to {folder}")


if __name__ == "__main__":
    import argparse
    from pathlib import Path

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--export", type=Path, required=True, metavar="FOLDER")
    export(parser.parse_args().export)
