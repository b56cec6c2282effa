"""Checks of a history in a file, by `python -m ha.check FILE`."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from ha.check import main
from ha.history import NEVER, History, Operation, Outcome

_TOKEN = f"{1:016x}aa"


def _written(file: Path, *, wrong: bool) -> None:
    shown = {"state": "other" if wrong else "mine", "token": _TOKEN}
    with History(file, clock=lambda: 9.0) as history:
        asked = {"state": "mine", "token": None}
        answered = {"state": "mine", "token": _TOKEN, "has_set": True}
        history.add(Operation("a", "state.set", "run", 1.0, 2.0, Outcome.OK, asked, answered))
        history.add(Operation("b", "state.get", "run", 3.0, 4.0, Outcome.OK, {}, shown))
        history.add(Operation("b", "state.get", "run", 5.0, NEVER, Outcome.UNKNOWN))
        history.trouble("replica-1 is killed")
        history.end()


def test_a_sound_history_passes(tmp_path: Path) -> None:
    """The output has the number of operations by kind and outcome, and on request the actions of the nemesis."""
    _written(tmp_path / "history", wrong=False)
    result = CliRunner().invoke(main, [str(tmp_path / "history"), "--troubles"])
    assert result.exit_code == 0
    assert "1 state.get unknown" in result.output
    assert "replica-1 is killed" in result.output
    assert result.output.endswith("0 findings\n")


def test_a_violation_is_shown_with_its_entries(tmp_path: Path) -> None:
    """A violation is shown with the lines of the history that prove it; the exit code is 1."""
    _written(tmp_path / "history", wrong=True)
    result = CliRunner().invoke(main, [str(tmp_path / "history")])
    assert result.exit_code == 1
    assert "REUSED run: token" in result.output
    assert '"client":"b"' in result.output
    assert "replica-1 is killed" not in result.output


def test_an_unreadable_history_has_its_own_exit_code(tmp_path: Path) -> None:
    """A file that is cut off, or that is no history, has its own exit code."""
    _written(tmp_path / "history", wrong=False)
    whole = (tmp_path / "history").read_text()
    for content, said in (
        (whole[: whole.rindex("{")], "no last line"),
        ("nonsense\n", "history:1: no entry"),
    ):
        (tmp_path / "history").write_text(content)
        result = CliRunner().invoke(main, [str(tmp_path / "history")])
        assert result.exit_code == 2
        assert said in result.output
