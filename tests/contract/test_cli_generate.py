"""``generate`` and ``methods``: the text is that of compress(), numbers are the handle's, refusals come first."""

import dataclasses
import io
import re
import sys

import pytest
import torch
from tiny_models import build
from tiny_runs import Script, refusal, save_hollow, save_model, token_ids, words

from forward_influence.cli.methods import facts, per_query_head, source_of
from forward_influence.methods import scorer_named
from infokv import Budget, Schedule, compress, get_scorer
from infokv.scorer import SCORERS, kv_head_method

PROMPT = words(40, 0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Models: one as it is, one with a chat template, and ``hollow``, whose weights cannot be loaded."""
    folder = tmp_path_factory.mktemp("tiny")
    for name in ("model", "chat", "broken"):
        save_model(folder / name)
    save_hollow(folder / "hollow")
    (folder / "chat" / "chat_template.jinja").write_text(
        "{% for one in messages %}<s> w5 {{ one['content'] }}{% endfor %}{% if add_generation_prompt %} w6{% endif %}"
    )
    (folder / "broken" / "chat_template.jinja").write_text("{{ raise_exception('no user may speak') }}")
    return folder


@pytest.fixture
def cli(cli, tiny, tmp_path, monkeypatch):
    """The command line, with ``cli.generate(*arguments)`` on one of the models and with bytes on standard input."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def generate(*arguments, model="model", stdin=None):
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return cli("generate", "--model", tiny / model, "--offline", *arguments)

    cli.generate = generate
    return cli


def expected(scorer, budget, new, prompt=PROMPT, **options):
    """Text, and the handle, of compress() itself."""
    model, ids = build("llama"), torch.tensor([token_ids(prompt)])
    with compress(model, scorer, budget, **options) as handle:
        out = model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0)
    return " ".join(f"w{index}" for index in out[0, ids.shape[1] :].tolist() if index > 2), handle


WAYS = {
    "default": ([], ("infokv", Budget(keep="0.4"), {})),
    "share": (["--method", "knorm", "--keep", "0.3"], ("knorm", Budget(keep="0.3"), {})),
    "tokens": (["--method", "snapkv:window=5,kernel=3", "--tokens", "12"],
               ("snapkv:window=5,kernel=3", Budget(tokens=12), {})),
    "layers": (["--method", "snapkv:window=5,kernel=3", "--layers", "pyramid"],
               ("snapkv:window=5,kernel=3", Budget(keep="0.4", layers="pyramid"), {})),
    "own schedule": (["--method", "rpc:window=3,every=8", "--no-prefill"],
                     ("rpc:window=3,every=8", Budget(keep="0.4"), {"prefill": False})),
    "schedule": (["--method", "knorm", "--every", "8", "--recent", "3", "--decode-keep", "0.5", "--cut-prompt"],
                 ("knorm", Budget(keep="0.4"), {"decode": Schedule(8, 3, "0.5", False)})),
    "part of a schedule": (["--method", "rkv:every=8,window=4", "--protect-prompt"],
                           ("rkv:every=8,window=4", Budget(keep="0.4"), {"decode": Schedule(8, 4, None, True)})),
    "a selector": (["--method", "entropy", "--keep", "0.3"], (scorer_named("entropy"), Budget(keep="0.3"), {})),
    "chunks": (["--method", "infokv:window=5", "--prefill-chunk", "7"],
               ("infokv:window=5", Budget(keep="0.4"), {"prefill_chunk": 7})),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_it_is_compress(way, cli):
    more, (scorer, budget, options) = WAYS[way]
    text, handle = expected(scorer, budget, 20, **options)
    code, out, err = cli.generate(PROMPT, "--max-new-tokens", 20, *more)
    assert code == 0, err
    assert out.split() == text.split() and out.endswith("\n")
    least, most = min(handle.stored), max(handle.stored)
    kept = f"{least} in each layer" if least == most else f"{least}-{most} by layer"
    made = handle.seen[0] + 1 - 41
    assert f"prompt 41, generated {made}; the cache saw {handle.seen[0]} and kept {kept}" in err
    kib = [f"{count / 1024:.1f} KiB" for count in (handle.stored_bytes, handle.full_bytes, handle.peak_bytes)]
    assert f"{kib[0]} of {kib[1]} in full ({handle.stored_bytes / handle.full_bytes:.0%}); peak {kib[2]}" in err
    assert re.search(r"prefill \d+ tokens/s \(\d+\.\d\d s\), decode [\d.]+ tokens/s", err)
    assert re.search(r"scoring  \d+\.\d\d s of \d+\.\d\d s", err)
    if way != "default":
        assert handle.stored_bytes < handle.full_bytes  # something was cut, so something is tested


def test_where_a_prompt_comes_from(cli, tmp_path):
    code, expected_text, _ = cli.generate(PROMPT, "--quiet", "--max-new-tokens", 6)
    assert code == 0
    content = b"\xef\xbb\xbf" + PROMPT.encode() + b"\r\n"
    (tmp_path / "prompt.txt").write_bytes(content)
    for given, stdin in ((["--file", "prompt.txt"], None), ([], content), (["-"], PROMPT.encode())):
        assert cli.generate(*given, "--quiet", "--max-new-tokens", 6, stdin=stdin) == (0, expected_text, "")


def test_the_chat_template_is_applied_unless_raw(cli):
    more = ("--quiet", "--max-new-tokens", 8)
    plain = cli.generate(PROMPT, *more)
    wrapped = cli.generate(f"w5 {PROMPT} w6", *more)
    assert plain != wrapped
    assert cli.generate(PROMPT, *more, model="chat") == wrapped
    assert cli.generate(PROMPT, "--raw", *more, model="chat") == plain
    code, out, err = cli.generate(PROMPT, model="broken")
    assert (code, out) == (2, "") and "no user may speak" in err and "--raw" in err


def test_sampling(cli):
    def text(*more):
        code, out, err = cli.generate(PROMPT, "--quiet", "--max-new-tokens", 12, *more)
        assert code == 0, err
        return out

    greedy = text()
    assert text("--seed", 5) == greedy == text("--top-k", 1) == text("--temperature", 1e-4)
    one = text("--temperature", 3, "--seed", 1)
    assert one == text("--temperature", 3, "--seed", 1) != text("--temperature", 3, "--seed", 2)
    assert text("--top-p", 1e-6, "--temperature", 3) == greedy


REFUSED = {
    "unknown method": (["--method", "snapkw"], "there is no scorer 'snapkw'; did you mean 'snapkv'?"),
    "unknown parameter": (["--method", "snapkv:windw=3"], "did you mean 'window'"),
    "a file alone": (["--method", "runs/tuned.json"], "write METHOD:runs/tuned.json, such as infokv:runs/tuned.json."),
    "per query head": (["--method", "pyramidkv-official"], "use pyramidkv."),
    "per query head by parameter": (["--method", "infokv:heads=query"], "use infokv."),
    "a class of another kind": (["--method", "collections:OrderedDict"], "has no score; derive the class from"),
    "keep": (["--keep", "1.5"], "keep is 1.5; it must be above 0 and at most 1"),
    "keep is no number": (["--keep", "abc"], "keep is abc"),
    "tokens": (["--tokens", "0"], "tokens is 0; it must be a whole number of at least 1"),
    "both": (["--tokens", "5", "--keep", "0.5"], "--keep 0.5 and --tokens 5 exclude each other"),
    "layers": (["--layers", "cone"], "layers is 'cone'; it must be one of uniform, pyramid, entropy"),
    "every": (["--every", "0"], "every is 0"),
    "recent": (["--recent", "-1"], "recent is -1"),
    "decode-keep": (["--decode-keep", "2"], "keep is 2"),
    "nothing to cut": (["--method", "snapkv", "--no-prefill"], "add one, such as --every 1024."),
    "new tokens": (["--max-new-tokens", "0"], "--max-new-tokens is 0; it must be a whole number of at least 1."),
    "temperature": (["--temperature", "0"], "--temperature is 0.0; it must be above 0 (leave it out for greedy"),
    "temperature without end": (["--temperature", "inf"], "--temperature is inf"),
    "temperature that is none": (["--temperature", "nan"], "--temperature is nan"),
    "top-p": (["--top-p", "1.1"], "--top-p is 1.1; it must be above 0 and at most 1."),
    "top-k": (["--top-k", "0"], "--top-k is 0"),
    "seed": (["--seed", str(2**64)], "at most 9223372036854775807"),
    "chunk": (["--prefill-chunk", "0"], "--prefill-chunk is 0"),
    "layer that is not there": (["--method", "fastkv:propagate=3"], "propagate is 3; hollow has layers 0 to 2."),
    "file and prompt": (["--file", "other.txt"], "give one of both."),
    "device": (["--device", "cuda:7"], "device 'cuda:7' cannot be used"),
    "dtype": (["--dtype", "float8"], "dtype 'float8' is unknown"),
    "model": (["--model", "nowhere"], "'nowhere' is no existing folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_requests_that_cannot_be_met(case, cli):
    """Before weights load: those of this model could not be loaded."""
    more, sentence = REFUSED[case]
    refused(cli.generate(PROMPT, *more, model="hollow"), sentence)


PROMPTS = {
    "empty": ([""], None, "the prompt is empty"),
    "blank": ([" \n"], None, "the prompt is empty"),
    "empty input": ([], b"\n", "standard input is empty"),
    "no file": (["--file", "none.txt"], None, "file 'none.txt' cannot be read (No such file or directory)"),
    "a folder": (["--file", "."], None, "cannot be read (Is a directory)"),
    "no path": (["--file", "a\0b"], None, "cannot be read (embedded null"),
    "no UTF-8": (["-"], b"caf\xe9 ", "standard input is no UTF-8 text (byte 3:"),
    "no UTF-8 typed": (["caf\udce9"], None, "the prompt is no UTF-8 text"),
    "too long": ([words(299, 1)], None, "the prompt has 300 tokens, and hollow has a context of 256; shorten it"),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts_that_cannot_be_used(case, cli):
    given, stdin, sentence = PROMPTS[case]
    refused(cli.generate(*given, model="hollow", stdin=stdin), sentence)


def test_a_terminal_is_not_waited_for(cli, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO())
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    refused(cli.generate(model="hollow"), "There is no prompt; give it as an argument, with --file PATH")


def refused(outcome, sentence):
    assert sentence.lower() in refusal(*outcome).lower()
    assert len(outcome[2].splitlines()) == 1


def test_generation_ends_where_the_context_ends(cli):
    code, _, err = cli.generate(words(249, 2), "--max-new-tokens", 20)
    assert code == 0
    assert "max-new-tokens is cut from 20 to 6: model has a context of 256 tokens." in err
    assert int(re.search(r"prompt 250, generated (\d+)", err)[1]) <= 6


def test_a_budget_in_which_no_score_counts_is_told(cli):
    def told(*more):
        code, _, err = cli.generate(PROMPT, "--max-new-tokens", 2, *more)
        assert code == 0
        return "no score counts" in err

    assert told("--method", "snapkv", "--keep", "0.4") and told("--method", "snapkv:window=16", "--tokens", "16")
    assert not told("--method", "snapkv:window=16", "--tokens", "17") and not told("--method", "snapkv", "--keep", "1")
    assert not told("--method", "full") and not told("--method", "rpc", "--no-prefill")
    assert not told("--method", "snapkv", "--keep", "0.4", "--quiet")


def test_an_interrupt_still_says_what_was_done(cli, monkeypatch):
    import transformers

    put, count = transformers.TextStreamer.put, [0]

    def interrupted(self, value):
        put(self, value)
        count[0] += 1
        if count[0] == stop:
            raise KeyboardInterrupt

    monkeypatch.setattr(transformers.TextStreamer, "put", interrupted)
    stop = 4  # the prompt and three tokens
    code, out, err = cli.generate(PROMPT, "--max-new-tokens", 20)
    assert code == 130
    assert len(out.split()) == 3 and out.endswith("\n")
    assert "Interrupted." in err and "prompt 41, generated 3; the cache saw 43" in err
    stop, count[0] = 1, 0
    code, out, err = cli.generate(PROMPT, "--max-new-tokens", 20)
    assert (code, out) == (130, "") and "tokens/s" not in err


def test_help_is_instant(tmp_path):
    for name in ("generate", "methods"):
        script = Script([name, "--help"], tmp_path)
        assert script.wait() == 0
        assert script.cpu_seconds < 1.0


# methods


def test_every_method_is_listed_in_full(cli):
    code, out, err = cli("methods")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    parts = re.split(r"^(?=\S)", out.partition("\n\n")[0], flags=re.MULTILINE)[1:]
    assert [part.split()[0] for part in parts] == SCORERS.names()
    for part in parts:
        name = part.split()[0]
        scorer, text = get_scorer(name), " ".join(part.split())
        for field in dataclasses.fields(scorer):
            value = getattr(scorer, field.name)
            assert f"{field.name}={'none' if value is None else value}" in text
        every = "where a schedule is given" if scorer.schedule is None else f"every {scorer.schedule.every},"
        assert every in text or name == "full"
        assert ("use " in text) == per_query_head(scorer)
        assert "source: " in text or name in ("random", "full")
        if per_query_head(scorer):
            assert name.startswith(kv_head_method(scorer))
            assert not per_query_head(get_scorer(kv_head_method(scorer)))


def test_one_method_in_full(cli, tmp_path):
    code, out, _ = cli("methods", "infokv:alpha=0.5")
    assert code == 0
    assert out.startswith("infokv:alpha=0.5  (infokv.scorers.infokv.InfoKV)")
    for text in (
        "arXiv 2606.26875",
        "every 1024",
        "queries(last=64)",
        "temperature : float",
        "the last 64 tokens stay",
    ):
        assert text in out
    (tmp_path / "mine_here.py").write_text(
        "from dataclasses import dataclass\nfrom infokv import Scorer\n\n@dataclass(frozen=True)\n"
        'class Mine(Scorer):\n    """What I like.\n\n    Notes\n    -----\n    Source: my own head. Nothing else.\n'
        '    """\n\n    liking: float = 0.5\n'
    )
    code, out, _ = cli("methods", "mine_here:Mine:liking=2")
    assert code == 0
    assert "mine_here:Mine:liking=2.0" in out and "What I like." in out and "source      my own head\n" in out
    code, out, err = cli("methods", "infokw")
    assert (code, out) == (2, "") and "did you mean 'infokv'?" in err


def test_one_that_cannot_be_made_does_not_hide_the_others(cli, monkeypatch):
    monkeypatch.setitem(SCORERS._targets, "torn", "nowhere_at_all:Torn")
    code, out, _ = cli("methods")
    assert code == 0
    assert "torn" in out and "cannot be used: 'nowhere_at_all:Torn' cannot be imported" in " ".join(out.split())
    assert "\nfull " in out


def test_sources_end_with_their_sentence():
    class Example:
        """One.

        Notes
        -----
        Source: Somebody (arXiv 1234.56789), version 0.5.5, and
        its code. The rest is another matter.
        """

    assert source_of(Example) == "Somebody (arXiv 1234.56789), version 0.5.5, and its code"
    assert source_of(type("Bare", (), {})) == ""


def test_a_full_cache_cuts_nothing():
    assert facts(get_scorer("full"))["cuts"] == "nothing"
