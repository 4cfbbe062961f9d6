"""The row format: strict JSON, infinities, exact counts, hashes and keys."""

import json
import math
from dataclasses import fields, replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forward_influence.errors import UserError
from forward_influence.rows import (
    ROW_FIELDS,
    InfluenceCurve,
    RunSpec,
    check_row,
    dumps_row,
    loads_row,
    parse_fraction,
    removal_count,
    row_key,
)

SPEC = RunSpec(model="m", dtype="float32", tokenizer="t", data="local")


def good_row() -> dict:
    row = dict.fromkeys(ROW_FIELDS)
    row |= {"document": "d", "selector": "s", "status": "ok", "mode": "remove", "removed": [4, 7]}
    row |= {
        "chunk_start": [0, 2],
        "chunk_count": [2, 1],
        "kl_mean": [0.5, math.inf],
        "kl": [0.4, 0.6, math.inf],
    }
    row |= {"delta_nll": [0.1, None], "nll_count": [2, 0], "top1_changed": [0.5, 0.0]}
    return row | {"key": row_key(SPEC.hash(), "d", "s")}


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.one_of(finite, st.sampled_from([math.inf, -math.inf]))), st.text())
def test_a_row_survives_the_trip_through_its_line(values, text):
    row = {"document": text, "reason": "inf", "kl": values, "kl_mean": values, "removed": [1, 2]}
    line = dumps_row(row)
    assert "\n" not in line
    assert loads_row(line) == row  # the reason "inf" stays text
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))


def test_nan_is_never_written_and_bare_constants_are_never_read():
    with pytest.raises(ValueError):
        dumps_row({"kl": [math.nan]})
    for line in ('{"kl":[NaN]}', '{"kl":[Infinity]}', '{"kl":[-Infinity]}', "[1]", "3"):
        with pytest.raises(ValueError):
            loads_row(line)


@given(st.integers(1, 200_000), st.integers(1, 10**6))
def test_the_count_is_exact_on_the_typed_decimal(n, millionths):
    typed = f"{millionths / 10**6:.6f}"
    expected = max(1, n * Fraction(typed).numerator // Fraction(typed).denominator)
    assert removal_count(n, typed) == expected


def test_a_count_that_float_truncation_gets_wrong():
    assert int(100 * 0.29) == 28
    assert removal_count(100, "0.29") == 29


@pytest.mark.parametrize("typed", ["0", "-0.1", "1.5", "abc", "nan", "inf", ""])
def test_a_bad_fraction_is_named(typed):
    with pytest.raises(UserError, match="fraction"):
        parse_fraction(typed)


def test_the_hash_sees_every_field_and_is_stable():
    assert SPEC.hash() == RunSpec.from_dict(json.loads(json.dumps(SPEC.to_dict()))).hash()
    hashes = {SPEC.hash()}
    for field in fields(SPEC):
        value = getattr(SPEC, field.name)
        hashes.add(replace(SPEC, **{field.name: "x" if value is None else value + type(value)(1)}).hash())
    assert len(hashes) == len(fields(SPEC)) + 1


@given(st.tuples(st.text(), st.text(), st.text()), st.tuples(st.text(), st.text(), st.text()))
def test_keys_are_equal_only_for_equal_parts(a, b):
    assert (row_key(*a) == row_key(*b)) == (a == b)


def test_a_good_row_passes_and_each_fault_is_named():
    check_row(good_row(), SPEC.hash())
    faults = [
        ({"status": "done"}, "status"),
        ({"key": "0" * 32}, "another run"),
        ({"selector": "t"}, "another run"),
        ({"chunk_start": [], "chunk_count": []}, "one length"),
        ({"kl_mean": [0.5]}, "one length"),
        ({"kl": [0.4]}, "kl has 1"),
        ({"kl": None}, "lists"),
    ]
    for change, message in faults:
        with pytest.raises(ValueError, match=message):
            check_row(good_row() | change, SPEC.hash())
    with pytest.raises(ValueError, match="extra"):
        check_row(good_row() | {"extra": 1}, SPEC.hash())
    with pytest.raises(ValueError, match="seconds"):
        check_row({name: value for name, value in good_row().items() if name != "seconds"}, SPEC.hash())


def test_a_curve_is_weighted_by_its_counts():
    row = good_row() | {"kl_mean": [0.5, 2.0], "kl": [0.4, 0.6, 2.0]}
    assert InfluenceCurve.from_row(row, "h").mean == pytest.approx((0.4 + 0.6 + 2.0) / 3)
    with pytest.raises(UserError, match="skipped"):
        InfluenceCurve.from_row(row | {"status": "skipped"}, "h")
