"""``forward-influence generate``."""

from __future__ import annotations

import math
import sys
from typing import Annotated

from typer import Argument, Exit, Option

from forward_influence.cli import study_options as options

#: What a method declares beside ``score``; a class that derives from ``infokv.Scorer`` has them all.
_FACTS = ("needs", "sinks", "recent", "allocation", "schedule", "for_decoding")


def command(
    prompt: Annotated[str | None, Argument(help="The prompt. Without one, or with -: standard input.")] = None,
    file: Annotated[
        str | None, Option(help="Read the prompt from this UTF-8 file; a line break at its end is not part of it.")
    ] = None,
    raw: Annotated[bool, Option("--raw", help="The prompt as it is: no chat template.")] = False,
    method: Annotated[
        str, Option(help="NAME, NAME:key=value,..., NAME:file.json or module.path:Class. See the command methods.")
    ] = "infokv",
    keep: Annotated[str | None, Option(help="Share of the tokens that stays in each layer. Default: 0.4.")] = None,
    tokens: Annotated[int | None, Option(help="Tokens that stay in each layer, instead of a share.")] = None,
    layers: Annotated[
        str | None, Option(help="uniform, pyramid or entropy: the budget over layers. Default: the method's own.")
    ] = None,
    prefill: Annotated[bool, Option("--prefill/--no-prefill", help="Cut the prompt at its end, or not.")] = True,
    every: Annotated[int | None, Option(help="Generated tokens between two cuts. Default: the method's own.")] = None,
    recent: Annotated[int | None, Option(help="Last tokens that such a cut leaves alone.")] = None,
    decode_keep: Annotated[str | None, Option(help="Share of generated tokens that stays. Default: --keep.")] = None,
    protect_prompt: Annotated[
        bool | None, Option("--protect-prompt/--cut-prompt", help="Whether such a cut leaves the prompt alone.")
    ] = None,
    max_new_tokens: Annotated[int, Option(help="Tokens to generate at most.")] = 256,
    temperature: Annotated[float | None, Option(help="Sample at this temperature. Default: greedy.")] = None,
    top_p: Annotated[float | None, Option(help="Sample from the likeliest tokens with this probability.")] = None,
    top_k: Annotated[int | None, Option(help="Sample from this many likeliest tokens.")] = None,
    seed: Annotated[int, Option(help="Of sampling.")] = 0,
    prefill_chunk: Annotated[int, Option(help="Tokens of the prompt that run at a time.")] = 512,
    model: Annotated[str, Option(help="Hub id, folder, .gguf file, or alias.")] = "smollm2-135m",
    tokenizer: Annotated[str | None, Option(help="Folder or hub id of another tokenizer.")] = None,
    dtype: Annotated[str, Option(help="auto, float32, bfloat16, float16 or float64.")] = "auto",
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    offline: Annotated[bool, Option("--offline", help="No network attempt at all.")] = False,
    accept_model: options.AcceptModel = False,
    quiet: Annotated[bool, Option("--quiet", help="The text only: neither notices nor numbers.")] = False,
    debug: Annotated[bool, Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Generate text from a compressed cache; then say what was kept, what it saved and how fast it was.

    The text goes to standard output as it comes, everything else to standard error.
    """
    from forward_influence.cli.prompts import read_prompt
    from forward_influence.cli.timing import Timed, statistics

    sampling = _sampling(temperature, top_p, top_k)
    _check("max-new-tokens", max_new_tokens, 1)
    _check("prefill-chunk", prefill_chunk, 1)
    _check("seed", seed, 0, 2**63 - 1)
    text = read_prompt(prompt, file)
    if keep is not None and tokens is not None:
        raise _error(f"--keep {keep} and --tokens {tokens} exclude each other; give one of both.")

    from infokv.budget import Budget

    budget = Budget(keep=(keep or "0.4") if tokens is None else None, tokens=tokens, layers=layers)
    scorer = _scorer(method)
    given = {"every": every, "recent": recent, "keep": decode_keep, "protect_prompt": protect_prompt}
    schedule = _schedule(scorer, {name: value for name, value in given.items() if value is not None})
    if not prefill and schedule is None:
        raise _error(
            f"--no-prefill leaves the prompt as it is, and {method} has no schedule for generated tokens, so that "
            "nothing would be cut; add one, such as --every 1024."
        )

    from dataclasses import replace

    from forward_influence.accepting import check_tuned_for
    from forward_influence.models import load_model, load_tokenizer, resolve_model
    from forward_influence.placement import resolve_device, resolve_dtype
    from forward_influence.quiet import print_notice, quiet_libraries
    from infokv.identity import identity_of, sizes_of

    tell = (lambda sentence: None) if quiet else print_notice
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device)
    source = resolve_model(model, tokenizer=tokenizer, offline=offline, notify=tell)
    _check_layers(scorer, source)
    told = check_tuned_for([scorer], sizes_of(source.config), accept_model)
    words = load_tokenizer(source, tell)
    ids = _ids(words, text, raw)
    new = _room(len(ids), max_new_tokens, source, tell)
    stay, by_rule = budget.resolve(len(ids)), scorer.sinks + scorer.recent
    if prefill and scorer.allocation != "full" and stay < len(ids) and stay <= by_rule:
        tell(
            f"{stay} of {len(ids)} tokens of the prompt stay, and {method} keeps up to {by_rule} by rule, so that no "
            "score counts; give a larger budget, or a smaller window."
        )
    loaded = load_model(source, tokenizer=words, dtype=dtype, device=device, notify=tell)
    if told := [*told, *check_tuned_for([scorer], identity_of(loaded.model), accept_model)]:
        tell(told[0])
        scorer = replace(scorer)  # the same parameters, for any model

    import torch
    from transformers import TextStreamer

    from infokv.compression import compress

    torch.manual_seed(seed)
    streamer = Timed(TextStreamer(words.tokenizer, skip_prompt=True, skip_special_tokens=True))
    inputs = torch.tensor([ids], device=loaded.model.device)
    with (
        quiet_libraries(),
        compress(loaded.model, scorer, budget, prefill=prefill, decode=schedule, prefill_chunk=prefill_chunk) as handle,
    ):
        try:
            loaded.model.generate(
                inputs, attention_mask=torch.ones_like(inputs), streamer=streamer, max_new_tokens=new,
                **_ends(loaded.model, words.tokenizer), **sampling,
            )  # fmt: skip
        except KeyboardInterrupt:
            if not streamer.generated:
                raise
            streamer.end()
            code = _interrupted()
        else:
            code = 0
    if not quiet:
        print("\n".join(statistics(handle, streamer, len(ids))), file=sys.stderr, flush=True)
    if code:
        raise Exit(code)


def _error(sentence: str) -> Exception:
    from forward_influence.errors import UserError

    return UserError(sentence)


def _interrupted() -> int:
    from forward_influence.cli import INTERRUPTED

    print("\nInterrupted.", file=sys.stderr)
    return INTERRUPTED


def _check(name: str, value: int, least: int, most: int | None = None) -> None:
    if value < least or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise _error(f"--{name} is {value}; it must be a whole number of at least {least}{upper}.")


def _sampling(temperature: float | None, top_p: float | None, top_k: int | None) -> dict:
    """Keywords of generate(); all are said, so that a model's own settings do not mix in."""
    if temperature is not None and not 0 < temperature < math.inf:
        raise _error(f"--temperature is {temperature}; it must be above 0 (leave it out for greedy decoding).")
    if top_p is not None and not 0 < top_p <= 1:
        raise _error(f"--top-p is {top_p}; it must be above 0 and at most 1.")
    if top_k is not None:
        _check("top-k", top_k, 1)
    if temperature is top_p is top_k is None:
        return {"do_sample": False, "num_beams": 1}
    return {"do_sample": True, "num_beams": 1, "temperature": temperature or 1.0, "top_p": top_p or 1.0,
            "top_k": top_k or 0}  # fmt: skip


def _scorer(method: str):
    from forward_influence.cli.methods import per_query_head
    from forward_influence.methods import scorer_named
    from infokv.scorer import kv_head_method
    from infokv.signals import parse_signal

    scorer = scorer_named(method)
    missing = [name for name in ("score", *_FACTS) if not hasattr(scorer, name)]
    if missing:
        raise _error(f"{method!r} is no method: it has no {missing[0]}; derive the class from infokv.Scorer.")
    if per_query_head(scorer):
        raise _error(
            f"{method} chooses tokens for each query head, and a cache holds KV heads; use {kv_head_method(scorer)}."
        )
    for name in scorer.needs:
        parse_signal(name)
    return scorer


def _check_layers(scorer, source) -> None:
    deepest = source.config.get_text_config().num_hidden_layers - 1
    propagate = getattr(scorer, "propagate", None)
    if propagate is not None and propagate > deepest:
        raise _error(f"propagate is {propagate}; {source.name} has layers 0 to {deepest}.")


def _schedule(scorer, given: dict):
    """The method's own schedule with what was given changed; None where there is neither."""
    from dataclasses import replace

    from infokv.budget import Schedule

    return replace(scorer.schedule or Schedule(), **given) if given else scorer.schedule


def _ids(words, text: str, raw: bool) -> list[int]:
    """Tokens of the prompt, in the model's chat template where it has one."""
    if raw or not words.tokenizer.chat_template:
        return words.encode(text, special=True)
    try:
        chat = words.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template is a program that comes with the model
        reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
        raise _error(f"the model's chat template fails ({reason}); use --raw.") from error
    return words.encode(chat, special=False)


def _room(prompt: int, new: int, source, tell) -> int:
    """How many tokens may be generated: what was asked for, or what the model's context leaves."""
    limit = source.context_limit
    if limit is None or prompt + new <= limit:
        return new
    if prompt >= limit:
        raise _error(
            f"the prompt has {prompt} tokens, and {source.name} has a context of {limit}; shorten it to at most "
            f"{limit - 1} tokens, or choose another --model."
        )
    tell(f"max-new-tokens is cut from {new} to {limit - prompt}: {source.name} has a context of {limit} tokens.")
    return limit - prompt


def _ends(model, tokenizer) -> dict:
    """Which tokens end a text: the model's and the tokenizer's, which for a chat may be another one."""
    ends = model.generation_config.eos_token_id
    ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
    if not ends:
        return {}
    pad = model.generation_config.pad_token_id
    return {"eos_token_id": sorted(ends), "pad_token_id": min(ends) if pad is None else pad}
