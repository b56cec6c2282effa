"""A value is read from etcd as it was written, or reported as damaged."""

from __future__ import annotations

import pytest

from rallypoint.rendezvous.journal.etcd.keys import PART_BYTES, DamagedValue, seal, unseal

_SIZES = [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES, 3 * PART_BYTES + 1]


@pytest.mark.parametrize("size", _SIZES)
def test_a_value_of_any_size_comes_back(size: int) -> None:
    """In no more parts than it needs, none larger than the limit."""
    content = bytes(range(256)) * (size // 256 + 1)
    sealed = seal(b"key", content[:size])
    assert len(sealed) == max(1, -(-size // PART_BYTES))
    assert max(len(value) for _, value in sealed) <= PART_BYTES + 32
    assert unseal(b"key", dict(sealed)) == (content[:size], len(sealed))


@pytest.mark.parametrize("size", [1, PART_BYTES + 1, 3 * PART_BYTES])
def test_any_change_is_noticed(size: int) -> None:
    """A byte of any part, or a part that isn't there."""
    sealed = dict(seal(b"key", b"x" * size))
    for key, value in sealed.items():
        for at in range(0, len(value), max(1, len(value) // 50)):
            changed = value[:at] + bytes([value[at] ^ 0x15]) + value[at + 1 :]
            with pytest.raises(DamagedValue, match="key"):
                unseal(b"key", {**sealed, key: changed})
        if key != b"key":
            with pytest.raises(DamagedValue, match=r"'key/000\d' is missing"):
                unseal(b"key", {other: each for other, each in sealed.items() if other != key})


def test_a_value_under_another_key_is_noticed() -> None:
    """Every value includes its key in the checksum."""
    ((_, value),) = seal(b"key", b"x")
    with pytest.raises(DamagedValue, match="is not what was written"):
        unseal(b"other", {b"other": value})
