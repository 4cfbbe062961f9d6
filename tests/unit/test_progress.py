"""What is shown on the way: a bar on a terminal, now and then a line elsewhere, nothing when quiet."""

import io

import pytest

from forward_influence import progress
from forward_influence.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def forward(seconds):
        now[0] += seconds

    return forward


def test_plain_lines_come_now_and_then(clock):
    stream = io.StringIO()
    shown = Progress(1000, stream=stream)
    shown.label("document 1 of 4")
    for _ in range(50):  # 50 x 2 s, 5 tokens each
        clock(2)
        shown.advance(5)
    lines = stream.getvalue().splitlines()
    assert lines == [
        "document 1 of 4: 8% done, 6 min left",  # 75 of 1000 after 30 s: 370 s
        "document 1 of 4: 15% done, 6 min left",  # 340 s
        "document 1 of 4: 22% done, 5 min left",  # 310 s
    ]


def test_reach_corrects_the_count(clock):
    stream = io.StringIO()
    shown = Progress(100, stream=stream)
    shown.advance(130)  # a pass that was run twice
    shown.reach(50)
    clock(60)
    shown.reach(75)
    assert stream.getvalue() == ": 75% done, 20 s left\n"
    clock(60)
    shown.advance(200)
    assert stream.getvalue().endswith(": 100% done, 1 s left\n")


def test_no_estimate_before_the_first_token(clock):
    stream = io.StringIO()
    shown = Progress(100, stream=stream)
    clock(60)
    shown.advance(0)
    assert stream.getvalue() == ": 0% done, unknown time left\n"


def test_quiet_shows_nothing(clock):
    for stream in (io.StringIO(), Terminal()):
        shown = Progress(10, quiet=True, stream=stream)
        shown.label("document 1")
        clock(100)
        shown.advance(5)
        shown.say("A notice.")
        shown.close()
        assert stream.getvalue() == ""


def test_notices_are_lines():
    stream = io.StringIO()
    Progress(stream=stream).say("A notice.")
    assert stream.getvalue() == "A notice.\n"


def test_notices_alone_make_no_bar_on_a_terminal():
    stream = Terminal()
    shown = Progress(stream=stream)
    shown.say("A notice.")
    shown.close()
    assert stream.getvalue() == "A notice.\n"


def test_a_terminal_has_a_bar_that_notices_do_not_tear():
    stream = Terminal()
    shown = Progress(100, stream=stream)
    shown.label("document 1 of 2")
    shown.advance(60)
    shown.say("A notice.")
    shown.reach(50)
    shown.close()
    text = stream.getvalue()
    assert "document 1 of 2" in text
    assert "50%" in text
    assert "A notice.\n" in text.replace("\r", "\n")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "1 s"),
        (0.2, "1 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (89, "1 min"),
        (91, "2 min"),
        (3569, "59 min"),
        (3599, "1 h 00 min"),
        (12_000, "3 h 20 min"),
        (float("inf"), "unknown time"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


class Unwritable(io.StringIO):
    """A stream whose reader has left, whose disk is full, or that is closed."""

    def __init__(self, error: Exception, terminal: bool):
        super().__init__()
        self.error, self.terminal, self.attempts = error, terminal, 0

    def isatty(self):
        return self.terminal

    def write(self, text):
        self.attempts += 1
        raise self.error

    def flush(self):
        raise self.error


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left"), ValueError("I/O on closed file")]
)
def test_what_cannot_be_shown_ends_nothing(clock, error, terminal):
    stream = Unwritable(error, terminal)
    shown = Progress(100, stream=stream)
    for _ in range(3):
        clock(60)
        shown.label("document 1 of 2")
        shown.advance(10)
        shown.say("A notice.")
    shown.reach(50)
    shown.close()
    assert stream.attempts


def test_a_closed_stream_and_none_at_all_end_nothing(clock, monkeypatch, capsys):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(progress.sys, "stderr", None)  # as Python has it where descriptor 2 is closed
    for stream in (closed, None):
        shown = Progress(100, stream=stream)
        clock(60)
        shown.advance(10)
        shown.say("A notice.")
        shown.close()
    assert capsys.readouterr().out == ""  # and nothing goes among the results
