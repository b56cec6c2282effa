"""One step of the runs of a journal: what was asked for, and what is changed by it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rallypoint.rendezvous.base.errors import Refusal, of_unknown_outcome
from rallypoint.rendezvous.core import commands, facts
from rallypoint.rendezvous.core.commands import Refused
from rallypoint.rendezvous.hosted_run import HostedRun
from rallypoint.rendezvous.journal.journal import Entry, Record

_T = TypeVar("_T")

# Who causes what nobody asked for: deadlines and consequences.
SERVICE = "service"


@dataclass(slots=True)
class Request(Generic[_T]):
    """A command, if any, and what is then read: with the facts that came of it, once all there is is durable."""

    answer: asyncio.Future[_T]
    read: Callable[[Sequence[facts.Fact]], _T]
    run_id: str = ""
    command: commands.Command | None = None
    actor: str = SERVICE
    undo: Callable[[_T], None] = lambda _: None
    came_at: float = 0.0
    happened: Sequence[facts.Fact] = ()
    refusal: Refused | None = None

    def settle(self) -> None:
        """Answer; what was read for somebody who has gone meanwhile is undone."""
        try:
            if self.refusal is not None:
                raise self.refusal
            answer = self.read(self.happened)
        except Exception as error:  # a refusal, or none: whatever it is, it concerns only this one
            self.fail(error)
        else:
            if self.answer.done():
                self.undo(answer)
            else:
                self.answer.set_result(answer)

    def fail(self, error: Exception) -> None:
        """Answer with an error."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def abandon(self, refusal: Refusal) -> None:
        """Answer although the commit is still under way, of which nobody here will learn how it ends."""
        refused = refusal(self.run_id)
        self.fail(refused if self.command is None else of_unknown_outcome(refused))


@dataclass(slots=True)
class Step:
    """What one step changes: durable together, and told only then."""

    entries: list[Entry] = field(default_factory=list)
    changed: dict[str, HostedRun] = field(default_factory=dict)
    happened: list[tuple[HostedRun, facts.Fact, Record]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
