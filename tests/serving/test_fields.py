"""A field value that no service can accept is refused with the field's name, before anything is done."""

from __future__ import annotations

import pytest

from rallypoint.rpc.errors import ServiceError
from rallypoint.serving.requests import NAME_BYTES, count, name, text


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("", "must not be empty"),
        ("x" * (NAME_BYTES + 1), "must have at most 256 bytes, not 257"),
        ("ü" * NAME_BYTES, "must have at most 256 bytes, not 512"),
        ("two\nlines", "must not have control characters"),
    ],
)
def test_a_name_fits_a_line(value: str, told: str) -> None:
    """It is shown in logs and on terminals."""
    with pytest.raises(ServiceError) as caught:
        name("run_id", value)
    assert caught.value.field_violations == (("run_id", told),)


def test_bounds_are_inside() -> None:
    """Names, sentences and numbers at the limit pass; an empty sentence is valid."""
    name("run_id", "x" * NAME_BYTES)
    text("reason", "", 0)
    count("workers", 1, 1, 2)
    count("workers", 2, 1, 2)


@pytest.mark.parametrize("value", [0, 3])
def test_a_number_has_bounds(value: int) -> None:
    """The refusal states them."""
    with pytest.raises(ServiceError) as caught:
        count("workers", value, 1, 2)
    assert caught.value.field_violations == (("workers", f"must be from 1 to 2, not {value}"),)
