"""A two-layer model with weights set by hand, and texts of which it is known which tokens the future needs.

A text holds six *facts*. Each is announced by a *hint*, after which the model has no idea what comes, and is asked
for in the continuation by its *question*: the second layer's one head then finds the fact among the keys and copies
its answer into the prediction. Everything else is filler, whose successor the model knows, and *decoys*: every other
token attends to them with all its weight, and they carry nothing.

So the facts, and they alone, matter. Entropy of a token's own prediction points at them; entropy of the next one at
the hints before them; attention of the last queries, and of everybody, at the decoys.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tiny_models import VOCABULARY
from tiny_runs import save_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

FACTS = 6
FILLERS = range(3, 13)
HINT, DECOY = 13, 14
FACT = range(15, 15 + FACTS)
QUESTION = range(21, 21 + FACTS)
ANSWER = range(27, 27 + FACTS)
HIDDEN = 64

PREFIX, HORIZON, WINDOW, DECOYS = 60, 40, 8, 16

#: Directions that rotation hardly turns: the slow half of the head's dimensions.
SLOW = range(16, 32)

#: Scores of a key that matches: e to this power outweighs every text.
MATCH = 16.0


def save_known_model(folder: Path) -> None:
    """The model and a tokenizer (``w15`` is token 15), as a folder."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, head_dim=HIDDEN, max_position_embeddings=256, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e12}, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        for token in range(1, ANSWER.stop):
            model.model.embed_tokens.weight[token, token] = 1.0
        _set_attention(model.model.layers[1].self_attn)
        _set_head(model.lm_head.weight)
    model.save_pretrained(folder)
    save_tokenizer(folder)


def _set_attention(attention) -> None:
    """Questions find their facts, everybody else the decoys; facts hand over their answers."""
    size = HIDDEN**0.5  # of a token's one direction behind the norm
    gain = (MATCH * size / size**2) ** 0.5  # the products are divided by the root of the width
    decoys = SLOW[FACTS]
    for token in range(1, ANSWER.stop):
        own = SLOW[QUESTION.index(token)] if token in QUESTION else decoys
        attention.q_proj.weight[own, token] = gain
    attention.k_proj.weight[decoys, DECOY] = gain
    for number, token in enumerate(FACT):
        attention.k_proj.weight[SLOW[number], token] = gain
        attention.v_proj.weight[number, token] = 1.0
        attention.o_proj.weight[ANSWER.stop + number, number] = 1.0


def _set_head(weight: torch.Tensor) -> None:
    """A known filler follows all but hints, of which nothing is known; questions are followed by what was copied."""
    for token in (1, *FILLERS, DECOY, *FACT, *ANSWER):
        following = token + 1 if token in FILLERS[:-1] else FILLERS[0]
        weight[following, token] = 3.0
    for number, token in enumerate(ANSWER):
        weight[token, ANSWER.stop + number] = 3.0


def known_text(seed: int) -> tuple[list[int], list[int]]:
    """A text as token ids ``[prefix + horizon]``, and the positions of its facts."""
    draw = random.Random(seed)
    pieces = [[HINT, fact] for fact in FACT] + [[DECOY]] * DECOYS
    rest = PREFIX - 1 - WINDOW - sum(map(len, pieces))
    pieces += [[draw.choice(FILLERS)] for _ in range(rest)]
    draw.shuffle(pieces)
    prefix = [1, *(token for piece in pieces for token in piece), *draw.choices(FILLERS, k=WINDOW)]
    asked = [draw.randrange(FACTS) for _ in range(HORIZON // 4)] + list(range(FACTS))
    future = [[QUESTION[number], ANSWER[number]] for number in asked]
    future += [[draw.choice(FILLERS)] for _ in range(HORIZON - sum(map(len, future)))]
    draw.shuffle(future)
    ids = prefix + [token for piece in future for token in piece]
    assert len(ids) == PREFIX + HORIZON
    return ids, [place for place, token in enumerate(prefix) if token in FACT]


def write_known_texts(path: Path, count: int) -> dict[str, list[int]]:
    """Documents ``d0``, ``d1``, ... as .jsonl; where the facts of each are."""
    places, lines = {}, []
    for number in range(count):
        ids, places[f"d{number}"] = known_text(number)
        lines.append(json.dumps({"id": f"d{number}", "text": " ".join(f"w{token}" for token in ids[1:])}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return places
