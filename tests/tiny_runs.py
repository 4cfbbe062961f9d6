"""Whole studies on a tiny model: its folder, documents of known length, and the command in a real process."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_models import VOCABULARY, build

#: Options of a study that fits the tiny model (context 256); 5 of 60 positions are removed.
PREFIX, HORIZON, CHUNK = 60, 40, 16
STUDY = {"prefix": PREFIX, "horizon": HORIZON, "chunk": CHUNK, "sinks": 2, "recent": 8, "fraction": "0.09"}
REMOVED = 5

#: What a child process needs: one thread, no network, no cache of the user.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_ENDPOINT": "http://127.0.0.1:9",  # nobody listens there
    "COLUMNS": "120",
}

#: Tokens of the documents of the study in conftest: two long ones, some that end before the horizon, two too short.
TOKENS = [120, 100, 90, 75, 60, 300, 101, 76]
LONG_ENOUGH = [0, 1, 2, 5, 6, 7]

#: Its selectors.
ALL = ["attention:window=8", "entropy", "random", "none", "recompute", "positions:at=5+9"]


def save_tokenizer(folder: Path) -> None:
    """A word-level tokenizer: ``w3`` to ``w88`` are tokens 3 to 88, anything else is 0; ``<s>`` (1) comes first."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{index}": index for index in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def save_model(folder: Path, architecture: str = "llama"):
    """A tiny random model with its tokenizer, as a folder; returns the model."""
    from forward_influence.quiet import quiet_libraries

    model = build(architecture)
    with quiet_libraries():
        model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_hollow(folder: Path) -> None:
    """The same, but with weights that cannot be loaded: all but one are missing."""
    import torch
    from safetensors.torch import save_file

    head = torch.zeros_like(save_model(folder).lm_head.weight)
    save_file({"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})


def words(count: int, seed: int) -> str:
    """A text of ``count`` random words, each one token; the last word of the vocabulary is left to the tests."""
    generator = random.Random(seed)
    return " ".join(f"w{generator.randrange(3, VOCABULARY - 1)}" for _ in range(count))


def write_documents(path: Path, tokens: list[int]) -> Path:
    """A .jsonl file of documents ``d0``, ``d1``, ... with these many tokens, the leading special one included."""
    lines = [json.dumps({"id": f"d{index}", "text": words(count - 1, index)}) for index, count in enumerate(tokens)]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def token_ids(text: str) -> list[int]:
    """What the tokenizer makes of a text, without it."""
    return [1, *(int(word.removeprefix("w")) for word in text.split())]


def read_rows(folder: Path) -> list[dict]:
    """Rows as plain JSON, in the order of the file."""
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]


def by_name(rows: list[dict]) -> dict[tuple[str, str], dict]:
    """Rows by document and selector; none may come twice."""
    out = {(row["document"], row["selector"]): row for row in rows}
    assert len(out) == len(rows)
    return out


def alike(found: list[dict], expected: list[dict]) -> None:
    """Check that two runs have the same rows, with KL within what batch or order may change, but for ``seconds``."""
    found, expected = by_name(found), by_name(expected)
    assert found.keys() == expected.keys()
    for name, row in expected.items():
        other = found[name]
        inexact = ("kl_mean", "kl", "delta_nll", "seconds")
        assert {k: v for k, v in other.items() if k not in inexact} == {
            k: v for k, v in row.items() if k not in inexact
        }
        for field, tolerance in (("kl_mean", 1e-6), ("kl", 1e-6), ("delta_nll", 1e-5)):
            one, two = ([math.nan if value is None else value for value in each[field]] for each in (other, row))
            assert one == pytest.approx(two, rel=1e-4, abs=tolerance, nan_ok=True), (name, field)


def command_line(command: str, model: Path, data: Path, out: Path, study: dict, *more) -> list[str]:
    """A command line with the options of a study, and whatever more is given behind them."""
    given = {"model": model, "data": data, "out": out, **study}
    return [command, *(str(text) for name, value in given.items() for text in (f"--{name}", value)), *map(str, more)]


def arguments(model: Path, data: Path, out: Path, *more) -> list[str]:
    """A ``measure`` command line for the tiny model."""
    return command_line("measure", model, data, out, STUDY, *more)


def refusal(code: int, out: str, err: str) -> str:
    """The sentence of a command that could not be met; nothing else may be there but notices before it."""
    assert code == 2, err
    assert out == ""
    assert "Traceback" not in err
    last = err.rstrip("\n").split("\n")[-1]
    assert last.startswith("error: ")
    assert last.endswith((".", "?"))
    return last


#: What the server of :class:`Command` imports once.
_HEAVY = ["transformers.models.llama.modeling_llama", "forward_influence.document", "forward_influence.models"]


class Running:
    """A command line in a process of its own; what it prints goes to files in its folder."""

    def __init__(self, arguments: list[str], folder: Path, **environment: str):
        number = len(list(folder.glob("*.stdout")))
        self._streams = [folder / f"{number}.{name}" for name in ("stdout", "stderr")]
        for stream in self._streams:
            stream.touch()
        self.pid = self._start(arguments, folder, {**ENVIRONMENT, **environment})

    @property
    def stdout(self) -> str:
        return self._streams[0].read_text()

    @property
    def stderr(self) -> str:
        return self._streams[1].read_text()

    def wait(self, seconds: float = 300.0) -> int:
        """Exit code; negative: the signal that ended it."""
        code = self._join(seconds)
        assert code is not None, f"still running after {seconds} s: {self.stderr}"
        return code

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.kill(self.pid, number)

    def wait_for(self, condition, seconds: float = 300.0) -> bool:
        """Whether the condition came true while the process lived."""
        end = time.monotonic() + seconds
        while self._join(0.0) is None and time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.002)
        return False


class Script(Running):
    """The installed script, as people run it; the imports alone take seconds.

    Its time is that of the processor: others may keep the machine busy.
    """

    @property
    def cpu_seconds(self) -> float:
        """Of this process, if it has ended and no other child has ended since it began."""
        return _children_seconds() - self._before

    @staticmethod
    def path() -> Path:
        return Path(sys.executable).with_name("forward-influence")

    def _start(self, arguments: list[str], folder: Path, environment: dict) -> int:
        self._before = _children_seconds()
        out, err = (open(stream, "wb") for stream in self._streams)  # noqa: SIM115 (the process has them)
        self._process = subprocess.Popen(
            [self.path(), *arguments], cwd=folder, env={**os.environ, **environment}, stdout=out, stderr=err
        )
        return self._process.pid

    def _join(self, seconds: float) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


class Command(Running):
    """The same entry point, in a process forked from one that has the imports behind it."""

    def _start(self, arguments: list[str], folder: Path, environment: dict) -> int:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_HEAVY)
        for name, value in ENVIRONMENT.items():  # for the server, when it starts
            os.environ.setdefault(name, value)
        self._process = context.Process(target=_run_command, args=(arguments, folder, self._streams, environment))
        self._process.start()
        return self._process.pid

    def _join(self, seconds: float) -> int | None:
        self._process.join(seconds)
        return self._process.exitcode


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _run_command(arguments: list[str], folder: Path, streams: list[Path], environment: dict) -> None:
    for descriptor, path in zip((1, 2), streams):
        os.dup2(os.open(path, os.O_WRONLY | os.O_TRUNC), descriptor)
    os.chdir(folder)
    os.environ.update(environment)
    sys.argv = ["forward-influence", *arguments]
    from forward_influence.cli import main

    main(arguments)


def measuring(tiny, *more, model="model", out="run"):
    """Words of a small study with a model and the documents of a folder; later flags win."""
    return arguments(tiny / model, tiny / "docs.jsonl", out, *more)


def changed(command, name, value):
    """The words of a command with another value of one flag."""
    command = list(command)
    command[command.index(name) + 1] = str(value)
    return command
