"""The grammar of selectors and methods, and its sentences."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infokv.errors import Refused
from infokv.registry import Registry, convert, parse_parameters


@dataclass(frozen=True)
class Thing:
    """A thing."""

    size: int = 3
    share: float = 0.5
    k: int | None = 7
    on: bool = True
    word: str = "a"


@pytest.fixture
def registry():
    registry = Registry("thing", "no.such.group")
    registry.register("thing")(Thing)
    return registry


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("thing", Thing()),
        ("thing:size=4", Thing(size=4)),
        ("thing:share=1,size=4", Thing(size=4, share=1.0)),
        ("thing:k=none", Thing(k=None)),
        ("thing:k=None,on=false,word=b", Thing(k=None, on=False, word="b")),
        ("thing: size = 4 ", Thing(size=4)),
    ],
)
def test_texts(registry, text, expected):
    assert registry.create(text) == expected


def test_class_path_with_and_without_parameters(registry):
    other = Registry("scorer", "no.such.group")
    made = other.create("infokv.scorers.random:Random:seed=3")
    assert type(made).__name__ == "Random"
    assert made.seed == 3
    assert other.canonical(made) == "infokv.scorers.random:Random:seed=3"
    assert other.create("infokv.scorers.random:Random").seed == 0


def test_json_file(registry, tmp_path):
    file = tmp_path / "tuned.json"
    file.write_text('{"share": 1, "k": null}')
    assert registry.create(f"thing:{file}") == Thing(share=1.0, k=None)
    file.write_text("[1]")
    with pytest.raises(Refused, match="an object of parameters is needed"):
        registry.create(f"thing:{file}")
    file.write_text('{"share": true}')
    with pytest.raises(Refused, match="thing:share=True: the value must be float"):
        registry.create(f"thing:{file}")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("thin", "did you mean 'thing'"),
        ("zzzzzz", "There are|there are"),
        ("thing:sise=3", "no parameter 'sise'; did you mean 'size'"),
        ("thing:size=x", "thing:size=x: the value must be int"),
        ("thing:size=none", "the value must be int"),
        ("thing:on=maybe", "the value must be bool"),
        ("thing:size", "come key=value pairs or a .json file"),
        ("thing:size=1,size=2", "'size' is given twice"),
        ("thing:=1", "is not key=value"),
        ("thing:nowhere.json", "cannot be read"),
        ("no.module:Thing", "cannot be imported"),
        ("infokv.registry:nothing", "cannot be imported"),
        ("infokv.registry:convert", "not a class"),
        ("infokv.registry", "names a module but no class"),
    ],
)
def test_sentences(registry, text, sentence):
    with pytest.raises(Refused, match=sentence) as caught:
        registry.create(text)
    assert "\n" not in str(caught.value)


def test_collision_is_an_error_and_the_same_definition_is_none(registry):
    registry.register("thing")(Thing)
    with pytest.raises(Refused, match="is taken by"):
        registry.register("thing")(Registry)
    with pytest.raises(Refused, match="register a class"):
        registry.register("instance")(Thing())
    with pytest.raises(Refused, match="cannot name a thing"):
        registry.register("a:b")


def test_unknown_name_lists_all_names(registry):
    with pytest.raises(Refused, match=r"There is no thing 'x'; there are: thing, or write module\.path:Class\."):
        registry.get("x")


things = st.builds(
    Thing,
    size=st.integers(-99, 99),
    share=st.floats(allow_nan=False, allow_infinity=False),
    k=st.none() | st.integers(0, 9),
    on=st.booleans(),
    word=st.text("abc-", min_size=1),
)


@given(things)
def test_canonical_text_makes_an_equal_object(thing):
    registry = Registry("thing", "no.such.group")
    registry.register("thing")(Thing)
    text = registry.canonical(thing)
    assert registry.create(text) == thing
    assert registry.canonical(registry.create(text)) == text


def test_conversion_keeps_bool_and_int_apart():
    assert convert(3, float, "x") == 3.0
    with pytest.raises(Refused):
        convert(True, int, "x")
    with pytest.raises(Refused):
        convert(1, bool, "x")
    assert parse_parameters("a=1,b=x=y", "n") == {"a": "1", "b": "x=y"}


def test_numbers_of_numpy_are_numbers():
    import numpy as np

    for value, hint, expected in (
        (np.int64(3), int, 3), (np.uint8(3), int, 3), (np.int32(3), float, 3.0), (np.float32(0.5), float, 0.5),
        (np.int64(3), int | None, 3),
    ):  # fmt: skip
        got = convert(value, hint, "x")
        assert got == expected and type(got) is type(expected)
    for value, hint in ((np.float64(3), int), (np.bool_(True), int), (np.int64(1), bool), (np.bool_(True), float)):
        with pytest.raises(Refused):
            convert(value, hint, "x")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """``module(text)`` writes a module ``theirs`` that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        monkeypatch.delitem(sys.modules, "theirs", raising=False)
        (tmp_path / "theirs.py").write_text(text)
        return tmp_path / "theirs.py"

    yield write
    sys.modules.pop("theirs", None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import sys\nsys.exit(0)", "SystemExit: 0"),
        ("raise SystemExit", "SystemExit"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def broken(:", "SyntaxError: "),
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("from nowhere_at_all import x", "No module named 'nowhere_at_all'"),
    ],
)
def test_whatever_happens_on_import_is_one_sentence(registry, module, text, reason):
    module(text)
    with pytest.raises(Refused) as caught:
        registry.create("theirs:Mine")
    sentence = str(caught.value)
    assert sentence.startswith(f"'theirs:Mine' cannot be imported ({reason}")
    assert "\n" not in sentence and "current folder" in sentence


def test_leaving_in_a_constructor_is_one_sentence(registry, module):
    module(
        "from dataclasses import dataclass\n@dataclass\nclass Mine:\n    a: int = 0\n"
        "    def __post_init__(self):\n        raise SystemExit(3)\n"
        "    @classmethod\n    def load(cls, path):\n        raise SystemExit(4)\n"
    )
    for text, reason in (("theirs:Mine", 3), ("theirs:Mine:a=1", 3), ("theirs:Mine:x.json", 4)):
        with pytest.raises(Refused, match=f"^theirs:Mine cannot be made from .*SystemExit: {reason}"):
            registry.create(text)


def test_the_file_that_was_taken_is_named(registry, module):
    file = module("class Other: pass")
    with pytest.raises(Refused) as caught:
        registry.create("theirs:Mine")
    assert "has no attribute 'Mine'" in str(caught.value)
    assert f"Python took theirs from {file}" in str(caught.value)


def test_entry_points_of_other_packages_are_found(monkeypatch):
    import infokv.registry as module

    class Point:
        name, value = "foreign", "infokv.scorers.random:Random"

    monkeypatch.setattr(module, "entry_points", lambda group: [Point()] if group == "some.group" else [])
    registry = Registry("scorer", "some.group")
    assert registry.names() == ["foreign"]
    assert registry.create("foreign:seed=4").seed == 4
    clash = Registry("scorer", "some.group", {"foreign": "infokv.scorers.random:Random"})
    with pytest.raises(Refused, match="is taken twice"):
        clash.names()
