"""A stream is one sequence of bytes over all its files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.agent.logs import files as module
from rallypoint.agent.logs.files import LogFile, Piece, read_end, rotated_files, rotated_name
from support.replacing import instead_of


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A file that is being written."""
    path = tmp_path / "stdout.log"
    path.touch()
    return path


def append(path: Path, data: bytes) -> None:
    """Append as its writer does."""
    with open(path, "ab") as file:
        file.write(data)


def rotate(path: Path, begin: int) -> None:
    """Rotate a file as the log copier does."""
    os.link(path, rotated_name(path, begin))
    path.with_name("fresh").touch()
    path.with_name("fresh").rename(path)


def read_all(file: LogFile, offset: int = 0) -> bytes:
    """Return all bytes from the offset to the end."""
    found = b""
    while (piece := file.read(offset, 7)).data:
        assert piece.begin == offset
        found, offset = found + piece.data, piece.end
    return found


def test_a_stream_goes_on_in_the_next_file(log: Path) -> None:
    """Its reader sees no files; offsets stay valid."""
    with LogFile(log) as file:
        append(log, b"first ")
        assert read_all(file) == b"first "
        append(log, b"of file, ")
        rotate(log, 0)
        append(log, b"second file")
        assert read_all(file, 6) == b"of file, second file"
        assert read_all(file) == b"first of file, second file"
        assert file.extent() == (0, 26)
        rotate(log, 15)
        assert file.read(26, 9) == Piece(26, b"")
        assert file.extent() == (0, 26)
    assert [segment.begin for segment in rotated_files(log)] == [0, 15]


def test_a_reader_continues_after_lost_bytes(log: Path) -> None:
    """The reader continues at the first existing byte, and gets its offset."""
    append(log, b"gone")
    rotate(log, 0)
    append(log, b"kept")
    rotate(log, 4)
    append(log, b"new")
    with LogFile(log) as file:
        assert file.read(2, 1) == Piece(2, b"n")
        rotated_name(log, 0).unlink()
        file.close()
        assert file.read(2, 9) == Piece(4, b"kept")
        assert file.read(8, 9) == Piece(8, b"new")
        assert file.extent() == (4, 11)


def test_a_file_that_was_emptied_begins_again_at_offset_0(log: Path) -> None:
    """It returns no bytes, and the offset of the next ones."""
    append(log, b"old and long")
    with LogFile(log) as file:
        assert read_all(file) == b"old and long"
        os.truncate(log, 0)
        append(log, b"new")
        assert file.read(12, 9) == Piece(0, b"")
        assert file.read(0, 9) == Piece(0, b"new")


def test_in_the_middle_of_a_rotation_a_file_has_two_names(log: Path) -> None:
    """It counts once."""
    append(log, b"once")
    os.link(log, rotated_name(log, 0))
    with LogFile(log) as file:
        assert file.extent() == (0, 4)
        assert read_all(file) == b"once"
    assert read_end(log, 100) == b"once"


def test_a_rotation_while_a_reader_looks_does_not_mislead_it(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not take the new file for the first one."""
    append(log, b"first ")

    @instead_of(monkeypatch, module, "rotated_files")
    def overtaken(listed: Any, path: Path) -> Any:
        found = listed(path)
        if not found:
            rotate(log, 0)
            append(log, b"second")
        return found

    with LogFile(log) as file:
        assert file.extent() == (0, 12)
        assert read_all(file) == b"first second"


def test_a_file_removed_by_hand_loses_only_its_own_bytes(log: Path) -> None:
    """This holds also for one between two others."""
    for begin, data in ((0, b"one "), (4, b"two "), (8, b"three ")):
        append(log, data)
        rotate(log, begin)
    append(log, b"four")
    rotated_name(log, 4).unlink()
    with LogFile(log) as file:
        assert file.read(0, 9) == Piece(0, b"one ")
        assert file.read(4, 9) == Piece(8, b"three ")
        assert file.read(14, 9) == Piece(14, b"four")


def test_the_end_may_be_in_several_files(log: Path) -> None:
    """A failure report needs the traceback, also if the log was rotated in the middle of it."""
    append(log, b"Traceback:\n")
    rotate(log, 0)
    append(log, b"Error\n")
    assert read_end(log, 1000) == b"Traceback:\nError\n"
    assert read_end(log, 9) == b"k:\nError\n"[-9:]
    with pytest.raises(FileNotFoundError):
        read_end(log.with_name("nothing"), 10)


@given(st.lists(st.tuples(st.binary(max_size=5), st.booleans(), st.booleans()), max_size=12))
def test_a_reader_sees_each_byte_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[bytes, bool, bool]]
) -> None:
    """This holds for any sequence of writes, rotations and reads."""
    log = tmp_path_factory.mktemp("logs") / "stdout.log"
    log.touch()
    written, begin, found = b"", 0, b""
    with LogFile(log) as file:
        for data, rotates, reads in steps:
            append(log, data)
            written += data
            if rotates and len(written) > begin:
                rotate(log, begin)
                begin = len(written)
            if reads:
                found += read_all(file, len(found))
        found += read_all(file, len(found))
        assert file.extent() == (0, len(written))
    assert found == written
