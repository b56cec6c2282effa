"""Logs have torchrun's layout, no attempt overwrites another, and errors in options are explained."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.agent.logs.plan import LogDirectory, remove_attempts, safe_name
from rallypoint.agent.logs.streams import LogError, Redirect, Streams


def test_the_layout_is_torchruns(tmp_path: Path) -> None:
    """<log_dir>/<run_id>_<random>/attempt_<n>/<local_rank>/, with both logs and without an error file."""
    logs = LogDirectory.create(tmp_path / "new" / "logs", "my-run")
    assert logs.path.parent == tmp_path / "new" / "logs"
    assert logs.path.name.startswith("my-run_")
    files = logs.new_attempt(range(2)).workers
    folder = logs.path / "attempt_0" / "1"
    assert files[1].stdout == folder / "stdout.log"
    assert files[1].stderr == folder / "stderr.log"
    assert files[1].error_file == folder / "error.json"
    assert sorted(os.listdir(folder)) == ["stderr.log", "stdout.log"]


def test_no_attempt_and_no_run_overwrites_another(tmp_path: Path) -> None:
    """Every start has a new number, every run of the same name a new directory."""
    logs = LogDirectory.create(tmp_path, "run")
    first = logs.new_attempt([0]).workers[0].stdout
    first.write_text("kept")
    assert logs.new_attempt([0]).workers[0].stdout.parent.parent.name == "attempt_1"
    assert logs.new_attempt([0]).workers[0].stdout.parent.parent.name == "attempt_2"
    assert first.read_text() == "kept"
    assert LogDirectory.create(tmp_path, "run").path != logs.path


def test_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative log directory is relative to the agent's working directory, not to the worker's."""
    monkeypatch.chdir(tmp_path)
    assert LogDirectory.create(Path("logs"), "run").path.parent == tmp_path / "logs"


def test_the_default_is_a_fresh_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a log directory, a rallypoint_* directory is made in the folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = LogDirectory.create(None, "run").path
    assert path.parent.parent == tmp_path
    assert path.parent.name.startswith("rallypoint_")


def test_an_unusable_directory_is_one_clear_line(tmp_path: Path) -> None:
    """If a file is in its place, the error has the path, the reason and a remedy."""
    (tmp_path / "file").touch()
    with pytest.raises(LogError, match=r"^cannot make a log directory in .*/file: .*; choose .*--log-dir$"):
        LogDirectory.create(tmp_path / "file", "run")
    logs = LogDirectory.create(tmp_path, "run")
    logs.path.rmdir()
    with pytest.raises(
        LogError, match=r"^cannot make the log files in .*/attempt_0: No such file or directory$"
    ):
        logs.new_attempt([0])


@given(st.text())
def test_any_run_id_makes_a_name(run_id: str) -> None:
    """The name is never a path, a hidden file, an option or too long."""
    name = safe_name(run_id)
    assert 1 <= len(name) <= 64
    assert name[0] not in ".-"
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def test_an_ordinary_run_id_is_kept() -> None:
    """Valid characters of a file name are kept, so it stays readable."""
    assert safe_name("job-12.a_b") == "job-12.a_b"
    assert safe_name("../../etc/passwd") == "_.._etc_passwd"
    assert safe_name("") == "run"


def test_one_number_is_for_all() -> None:
    """0 to 3 apply to every worker."""
    for number in range(4):
        assert Redirect.parse(str(number), "--tee").of(5) == Streams(number)


def test_a_list_is_by_local_rank() -> None:
    """A listed rank has its own value, the others have 0, as in torchrun."""
    redirect = Redirect.parse("0:1,2:3", "--tee", workers=3)
    assert [redirect.of(rank) for rank in range(3)] == [Streams.STDOUT, Streams.NONE, Streams.BOTH]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", "'4' names no stream; expected 0"),
        ("", "'' names no stream; expected 0"),
        ("stdout", "'stdout' names no stream"),
        ("0:4", "'4' names no stream"),
        ("0:", "'' names no stream"),
        ("a:1", "'a' is not a local rank; expected"),
        ("-1:1", "'-1' is not a local rank"),
        ("0:1,", "'' is not a local rank"),
        ("0:1,0:2", "local rank 0 is named twice; name it once"),
        ("0:1,2:1", "there is no local rank 2; this host has 2 workers, counted from 0"),
    ],
)
def test_nonsense_is_explained(text: str, expected: str) -> None:
    """The error is one line: the option, its value, and the wrong part with the reason."""
    with pytest.raises(LogError) as caught:
        Redirect.parse(text, "--redirects", workers=2)
    assert str(caught.value).startswith(f"--redirects {text}: {expected}")
    assert "\n" not in str(caught.value)


def test_a_global_rank_is_found_by_its_name(tmp_path: Path) -> None:
    """The rank is enough to find a log, without host and local rank; `attempt_0/*/` has nothing twice."""
    logs = LogDirectory.create(tmp_path, "run")
    attempt = logs.new_attempt(range(4), base_rank=4)
    attempt.workers[3].stderr.write_text("it was me")
    ranks = attempt.folder / "ranks"
    assert sorted(os.listdir(ranks)) == ["4", "5", "6", "7"]
    assert (ranks / "7" / "stderr.log").read_text() == "it was me"
    assert len(list(attempt.folder.glob("*/stderr.log"))) == 4
    logs.path.rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "attempt_0" / "ranks" / "7" / "stderr.log").read_text() == "it was me"


def test_a_file_system_without_links_does_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The links are only a convenience; the logs are needed."""

    def refuse(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    assert LogDirectory.create(tmp_path, "run").new_attempt(range(2)).workers[1].stdout.exists()


def _started(keep: int, failed: set[int], tmp_path: Path) -> list[str]:
    """Return the attempts that exist after seven starts, some of which failed."""
    logs = LogDirectory.create(tmp_path, "run", keep)
    for number in range(7):
        logs.new_attempt([0])
        remove_attempts(logs.superfluous())
        if number in failed:
            logs.note_failure()
    return sorted(os.listdir(logs.path))


def test_by_default_all_attempts_stay(tmp_path: Path) -> None:
    """torchrun removes attempts that a membership change ended."""
    assert _started(0, {1}, tmp_path) == [f"attempt_{number}" for number in range(7)]


def test_the_latest_attempts_stay(tmp_path: Path) -> None:
    """The number includes the running one."""
    assert _started(1, set(), tmp_path) == ["attempt_6"]
    assert _started(3, set(), tmp_path) == ["attempt_4", "attempt_5", "attempt_6"]


def test_the_attempt_of_the_latest_failure_stays(tmp_path: Path) -> None:
    """Its report names files in it, and later attempts may have ended because of other hosts."""
    assert _started(2, {1, 3}, tmp_path) == ["attempt_3", "attempt_5", "attempt_6"]
    assert _started(1, {5}, tmp_path) == ["attempt_5", "attempt_6"]
    assert _started(2, {5}, tmp_path) == ["attempt_5", "attempt_6"]
