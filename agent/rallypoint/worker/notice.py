"""Notice of the host's departure for workers, and their confirmation that state is saved.

The agent names a file in RALLYPOINT_NOTICE, which exists only after an announcement; docs/draining.md describes its
content, for other languages. This module loads no gRPC, never waits, and does not fail without an agent.

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
    """An announced departure of the host.

    Attributes:
        reason: Why the host leaves, for people.
        seconds_left: Seconds until the workers are stopped if they have not saved their state; 0 if it is due.
    """

    reason: str
    seconds_left: float


@dataclass
class _Board:
    """The notice file of this process; `path` None: there is no agent."""

    path: bytes | None
    saved: bool = False


class _Content(NamedTuple):
    reason: str
    deadline: float
    saved: str


_board: _Board | None = None


def should_checkpoint() -> bool:
    """Return True if this worker must save its state now, because its host will leave.

    True from the announcement until `checkpoint_saved` is called. Only workers of the leaving host see it: ranks that
    save together must agree first, for example by an all-reduce of the result. Costs about a microsecond (one check
    for a file that does not exist).
    """
    board = _board or _find_notice_file()
    return board.path is not None and not board.saved and os.access(board.path, os.F_OK)


def notice() -> Notice | None:
    """Return the announced departure of the host; None if there is none."""
    content = _read()
    if content is None:
        return None
    return Notice(content.reason, max(0.0, content.deadline - time.monotonic()))


def checkpoint_saved() -> bool:
    """Report to the agent that this worker has saved its state and can be stopped at any moment.

    When all workers of the host have reported it, the host leaves at once. Call it when another host can read the
    checkpoint; then continue training, or wait: the worker is stopped like any other, and has not failed. Without an
    announcement, as on the hosts that stay, this does nothing.

    Returns:
        True if the agent received the report.
    """
    board = _board or _find_notice_file()
    content = _read()
    if content is None:
        return False
    try:
        # Non-blocking: if the agent is gone, the pipe has no reader, and that is an error.
        pipe = os.open(content.saved, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(pipe, f"{os.environ.get('RANK', '')}\n".encode())
        finally:
            os.close(pipe)
    except OSError:
        return False  # the workers of a dead agent are killed
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
    global _board  # noqa: PLW0603  # cached: reading the environment each time would double the cost
    path = os.environ.get(NOTICE_VARIABLE)
    _board = _Board(os.fsencode(path) if path else None)
    return _board


def _forget() -> None:
    """Forget the file in a forked child: its parent may have looked for one before it had an agent."""
    global _board  # noqa: PLW0603
    _board = None


os.register_at_fork(after_in_child=_forget)
