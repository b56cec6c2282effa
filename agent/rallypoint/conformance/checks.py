"""The base of both kits: checks of a program under test, by rule, and the registration of scenarios."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from rallypoint.conformance.client import TestedProcess
from rallypoint.conformance.rules import Findings
from rallypoint.rpc.loop import Notifier

HOLD = 0.8
"""Seconds for which a state must last, as in "no worker starts"."""

POLL = 0.03
"""Seconds between two looks at processes. Those of a client are not the kit's: their files, and /proc, are all that it
can see of them."""


class RuleBroken(Exception):
    """The client broke a rule: the scenario ends."""


class ClientFailed(Exception):
    """The client ended before it opened a stream: nothing can be checked."""


class NotOffered(Exception):
    """The program lacks a feature that a scenario needs: the scenario ends without a finding."""


class Checks:
    """The checks of one program under test.

    Attributes:
        client: The program.
        changed: Notified when it may have done something.
        findings: The results so far.
        timeout: Seconds to wait for each expected action of the program.
    """

    def __init__(self, client: TestedProcess, changed: Notifier, timeout: float) -> None:
        """Check nothing yet."""
        self.client = client
        self.changed = changed
        self.findings = Findings()
        self.timeout = timeout

    def state(self) -> str:
        """Describe the present state of the program, for people."""
        return f"last lines: {self.client.last_lines}"

    def check(self, rule: str, holds: bool, expected: str, seen: str) -> None:
        """Record that a rule held; end the scenario if it did not."""
        if not holds:
            self.findings.broken[rule] = expected, seen
            raise RuleBroken
        self.findings.held.add(rule)

    async def until(
        self, rule: str, condition: Callable[[], object], expected: str, *, running: bool = True
    ) -> None:
        """Wait until a condition holds; the rule is broken if it does not in time.

        Args:
            rule: The rule.
            condition: The condition.
            expected: The expectation, for people.
            running: False if the client may end meanwhile.
        """
        end = self.now + self.timeout
        while not condition():
            code = self.client.exit_code
            if running and code is not None and not condition():
                seen = f"the client ended with exit code {code}; its last lines: {self.client.last_lines}"
                self.check(rule, False, expected, seen)
            if self.now >= end:
                self.check(rule, False, expected, f"nothing within {self.timeout:g} s; {self.state()}")
            await self.changed.since(self.changed.count, POLL)
        self.check(rule, True, expected, "")

    async def hold(self, rule: str, holds: Callable[[], bool], expected: str, seconds: float = HOLD) -> None:
        """Check that a condition holds for a while."""
        end = self.now + seconds
        while self.now < end:
            self.check(rule, holds(), expected, self.state())
            await asyncio.sleep(POLL)

    @property
    def now(self) -> float:
        """Loop time."""
        return asyncio.get_running_loop().time()


Play: TypeAlias = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True)
class Scenario:
    """A script; `rules`: those that it is there for."""

    name: str
    summary: str
    rules: tuple[str, ...]
    play: Play


def register_in(scenarios: dict[str, Scenario], *rules: str) -> Callable[[Play], Play]:
    """Register a function as a scenario that is there for these rules; its docstring is the summary."""

    def register(play: Play) -> Play:
        name = play.__name__.replace("_", "-")
        scenarios[name] = Scenario(name, (play.__doc__ or "").strip(), rules, play)
        return play

    return register
