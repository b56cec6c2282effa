"""Histories in their written form."""

from __future__ import annotations

from pathlib import Path

import pytest

from ha.history import (
    NEVER,
    Admission,
    End,
    Entry,
    Fact,
    History,
    HistoryIsCutError,
    Logged,
    Operation,
    Outcome,
    Told,
    Trouble,
    dump,
    load,
    read,
)

_ENTRIES: list[Entry] = [
    Operation("a", "store.get", "run/k", 1.0, 2.5, Outcome.OK, {}, {"value": None}, "replica-1"),
    Operation("b", "state.set", "run", 1.5, NEVER, Outcome.UNKNOWN, {"state": "s", "token": None}),
    Admission(2.0, "node-1#2", "run", "node-1", 7, resumed=True),
    Told(2.0, "node-1#2", "run", "node-1", 7, {"revision": "12", "phase": "PHASE_FINAL"}),
    Logged(3.0, "", "run", {"revision": "1", "kind": "EVENT_KIND_RUN_CREATED"}),
    Fact("run", 1, "00ff"),
    Trouble(4.0, "etcd-1 is killed"),
    End(5.0),
]


@pytest.mark.parametrize("entry", _ENTRIES, ids=lambda entry: entry.kind)
def test_every_kind_of_entry_is_read_back(entry: Entry) -> None:
    """Every kind of entry is read back unchanged, also an operation of unknown outcome."""
    line = dump(entry)
    assert "\n" not in line
    assert load(line) == entry


def test_a_file_has_all_that_was_added(tmp_path: Path) -> None:
    """A complete history is read back unchanged."""
    with History(tmp_path / "history", clock=lambda: 6.0) as history:
        for entry in _ENTRIES[:-1]:
            history.add(entry)
        history.trouble("all is healed")
        history.end()
    assert read(tmp_path / "history").entries == [*_ENTRIES[:-1], Trouble(6.0, "all is healed"), End(6.0)]
    assert list(history.of(Trouble)) == [_ENTRIES[-2], Trouble(6.0, "all is healed")]


def test_a_history_that_was_cut_off_is_not_judged(tmp_path: Path) -> None:
    """Without its last line, pending writes would be missing, and reads of them would look like violations."""
    with History(tmp_path / "history") as history:
        history.add(_ENTRIES[0])
    with pytest.raises(HistoryIsCutError, match="no last line"):
        read(tmp_path / "history")


@pytest.mark.parametrize(
    "line", ["", "{}", "[1]", '{"kind":"rumour"}', '{"kind":"fact"}', '{"kind":"end","at":1']
)
def test_a_line_that_is_no_entry_is_named(tmp_path: Path, line: str) -> None:
    """The error for a wrong file names the wrong line."""
    file = tmp_path / "history"
    file.write_text(f"{dump(End(1.0))}\n{line}\n")
    with pytest.raises(ValueError, match="history:2: "):
        read(file)
