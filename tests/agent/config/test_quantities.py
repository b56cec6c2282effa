"""Quantities are parsed in the usual notations, and a typing error is rejected, not read as another quantity."""

from __future__ import annotations

import pytest

from rallypoint.agent.config.rlimits import Quantity, QuantityError, parse_quantity


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("2%", Quantity(part=0.02)),
        ("0.5 %", Quantity(part=0.005)),
        ("100%", Quantity(part=1.0)),
        ("10GiB", Quantity(bytes=10 << 30)),
        ("10gib", Quantity(bytes=10 << 30)),
        ("10Gi", Quantity(bytes=10 << 30)),
        ("1.5GB", Quantity(bytes=1_500_000_000)),
        ("500m", Quantity(bytes=500_000_000)),
        ("0k", Quantity(bytes=0)),
    ],
)
def test_valid_quantities_are_parsed(text: str, amount: Quantity) -> None:
    """Decimal and binary units, and percentages."""
    assert parse_quantity(text) == amount


@pytest.mark.parametrize("text", ["", "x", "-1GiB", "GiB", "1PiB", "1 2", "101%", "2", "2b", "1e9k", "nan%"])
def test_invalid_quantities_are_rejected(text: str) -> None:
    """A user who wrote disk:2 did not mean two bytes."""
    with pytest.raises(QuantityError):
        parse_quantity(text)


def test_a_part_is_one_of_a_whole() -> None:
    """Bytes do not depend on the whole."""
    assert Quantity(part=0.02).of(1000) == 20
    assert Quantity(bytes=5).of(1000) == 5
