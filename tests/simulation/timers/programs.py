"""Workers and their behaviour: scopes that they leave in time, just in time, late, or never; threads, forks, deaths.

A program draws its actions at random; it reports its real actions to the referee, independently of its agent.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from simulation.clockwork import Process
from simulation.timers.sockets import Line
from simulation.timers.speech import ByMessages, ByTable, Speech
from simulation.timers.truth import Span, Stillness

_NANOSECONDS = 1_000_000_000
# Seconds left of a scope that is left just in time: more than the clocks of two hosts may differ in its duration.
_BRINK = 0.03
# Seconds of a pause between two scopes after which an agent is about to stop polling the table.
_LULL = (1.96, 2.06)


@dataclass(slots=True)
class Temper:
    """The behaviour of the workers of a seed."""

    # Weights of the ways in which a scope ends.
    ends: dict[str, float]
    # Chance that the timeout of a scope is learned, that it has a nested scope, that it is acquired again (by message).
    learning: float
    nesting: float
    renewing: float
    # Chance of a pause between two scopes.
    lulls: float
    # Number of threads with scopes of their own; the shortest and the longest scopes, seconds.
    threads: int
    shortest: float
    longest: float
    # If True, no scope is left late; and no scope is entered.
    steady: bool = False
    finishing: bool = False


class Witness(Protocol):
    """An observer of the real events."""

    def entered(self, span: Span) -> None:
        """A program has entered a scope."""

    def left(self, span: Span, completed: bool) -> None:
        """A scope has ended: the program left it, or died."""


class Environment(Protocol):
    """The environment of a program: its host."""

    stillness: Stillness

    def connect(self, pid: int) -> Line:
        """Open a connection of a process to its agent. Raises OSError: there is no agent."""

    def now(self) -> float:
        """Return the world's time, in seconds."""


@dataclass(slots=True, eq=False)
class Program:
    """One process of a worker."""

    worker_id: str
    pid: int
    process: Process
    around: Environment
    witness: Witness
    temper: Temper
    chance: random.Random
    by_table: bool
    # The time at which it last lost its connection, by the world's clock.
    cut_off_at: float = -1e9
    _held: dict[int, Span] = field(default_factory=dict)
    _tokens: count[int] = field(default_factory=lambda: count(1))
    _speech: Speech = field(init=False)

    def start(self) -> None:
        """Start its threads."""
        if self.by_table:
            self._speech = ByTable(self.process.name, self._clock, self._connect)
        else:
            self._speech = ByMessages(self._clock, self._connect)
        for _ in range(self.temper.threads):
            self.process.create_task(self._live())

    def die(self) -> None:
        """Die; the kernel closes the connection."""
        if not self.process.alive:
            return
        self.process.kill()
        for token in list(self._held):
            self._end(token, completed=False, tell=False)
        if self._speech.line is not None:
            self._speech.line.end()

    def cut(self, seconds: float) -> None:
        """Break its connection; it reconnects after `seconds`."""
        line = self._speech.line
        if line is not None and not line.over and self.process.alive:
            line.end()
            self.cut_off_at = self.around.now()
            self.process.call_later(seconds, self._speech.reconnect)

    @property
    def guarded(self) -> bool:
        """True if its agent can receive its timers."""
        line = self._speech.line
        return self.process.alive and line is not None and not line.over

    # ---- its scopes

    async def _live(self) -> None:
        await asyncio.sleep(self.chance.uniform(0.0, 0.5))
        while not self.temper.finishing:
            await self._block(0)
            await self._work(self._gap())

    async def _block(self, depth: int) -> None:
        chance, temper = self.chance, self.temper
        learns = chance.random() < temper.learning
        number = chance.randrange(4)
        if learns:
            scope, after = f"auto{number}", None
        else:
            scope = f"scope{number}"
            after = temper.shortest * (temper.longest / temper.shortest) ** chance.random()
        how = self._how()
        token = next(self._tokens)
        span = self._acquire(token, scope, after, how)
        if depth < 2 and chance.random() < temper.nesting:
            await self._block(depth + 1)
        if not self.by_table and after is not None and chance.random() < temper.renewing:
            await self._work(max(0.0, after * chance.uniform(0.2, 0.9) - self._spent(span)))
            after = temper.shortest * (temper.longest / temper.shortest) ** chance.random()
            span = self._acquire(token, scope, after, how)
        if how == "hang":
            await asyncio.get_running_loop().create_future()
        await self._work(self._duration(span, how))
        self._end(token, completed=True)

    def _gap(self) -> float:
        """Return the seconds for which to be in no scope."""
        chance = self.chance
        if chance.random() < self.temper.lulls:
            return chance.uniform(*_LULL)
        return chance.choice([0.0, 0.001, 0.05, chance.expovariate(2.0)])

    def _how(self) -> str:
        if self.temper.steady:
            return "prompt"
        return self.chance.choices(list(self.temper.ends), list(self.temper.ends.values()))[0]

    def _duration(self, span: Span, how: str) -> float:
        """Return the seconds for which to stay in a scope."""
        chance, after = self.chance, span.after
        if after is None:
            whole = chance.uniform(0.02, 0.2) * (20.0 if how == "late" else 1.0)
        elif how == "late":
            whole = after * chance.uniform(1.01, 2.0)
        elif how == "brink":
            whole = after - _BRINK
        else:
            whole = after * chance.uniform(0.0, 0.9)
        return max(0.0, whole - self._spent(span))

    def _spent(self, span: Span) -> float:
        return self.around.stillness.ran(span.since, self.around.now())

    async def _work(self, seconds: float) -> None:
        """Compute for `seconds` of the host's running time: pauses of the host do not count."""
        still = self.around.stillness
        begun, before = self.around.now(), still.total
        while (left := seconds - (self.around.now() - begun - (still.total - before))) > 1e-6:  # noqa: ASYNC110 (clock)
            await asyncio.sleep(left)

    # ---- its messages to the agent

    def _clock(self) -> int:
        return int(self.process.time() * _NANOSECONDS)

    def _connect(self) -> Line:
        return self.around.connect(self.pid)

    def _acquire(self, token: int, scope: str, after: float | None, how: str) -> Span:
        former = self._held.get(token)
        if former is not None:
            former.replaced = True
            self._end(token, completed=False, tell=False)
        doomed = how in ("late", "hang")
        now, host = self.around.now(), self.around.stillness
        span = Span(self.worker_id, self.pid, scope, after, now, host, doomed=doomed)
        self.witness.entered(span)
        self._held[token] = span
        self._speech.enter(token, scope, after)
        return span

    def _end(self, token: int, *, completed: bool, tell: bool = True) -> None:
        span = self._held.pop(token)
        span.ended = self.around.now()
        self.witness.left(span, completed)
        if tell:
            self._speech.leave(token)
