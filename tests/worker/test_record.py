"""An exception that ends a worker is written for its agent in torch's format, whole, and raised again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rallypoint.agent.failures import failure as exit_sentences
from rallypoint.worker import record
from rallypoint.worker.record import write_error_file
from rallypoint.worker.unrecoverable import UNRECOVERABLE
from support.processes import modules_after
from support.replacing import instead_of


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


@record
def divide(dividend: int, divisor: int = 0) -> float:
    """Divides."""
    return dividend / divisor


def test_the_file_has_torchs_format(error_file: Path) -> None:
    """{"message": {"message", "extraInfo": {"py_callstack", "timestamp"}}}, all text, whole seconds; and ours."""
    before, began = int(time.time()), time.monotonic()
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        divide(1)
    content = json.loads(error_file.read_text())
    assert set(content) == {"message"}
    assert set(content["message"]) == {"message", "extraInfo"}
    extra = content["message"]["extraInfo"]
    assert set(extra) == {"py_callstack", "timestamp", "rallypoint"}
    assert began <= extra["rallypoint"]["monotonic"] <= time.monotonic()
    assert before <= extra["rallypoint"]["time"] <= time.time()
    assert extra["rallypoint"]["permanent"] is False
    assert content["message"]["message"] == "ZeroDivisionError: division by zero"
    assert extra["py_callstack"].startswith("Traceback (most recent call last):\n")
    assert extra["py_callstack"].endswith("\nZeroDivisionError: division by zero\n")
    assert before <= int(extra["timestamp"]) <= time.time()
    assert os.listdir(error_file.parent) == ["error.json"]


@pytest.mark.torch
def test_torchs_own_decorator_writes_the_same(error_file: Path) -> None:
    """It has the same keys, message and traceback, except for the decorator's own frame."""
    errors: Any = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    with pytest.raises(ZeroDivisionError):
        divide(1)
    ours = json.loads(error_file.read_text())
    error_file.unlink()
    with pytest.raises(ZeroDivisionError):
        errors.record(divide.__wrapped__)(1)  # type: ignore[attr-defined]
    theirs = json.loads(error_file.read_text())
    for content in (ours, theirs):
        extra = content["message"]["extraInfo"]
        extra.pop("rallypoint", None)
        assert abs(int(extra.pop("timestamp")) - time.time()) < 60
        extra["py_callstack"] = extra["py_callstack"].splitlines()[-3:]
    assert ours == theirs


def test_results_and_names_pass_through(error_file: Path) -> None:
    """Without an exception the decorator has no visible effect."""
    assert divide(6, divisor=3) == 2.0
    assert divide.__name__ == "divide"
    assert divide.__doc__ == "Divides."
    assert not error_file.exists()


def test_exits_are_no_exceptions(error_file: Path) -> None:
    """sys.exit(0) returns None, as in torch; other codes exit; neither is recorded, nor is Ctrl-C."""

    @record
    def leave(how: BaseException) -> None:
        raise how

    assert leave(SystemExit(0)) is None
    for how in (SystemExit(3), SystemExit("words"), SystemExit(None), KeyboardInterrupt()):
        with pytest.raises(type(how)) as caught:
            leave(how)
        assert caught.value is how
    assert not error_file.exists()


@pytest.mark.torch
def test_torch_s_agent_reads_ours(error_file: Path) -> None:
    """Its report has our message, traceback and timestamp."""
    errors: Any = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    with pytest.raises(ZeroDivisionError):
        divide(1)
    failure = errors.ProcessFailure(local_rank=0, pid=7, exitcode=1, error_file=str(error_file))
    assert abs(failure.timestamp - time.time()) < 60
    report = str(errors.ChildFailedError("trainer", {0: failure}))
    assert "ZeroDivisionError: division by zero" in report


def test_an_unrecoverable_error_is_reported_and_ends_with_93(tmp_path: Path) -> None:
    """The error file has the reason, standard error has the traceback, and the exit code is enough by itself."""
    program = """
from rallypoint.worker import Unrecoverable, record

@record
def main():
    raise Unrecoverable("the loss is not a number")

main()
"""
    path = tmp_path / "error.json"
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)}
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment
    )
    assert ran.returncode == UNRECOVERABLE == exit_sentences.UNRECOVERABLE
    last = ran.stderr.splitlines()[-1]
    assert last == "rallypoint.worker.Unrecoverable: the loss is not a number"
    assert ran.stderr.count("Traceback (most recent call last):") == 1
    content = json.loads(path.read_text())
    assert content["message"]["message"] == "Unrecoverable: the loss is not a number"
    assert content["message"]["extraInfo"]["rallypoint"]["permanent"] is True


def test_without_the_variable_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program started by hand behaves as if undecorated."""
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ZeroDivisionError):
        divide(1)
    assert os.listdir(tmp_path) == []
    assert capsys.readouterr().err == ""


def test_a_file_that_cannot_be_written_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exception itself arrives; the error with the file is one line on standard error."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no" / "error.json"))
    with pytest.raises(ZeroDivisionError):
        divide(1)
    assert capsys.readouterr().err.splitlines() == [
        f"rallypoint: the error file {tmp_path}/no/error.json can't be written: No such file or directory"
    ]


def test_a_reader_never_sees_half_a_file(error_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file appears complete: until the rename, the old content stays."""
    error_file.write_text("old")
    seen: list[str] = []

    @instead_of(monkeypatch, os, "replace")
    def spy(replace: Any, source: str, target: str) -> None:
        json.loads(Path(source).read_text())
        seen.append(error_file.read_text())
        replace(source, target)

    with pytest.raises(ZeroDivisionError):
        divide(1)
    assert seen == ["old"]
    assert json.loads(error_file.read_text())["message"]["message"].startswith("ZeroDivisionError")


def test_hostile_exceptions_are_recorded_within_bounds(tmp_path: Path) -> None:
    """One whose text can't be made, one that quotes a whole tensor, one with undecodable bytes."""

    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    path = tmp_path / "error.json"
    for error in (Silent(), ValueError("x" * 10_000_000), ValueError("\udcff")):
        write_error_file(error, str(path), 5)
        assert path.stat().st_size < 1 << 20
        content = json.loads(path.read_text())
        assert content["message"]["message"].startswith(type(error).__name__)
        assert content["message"]["extraInfo"]["timestamp"] == "5"


def test_a_forked_child_does_not_report_for_the_worker(error_file: Path) -> None:
    """An exception in a process forked inside the function concerns that process alone."""
    program = """
import os
from rallypoint.worker import record

@record
def main():
    if os.fork() == 0:
        raise ValueError("the child's")
    os.wait()

main()
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0
    assert "ValueError: the child's" in ran.stderr
    assert not error_file.exists()


def test_a_crash_in_native_code_leaves_a_traceback() -> None:
    """record turns faulthandler on: a segmentation fault names the Python line."""
    program = """
import os, signal
from rallypoint.worker import record

@record
def main():
    os.kill(os.getpid(), signal.SIGSEGV)

main()
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in ran.stderr
    assert "in main" in ran.stderr


def test_workers_load_no_grpc() -> None:
    """Importing the workers' library loads neither gRPC nor protobuf nor an event loop."""
    loaded = {name.partition(".")[0] for name in modules_after("import rallypoint.worker")}
    assert loaded.isdisjoint({"grpc", "google", "asyncio"})
