"""An error file is read from any decorator that writes one, and invalid content is ignored."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rallypoint.agent.failures.failure import ErrorRecord, WorkerFailure, read_error_file, write_reply_file
from rallypoint.rendezvous.core.state import FailureKind
from rallypoint.worker import Unrecoverable
from rallypoint.worker.record import write_error_file

WRITTEN = 1_800_000_000.25


def record_of(path: Path, content: object) -> ErrorRecord | None:
    """Write a file and return the record that is read: text is written unchanged, other content as JSON."""
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    os.utime(path, (WRITTEN, WRITTEN))
    return read_error_file(path)


def test_our_error_file_has_the_exact_time_and_the_permanence(tmp_path: Path) -> None:
    """The reader returns the values that `record` wrote: message, traceback, time, permanence."""
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
    """Its timestamp has whole seconds: the file's own time is more precise."""
    extra = {"py_callstack": "Traceback\nValueError: bad\n", "timestamp": "1800000000"}
    content = {"message": {"message": "ValueError: bad", "extraInfo": extra, "errorCode": 3}}
    assert record_of(tmp_path / "e", content) == ErrorRecord(
        "ValueError: bad", "Traceback\nValueError: bad", False, WRITTEN, None
    )
    assert record_of(tmp_path / "e", {"message": "in short"}) == ErrorRecord(
        "in short", "", False, WRITTEN, None
    )


@pytest.mark.parametrize("content", [7, [], {}, {"message": 7}, {"message": []}, "", "[" * 100_000, "\0ÿ"])
def test_an_invalid_error_file_has_no_record(tmp_path: Path, content: object) -> None:
    """A missing file has no record either."""
    assert record_of(tmp_path / "e", content) is None
    assert read_error_file(tmp_path / "none") is None


@pytest.mark.parametrize("ours", [7, [], {}, {"monotonic": "1"}, {"monotonic": float("nan"), "permanent": 1}])
def test_invalid_fields_beside_the_message_are_ignored(tmp_path: Path, ours: object) -> None:
    """The rest is still used."""
    content = {"message": {"message": "bad", "extraInfo": {"rallypoint": ours}}}
    assert record_of(tmp_path / "e", content) == ErrorRecord("bad", "", False, WRITTEN, None)


def failed(tmp_path: Path, kind: FailureKind, exit_code: int) -> WorkerFailure:
    """A failure with a log; an error file may be beside the log."""
    return WorkerFailure(
        *(0, 3, "trainer", "host", 7, exit_code, WRITTEN, "the reason", "the frames"),
        log_file=str(tmp_path / "stderr.log"),
        kind=kind,
    )


def test_a_reply_is_the_error_file_with_the_exit_code(tmp_path: Path) -> None:
    """It has all that the worker wrote, in the order of torch's own copy."""
    write_error_file(ValueError("bad"), str(tmp_path / "error.json"), 5.75, 1234.5)
    reply = tmp_path / "reply"
    write_reply_file(str(reply), failed(tmp_path, FailureKind.EXCEPTION, 9), "the end")
    written = json.loads((tmp_path / "error.json").read_text())
    written["message"]["errorCode"] = 9
    assert json.loads(reply.read_text()) == written


@pytest.mark.parametrize("content", [None, "", "[]", '{"message": "in short"}'])
def test_a_reply_without_an_error_file_has_the_same_form(tmp_path: Path, content: str | None) -> None:
    """It describes the failure itself, as for one on another host; an invalid file or another form is not copied."""
    if content is not None:
        (tmp_path / "error.json").write_text(content)
    reply = tmp_path / "reply"
    write_reply_file(str(reply), failed(tmp_path, FailureKind.EXCEPTION, 1), "the end")
    extra = {"py_callstack": "the frames", "timestamp": "1800000000"}
    assert json.loads(reply.read_text())["message"] == {
        "message": "the reason",
        "extraInfo": extra,
        "errorCode": 1,
    }


def test_an_error_file_of_a_caught_exception_is_no_reply(tmp_path: Path) -> None:
    """A signal ended this worker."""
    write_error_file(ValueError("caught"), str(tmp_path / "error.json"), 5.75, 1234.5)
    write_reply_file(str(tmp_path / "reply"), failed(tmp_path, FailureKind.SIGNAL, -9), "the end")
    message = json.loads((tmp_path / "reply").read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("the reason", -9)


def test_a_reply_that_can_not_be_written_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The report is one line; the job's result is unchanged."""
    write_reply_file(str(tmp_path / "none" / "reply"), None, "the end")
    assert capfd.readouterr().err == (
        f"rallypoint: the error file {tmp_path}/none/reply can't be written: No such file or directory\n"
    )
