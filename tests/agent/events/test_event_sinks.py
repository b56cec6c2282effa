"""Events reach all sinks, and no full disk, user code or slow sink harms the job."""

from __future__ import annotations

import json
import logging
import os
import threading
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from rallypoint.agent.events import handlers
from rallypoint.agent.events.handlers import (
    EventDelivery,
    EventFile,
    check_event_log,
    log_event,
    open_event_log,
)
from rallypoint.agent.events.recorder import AgentEvent, JobIdentity, Source
from rallypoint.rpc.endpoint import SettingError
from support.waiting import PATIENCE

SUBJECT = JobIdentity("run-1", "a", "trainer", 3)


def _event(name: str, **details: object) -> AgentEvent:
    return AgentEvent(name, Source.WORKER, 1e6 + 0.25, SUBJECT, 2, 1, 0.5, details)


def test_a_file_gets_a_line_of_json_for_each_event_and_keeps_what_it_has(tmp_path: Path) -> None:
    """Several agents may write to it, one after the other or at the same time."""
    path = tmp_path / "events.jsonl"
    path.write_text('{"event":"EARLIER"}\n')
    first, second = EventFile(path), EventFile(path)
    first(_event("START", rank=3, reason="two\nlines, ünïcode"))
    second(_event("FAILED"))
    first.close()
    second.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["EARLIER", "START", "FAILED"]
    assert lines[1] == {
        "time": 1000000.25,
        "event": "START",
        "source": "WORKER",
        "run_id": "run-1",
        "node_id": "a",
        "role": "trainer",
        "round": 2,
        "restart_count": 1,
        "duration": 0.5,
        "rank": 3,
        "reason": "two\nlines, ünïcode",
    }


def test_a_line_that_breaks_off_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk takes part of a line; once there is room again, the next events can be read."""
    path = tmp_path / "events.jsonl"
    file = EventFile(path)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
    with pytest.raises(OSError, match=r"only 10 of \d+ bytes were written"):
        file(_event("LOST"))
    monkeypatch.undo()
    file(_event("KEPT"))
    file.close()
    torn, kept = path.read_text().splitlines()
    assert len(torn) == 10
    assert json.loads(kept)["event"] == "KEPT"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_logged_once_and_harms_no_other_sink(caplog: pytest.LogCaptureFixture) -> None:
    """The other sinks get their events, and the log has one error."""
    taken: list[str] = []
    full = open_event_log("file:/dev/full")
    assert full is not None
    deliver = EventDelivery([full, lambda event: taken.append(event.name)])
    for name in ("A", "B", "C"):
        deliver(_event(name))
    assert deliver.close(PATIENCE)
    assert taken == ["A", "B", "C"]
    (record,) = [each for each in caplog.records if "an event is lost" in each.getMessage()]
    assert "No space left on device" in record.getMessage()


def test_a_sink_that_fails_again_is_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once for each series of failures, not once for every event."""
    works = iter([False, False, True, False])

    def moody(event: AgentEvent) -> None:
        if not next(works):
            raise ValueError("not today")

    deliver = EventDelivery([moody])
    for name in "ABCD":
        deliver(_event(name))
    assert deliver.close(PATIENCE)
    lost = [each.getMessage() for each in caplog.records]
    assert [("lost='A'" in line, "lost='D'" in line) for line in lost] == [(True, False), (False, True)]
    assert "moody" in lost[0]


def test_a_hanging_sink_causes_no_delay_and_uses_bounded_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent goes on, and its end waits for a limited time."""
    monkeypatch.setattr(handlers, "_WAITING", 5)
    held, release = threading.Event(), threading.Event()

    def hang(event: AgentEvent) -> None:
        held.set()
        assert release.wait(PATIENCE)

    deliver = EventDelivery([hang])
    deliver(_event("HELD"))
    assert held.wait(PATIENCE)
    for number in range(20):
        deliver(_event(f"E{number}"))
    assert "events are lost: their sinks are too slow" in caplog.text
    assert not deliver.close(0.05)
    release.set()
    assert deliver.close(PATIENCE)


def test_without_sinks_there_is_no_thread() -> None:
    """Most jobs have none: they must not pay for it."""
    deliver = EventDelivery([])
    deliver(_event("START"))
    assert (deliver.has_sinks, deliver.under_way) == (False, False)
    assert deliver.close(0.0)


def test_the_console_shows_events_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The log has all fields of the event."""
    caplog.set_level(logging.INFO)
    assert open_event_log("console") is log_event
    log_event(_event("START", rank=3))
    assert "event START" in caplog.text
    assert "rank=3" in caplog.text
    assert "duration=0.5" in caplog.text


def _plug(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    point = EntryPoint("ours", value, handlers.ENTRY_POINTS)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point])


def test_a_program_can_plug_a_sink_of_its_own_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of its entry point selects a callable that makes the sink."""
    _plug(monkeypatch, "collections:deque")
    sink = open_event_log("ours")
    assert type(sink).__name__ == "deque"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nonsense", "'nonsense' is none of null, console, file:PATH, ours"),
        ("file:", "'file:' is none of null, console"),
        ("file:/nowhere/events", "can't write '/nowhere/events': No such file or directory"),
        ("ours", r"the entry point 'ours' \(collections:nothing\) raised AttributeError"),
    ],
)
def test_an_unusable_sink_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, text: str, sentence: str
) -> None:
    """The error is raised before anything is started."""
    _plug(monkeypatch, "collections:nothing")
    with pytest.raises(SettingError, match=f"^--event-log-handler: {sentence}"):
        check_event_log(text)


def test_a_checked_sink_is_left_closed(tmp_path: Path) -> None:
    """A check may be made long before the job, or instead of it."""
    before = len(os.listdir("/proc/self/fd"))
    assert check_event_log(f"file:{tmp_path}/events") == f"file:{tmp_path}/events"
    assert check_event_log("null") == "null"
    assert len(os.listdir("/proc/self/fd")) == before
