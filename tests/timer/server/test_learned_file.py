"""Learned data outlives the process, or an error gives the reason; it is never half written, and never too high."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest

from rallypoint.rpc.endpoint import SettingError
from rallypoint.timer.core.values import Learned
from rallypoint.timer.server.learned import FORMAT, LearnedFile, LearnedRun

DAY = 24 * 3600.0
RUNS = [
    LearnedRun("run", [Learned("step", 120, 1.25), Learned('Prüfung \\ "x"', 3, 0.0)]),
    LearnedRun("other", [Learned("step", 2**63 - 1, 315_360_000.0)]),
]


class WallClock:
    """A clock of Unix seconds that the test sets."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.5

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def wall_clock() -> WallClock:
    return WallClock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "var" / "learned.json"


@pytest.fixture
def file(path: Path, wall_clock: WallClock) -> Iterator[LearnedFile]:
    """A new file that is open."""
    file = LearnedFile(path, wall_clock)
    assert file.open(DAY) == []
    yield file
    file.close()


def reopened(file: LearnedFile, wall_clock: WallClock, retention: float = DAY) -> list[LearnedRun]:
    """Return the data that the next process reads."""
    file.close()
    following = LearnedFile(file.path, wall_clock)
    try:
        return following.open(retention)
    finally:
        following.close()


def refused(path: Path) -> str:
    """Return the one line of the error that opening raises."""
    with pytest.raises(SettingError) as caught:
        LearnedFile(path).open(DAY)
    (line,) = str(caught.value).splitlines()
    return line


def test_written_data_is_read_back(file: LearnedFile, wall_clock: WallClock) -> None:
    """It is complete, in order, to the last digit; people and programs can read the file."""
    file.write(RUNS)
    assert json.loads(file.path.read_bytes())["format"] == FORMAT
    assert reopened(file, wall_clock) == RUNS


def test_opening_makes_no_file(file: LearnedFile) -> None:
    """It makes only its folder and the lock: there is no data to keep yet."""
    assert [each.name for each in file.path.parent.iterdir()] == ["learned.json.lock"]


def test_an_empty_file_is_written_and_read(file: LearnedFile, wall_clock: WallClock) -> None:
    """This is the file after all was forgotten."""
    file.write(RUNS)
    file.write([])
    assert reopened(file, wall_clock) == []


def test_runs_unchanged_for_long_are_left_out(file: LearnedFile, wall_clock: WallClock) -> None:
    """This holds if it is written again and again with changing data, and the service restarts."""
    file.write(RUNS)
    for count in range(3, 9):
        wall_clock.now += 0.3 * DAY
        runs = reopened(file, wall_clock)
        assert [run.run_id for run in runs] == (["run", "other"] if count < 6 else ["run"])
        file = LearnedFile(file.path, wall_clock)
        kept = file.open(DAY)
        file.write([LearnedRun("run", [Learned("step", count, 1.0)]), *kept[1:]])


def test_a_clock_that_was_ahead_keeps_nothing_for_ever(file: LearnedFile, wall_clock: WallClock) -> None:
    """Once the file is written with a correct clock, the age of its data begins to count."""
    wall_clock.now += 3650 * DAY
    file.write(RUNS)
    wall_clock.now -= 3650 * DAY
    file.write(RUNS)
    wall_clock.now += 1.1 * DAY
    assert reopened(file, wall_clock) == []


def test_every_damaged_byte_is_noticed_and_nothing_is_touched(file: LearnedFile) -> None:
    """Some damage changes nothing, as a blank may. The error names the remedy."""
    file.write(RUNS)
    file.close()
    whole = file.path.read_bytes()
    told = set()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 7
        file.path.write_bytes(damaged)
        following = LearnedFile(file.path, lambda: 1_700_000_000.5)
        try:
            assert following.open(DAY) == RUNS
        except SettingError as error:
            told.add(str(error))
            assert file.path.read_bytes() == damaged
        finally:
            following.close()
    assert len(told) > 3
    for line in told:
        assert line.startswith(f"the file of learned durations {file.path} is ")
        assert "was not touched" in line
        assert line.endswith("choose another file with --learned, or keep nothing with --learned none")
        assert "\n" not in line


@pytest.mark.parametrize("left", [0, 1, 40, 100, -1, -3])
def test_a_file_that_was_cut_is_refused(file: LearnedFile, left: int) -> None:
    """This holds for any cut; no service ever wrote an empty file."""
    file.write(RUNS)
    file.close()
    file.path.write_bytes(file.path.read_bytes()[:left])
    assert "is damaged (" in refused(file.path)


def written_by_hand(path: Path, runs: str) -> None:
    """Write a file whose checksum is right."""
    body = f"{runs}\n]}}\n".encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(f'{{"format": 1, "crc32": "{crc32(body):08x}", "runs": [\n'.encode() + body)


@pytest.mark.parametrize(
    "runs",
    [
        "7",
        '{"run_id": "run"}',
        '{"run_id": "", "changed_at": 1, "scopes": []}',
        '{"run_id": "\\ud800", "changed_at": 1, "scopes": []}',
        '{"run_id": "run", "changed_at": 1, "scopes": [["step", 0, 1.0]]}',
        '{"run_id": "run", "changed_at": 1, "scopes": [["step", 9223372036854775808, 1.0]]}',
        '{"run_id": "run", "changed_at": 1, "scopes": [["step", 1.5, 1.0]]}',
        '{"run_id": "run", "changed_at": 1, "scopes": [["step", 1, -1.0]]}',
        '{"run_id": "run", "changed_at": 1, "scopes": [["step", 1, NaN]]}',
        '{"run_id": "run", "changed_at": 1, "scopes": [["step", 1, 1e999]]}',
        '{"run_id": "run", "changed_at": 1, "scopes": [["step", 1, "1"]]}',
        '{"run_id": "run", "changed_at": 1, "scopes": [["", 1, 1.0]]}',
        '{"run_id": "run", "changed_at": 1, "scopes": [["step", 1]]}',
        "[" * 100_000,
    ],
)
def test_data_that_no_service_wrote_is_refused(path: Path, runs: str) -> None:
    """This holds with a correct checksum: no timer may expire by such data."""
    written_by_hand(path, runs)
    assert "is damaged (" in refused(path)


def test_a_newer_format_is_refused(path: Path) -> None:
    """It is not damaged: a newer version can read it."""
    path.parent.mkdir()
    path.write_text('{"format": 2, "something": "else"}')
    told = refused(path)
    assert (
        "is of a newer version of Rallypoint (it has format 2, this version reads 1) and was not touched"
        in told
    )
    assert path.read_text() == '{"format": 2, "something": "else"}'


def test_two_services_can_not_share_a_file(file: LearnedFile, wall_clock: WallClock) -> None:
    """The second one reports it; once the first has ended it can open the file."""
    assert "is in use by another process: stop that one, or choose another" in refused(file.path)
    assert reopened(file, wall_clock) == []


def test_an_unusable_path_is_reported(tmp_path: Path) -> None:
    """The error has the reason: it is a folder, its folder is a file, or its folder can't be made."""
    (tmp_path / "folder").mkdir()
    assert f"can't be used ({tmp_path / 'folder'}: Is a directory)" in refused(tmp_path / "folder")
    (tmp_path / "file").touch()
    assert f"can't be used ({tmp_path / 'file'}: File exists)" in refused(tmp_path / "file" / "learned.json")
    assert "can't be used (/proc/none: No such file or directory)" in refused(Path("/proc/none/learned.json"))


def test_a_write_that_fails_leaves_the_file_as_it_was(
    file: LearnedFile, wall_clock: WallClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other file is left; a later attempt succeeds."""
    file.write(RUNS)
    before = file.path.read_bytes()
    with monkeypatch.context() as broken:

        def fail(_: int) -> None:
            raise OSError(28, "No space left on device")

        broken.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            file.write(RUNS[:1])
    assert file.path.read_bytes() == before
    assert sorted(each.name for each in file.path.parent.iterdir()) == ["learned.json", "learned.json.lock"]
    file.write(RUNS[:1])
    assert reopened(file, wall_clock) == RUNS[:1]


def test_only_its_user_can_read_it(file: LearnedFile, wall_clock: WallClock) -> None:
    """This includes the new file beside it; files that others could read are narrowed, also by reading them."""
    beside = file.path.with_name(file.path.name + ".new")
    beside.touch(0o666)
    file.write(RUNS)
    assert file.path.stat().st_mode & 0o777 == 0o600
    file.path.chmod(0o644)
    assert reopened(file, wall_clock) == RUNS
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_it_is_on_disk_before_it_takes_the_place_of_the_old_one(
    file: LearnedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file is synced and renamed, then its folder is synced: else a loss of power leaves an empty one."""
    order: list[str] = []
    sync, replace = os.fsync, Path.replace

    def noting_sync(number: int) -> None:
        order.append("sync folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "sync file")
        sync(number)

    def noting_replace(self: Path, target: Path) -> Path:
        order.append("replace")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noting_sync)
    monkeypatch.setattr(Path, "replace", noting_replace)
    file.write(RUNS)
    assert order == ["sync file", "replace", "sync folder"]
