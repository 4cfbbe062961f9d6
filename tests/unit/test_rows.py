"""The row format: strict JSON, infinities, exact counts, hashes and keys."""

import json
import math
from dataclasses import fields, replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forward_influence.errors import UserError
from forward_influence.row_check import check_row
from forward_influence.rows import (
    ROW_FIELDS,
    InfluenceCurve,
    RunSpec,
    dumps_row,
    loads_row,
    parse_fraction,
    removal_count,
    row_key,
)

SPEC = RunSpec(model="m", dtype="float32", tokenizer="t", data="local")


def good_row() -> dict:
    row = dict.fromkeys(ROW_FIELDS)
    row |= {"document": "d", "selector": "s", "status": "ok", "mode": "remove", "removed": [4, 7], "n_removed": 2}
    row |= {"document_sha": "0f", "n_tokens": 9, "removed_fraction": 0.5, "kept_fraction": 0.5, "seconds": 1.5}
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
        ({"kl": None}, "kl is null"),
        ({"kl_mean": [0.5, -0.1]}, 'kl_mean holds -0.1, which is not a number of at least 0 or "inf"'),
        ({"kl_mean": [0.5, -math.inf]}, "kl_mean holds -inf"),
        ({"kl_mean": [0.5, None]}, "kl_mean holds None"),
        ({"kl_mean": [0.5, "0.5"]}, "kl_mean holds '0.5'"),
        ({"kl_mean": [0.5, True]}, "kl_mean holds True"),
        ({"kl_mean": 0.5}, "kl_mean is 0.5, not one of the lists"),
        ({"kl": [0.4, 0.6, -1e-9]}, "kl holds -1e-09"),
        ({"chunk_count": [2, 1.0]}, "chunk_count holds 1.0, which is not a whole number of at least 1"),
        ({"chunk_count": [2, 0]}, "chunk_count holds 0"),
        ({"chunk_start": [0, -2]}, "chunk_start holds -2"),
        ({"nll_count": [2, 0.5]}, "nll_count holds 0.5"),
        ({"nll_count": [2, 1]}, "delta_nll is null in other chunks"),
        ({"delta_nll": [0.1, 0.1]}, "delta_nll is null in other chunks"),
        ({"delta_nll": [0.1, "x"]}, "delta_nll holds 'x', which is not a number, an infinity or null"),
        ({"top1_changed": [0.5, 1.5]}, "top1_changed holds 1.5, which is not a number from 0 to 1"),
        ({"removed": [4, 7.0]}, "removed holds 7.0"),
        ({"removed": [4]}, "removed has 1 positions, and n_removed is 2"),
        ({"n_removed": None}, "n_removed is null"),
        ({"kept_fraction": 1.5}, "kept_fraction is 1.5, not a number from 0 to 1"),
        ({"seconds": -1}, "seconds is -1, not a number of at least 0"),
        ({"n_tokens": 9.5}, "n_tokens is 9.5, not a whole number"),
        ({"document": ["d"]}, r"document is \['d'\], not a text"),
        ({"reason": 3}, "reason is 3, not a text"),
    ]
    for change, message in faults:
        with pytest.raises(ValueError, match=message):
            check_row(good_row() | change, SPEC.hash())
    check_row(good_row() | {"delta_nll": [-math.inf, None], "kl_mean": [0, math.inf]}, SPEC.hash())
    with pytest.raises(ValueError, match="extra"):
        check_row(good_row() | {"extra": 1}, SPEC.hash())
    with pytest.raises(ValueError, match="seconds"):
        check_row({name: value for name, value in good_row().items() if name != "seconds"}, SPEC.hash())


def test_a_curve_is_weighted_by_its_counts():
    row = good_row() | {"kl_mean": [0.5, 2.0], "kl": [0.4, 0.6, 2.0]}
    assert InfluenceCurve.from_row(row, "h").mean == pytest.approx((0.4 + 0.6 + 2.0) / 3)
    with pytest.raises(UserError, match="skipped"):
        InfluenceCurve.from_row(row | {"status": "skipped"}, "h")
