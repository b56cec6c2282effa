"""Tells a worker that its host is going to leave, and the agent that the worker has saved its state.

The agent names a file in RALLYPOINT_NOTICE. As long as nothing is wrong there is no such file; docs/draining.md says
what is in it, for other languages. Nothing here loads gRPC, waits, or fails where there is no agent.

    for step in range(steps):
        train(step)
        if agreed(should_checkpoint()):  # over all ranks: they must save the same step
            save(step)
            checkpoint_saved()
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import NamedTuple

NOTICE_VARIABLE = "RALLYPOINT_NOTICE"


class Notice(NamedTuple):
    """What the agent has announced.

    Attributes:
        reason: Why the host leaves, for people.
        seconds_left: Until the workers are stopped if they have not saved their state; 0 if that is due.
    """

    reason: str
    seconds_left: float


@dataclass(slots=True)
class _Board:
    """Where this process looks; None: there is no agent."""

    path: bytes | None
    saved: bool = False


class _Content(NamedTuple):
    reason: str
    deadline: float
    saved: str


_board: _Board | None = None


def should_checkpoint() -> bool:
    """Whether this worker is to save its state now, because its host is going to leave.

    True from the moment of the announcement until `checkpoint_saved` is called. Only the workers of the host that
    leaves see it: ranks that save together must agree first, as by an all-reduce of the answer. Costs about a
    microsecond (one look for a file that is not there).
    """
    board = _board or _find_notice_file()
    return board.path is not None and not board.saved and os.access(board.path, os.F_OK)


def notice() -> Notice | None:
    """What was announced; None if nothing was."""
    content = _read()
    if content is None:
        return None
    return Notice(content.reason, max(0.0, content.deadline - time.monotonic()))


def checkpoint_saved() -> bool:
    """Tells the agent that this worker has saved its state, and can be stopped at any moment.

    Once all workers of the host have said so, it leaves at once. Call it after the checkpoint is where another host
    can read it; go on training, or wait: the worker is stopped like any other, and has not failed. Where nothing
    was announced, as on the hosts that stay, nothing happens.

    Returns:
        Whether the agent was told.
    """
    board = _board or _find_notice_file()
    content = _read()
    if content is None:
        return False
    try:
        # Never waits: with an agent that is gone there is no reader, and that is an error.
        pipe = os.open(content.saved, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(pipe, f"{os.environ.get('RANK', '')}\n".encode())
        finally:
            os.close(pipe)
    except OSError:
        return False  # an agent that is gone takes its workers along
    board.saved = True
    return True


def _read() -> _Content | None:
    board = _board or _find_notice_file()
    if board.path is None:
        return None
    try:
        with open(board.path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        return None
    return _Content(content["reason"], content["deadline"], content["saved"])


def _find_notice_file() -> _Board:
    global _board  # noqa: PLW0603  # the environment is a global too, and reading it each time would cost as much again
    path = os.environ.get(NOTICE_VARIABLE)
    _board = _Board(os.fsencode(path) if path else None)
    return _board


def _forget() -> None:
    """A worker may be the fork of a process that has looked before it knew whose worker it is going to be."""
    global _board  # noqa: PLW0603
    _board = None


os.register_at_fork(after_in_child=_forget)
