"""Amounts are read as people write them, and a slip is an error rather than another amount."""

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
def test_what_is_an_amount(text: str, amount: Quantity) -> None:
    """Decimal and binary units, and parts."""
    assert parse_quantity(text) == amount


@pytest.mark.parametrize("text", ["", "x", "-1GiB", "GiB", "1PiB", "1 2", "101%", "2", "2b", "1e9k", "nan%"])
def test_what_is_none(text: str) -> None:
    """Two bytes are not what somebody meant who wrote disk:2."""
    with pytest.raises(QuantityError):
        parse_quantity(text)


def test_a_part_is_one_of_a_whole() -> None:
    """Bytes are bytes."""
    assert Quantity(part=0.02).of(1000) == 20
    assert Quantity(bytes=5).of(1000) == 5
