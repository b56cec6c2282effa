"""A lock is held once, and its number outlives its holder."""

from __future__ import annotations

from pathlib import Path

import pytest

from rallypoint.rendezvous.journal.sqlite import LockFile


def test_the_number_is_the_last_that_was_written(tmp_path: Path) -> None:
    """The next holder of the lock reads it; 0 if there never was one."""
    lock = LockFile(tmp_path / "lock")
    assert lock.read() == 0
    for number in (10**19, 7):
        lock.write(number)
        assert lock.read() == number
    lock.release()
    lock = LockFile(tmp_path / "lock")
    assert lock.read() == 7
    lock.release()


@pytest.mark.parametrize("content", [b"", b"12", b"x" * 30, b"\xff" * 100, b"%020d 00000000\n" % 12])
def test_a_number_that_can_not_be_trusted_is_none(tmp_path: Path, content: bytes) -> None:
    """A damaged file has no number; it is not taken for a lost commit."""
    (tmp_path / "lock").write_bytes(content)
    lock = LockFile(tmp_path / "lock")
    assert lock.read() == 0
    lock.release()


def test_it_is_held_once(tmp_path: Path) -> None:
    """Until it is released."""
    lock = LockFile(tmp_path / "lock")
    with pytest.raises(BlockingIOError):
        LockFile(tmp_path / "lock")
    lock.release()
    LockFile(tmp_path / "lock").release()
