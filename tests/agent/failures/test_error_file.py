"""What a worker wrote of its failure is read whichever decorator wrote it, and nonsense is passed over."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rallypoint.agent.failures.failure import ErrorRecord, read_error_file
from rallypoint.worker import Unrecoverable
from rallypoint.worker.record import write_error_file

WRITTEN = 1_800_000_000.25


def story_of(path: Path, content: object) -> ErrorRecord | None:
    """What is read of a file with this content."""
    path.write_text(json.dumps(content))
    os.utime(path, (WRITTEN, WRITTEN))
    return read_error_file(path)


def test_ours_says_when_exactly_and_whether_it_is_for_good(tmp_path: Path) -> None:
    """What `record` writes comes back: message, traceback, moment, permanence."""
    for error, permanent in ((ValueError("bad"), False), (Unrecoverable("worse"), True)):
        path = tmp_path / "error.json"
        write_error_file(error, str(path), 5.75, 1234.5)
        os.utime(path, (WRITTEN, WRITTEN))
        name = type(error).__name__
        assert read_error_file(path) == ErrorRecord(
            f"{name}: {error}", f"{_shown(error)}", permanent, WRITTEN, 1234.5
        )


def _shown(error: Exception) -> str:
    module = type(error).__module__
    return f"{'' if module == 'builtins' else module + '.'}{type(error).__name__}: {error}"


def test_torch_s_is_read(tmp_path: Path) -> None:
    """Its timestamp counts whole seconds: the file's own is finer."""
    extra = {"py_callstack": "Traceback\nValueError: bad\n", "timestamp": "1800000000"}
    content = {"message": {"message": "ValueError: bad", "extraInfo": extra, "errorCode": 3}}
    assert story_of(tmp_path / "e", content) == ErrorRecord(
        "ValueError: bad", "Traceback\nValueError: bad", False, WRITTEN, None
    )
    assert story_of(tmp_path / "e", {"message": "in short"}) == ErrorRecord(
        "in short", "", False, WRITTEN, None
    )


@pytest.mark.parametrize("content", [7, [], {}, {"message": 7}, {"message": []}])
def test_what_makes_no_sense_is_nothing(tmp_path: Path, content: object) -> None:
    """Nor is a file that is not there."""
    assert story_of(tmp_path / "e", content) is None
    assert read_error_file(tmp_path / "none") is None


@pytest.mark.parametrize("ours", [7, [], {}, {"monotonic": "1"}, {"monotonic": float("nan"), "permanent": 1}])
def test_what_makes_no_sense_beside_the_message_is_left_out(tmp_path: Path, ours: object) -> None:
    """The rest is worth something all the same."""
    content = {"message": {"message": "bad", "extraInfo": {"rallypoint": ours}}}
    assert story_of(tmp_path / "e", content) == ErrorRecord("bad", "", False, WRITTEN, None)
