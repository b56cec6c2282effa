"""The workers of a round on one host: processes that start, run, write, end and are stopped, at random times."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from simulation.clockwork import Clockwork, Handle
from simulation.losses import TIMEOUT, Losses
from simulation.referee import Group, Referee


@dataclass(slots=True)
class Fates:
    """Probabilities and durations of the workers' behaviour; times in seconds."""

    # Chance that a group fails, and, if it does not, that it succeeds.
    failing: float = 0.0
    succeeding: float = 0.0
    # Longest run before that.
    longest: float = 30.0
    # Longest time to stop.
    slowest_stop: float = 1.0
    # Chance that a failure of other workers of the round makes workers fail, and the longest delay.
    infectious: float = 0.0
    within: float = 0.3
    # Chance that workers fail because a host of their round is gone.
    bereaved: float = 0.0
    # Chance that a failure is permanent.
    unmendable: float = 0.0
    # If True, workers run until they are stopped.
    steady: bool = False
    # If True, workers succeed as soon as they can.
    finishing: bool = False


class WorkerGroup:
    """A group of workers; the callbacks notify the agent, unless it has abandoned the group."""

    def __init__(
        self,
        clockwork: Clockwork,
        chance: random.Random,
        fates: Fates,
        referee: Referee,
        group: Group,
        *,
        losses: Losses,
        asleep: Callable[[], bool],
        on_start: Callable[[], None],
        on_write: Callable[[], None],
        on_failure: Callable[[], None],
        on_success: Callable[[], None],
    ) -> None:
        self.group = group
        self.running = False
        self.failed_at = 0.0
        # True if it failed by itself, and not because a host was lost.
        self.own_failure = True
        self._losses = losses
        self._asleep = asleep
        self._clockwork = clockwork
        self._chance = chance
        self._fates = fates
        self._referee = referee
        self._on_start = on_start
        self._on_write = on_write
        self._on_failure = on_failure
        self._on_success = on_success
        self._ended = False
        self._pending: list[Handle] = []
        self._after(chance.uniform(0.0, 0.3), self._start)

    def _after(self, seconds: float, what: Callable[..., object], *args: object) -> None:
        """Schedule an event of the workers; if their host is suspended then, it happens soon after the resume."""

        def befall() -> None:
            if self._asleep():
                self._after(0.5, what, *args)
            else:
                what(*args)

        self._pending.append(self._clockwork.after(seconds, befall))

    def _start(self) -> None:
        self.running = True
        self._losses.crews.add(self)
        self._referee.started(self.group)
        self._on_start()
        self._write()
        chance, fates = self._chance, self._fates
        if self._losses.of(self.group.run_id, self.group.round).losses:
            self.lose_peer(chance.uniform(*TIMEOUT))
        if fates.finishing:
            self._after(0.1, self.succeed)
            return
        when = chance.uniform(0.2, fates.longest)
        if chance.random() < fates.failing:
            self._after(when, self._fail)
        elif chance.random() < fates.succeeding:
            self._after(when, self._end, self._on_success)

    def lose_peer(self, seconds: float) -> None:
        """Fail after `seconds`, perhaps: a host of the round is gone."""
        if self._chance.random() < self._fates.bereaved:
            self._after(seconds, self._fail, False)

    def _fail(self, own: bool = True) -> None:
        """Fail, perhaps with other workers; `own`: the cause is not a lost host."""
        fates, chance = self._fates, self._chance
        if fates.steady or not self.running:
            return
        for peer in self._losses.peers(self.group):
            if chance.random() < fates.infectious:
                delay = chance.uniform(0.0, fates.within)
                peer._after(delay, peer._fail, own)
        self.failed_at, self.own_failure = self._clockwork.now, own
        self._losses.failed(self.group, own=own)
        self._end(self._on_failure)

    def _write(self) -> None:
        if self.running:
            self._on_write()
            self._after(self._chance.expovariate(0.3), self._write)

    def _end(self, tell: Callable[[], None]) -> None:
        if self._fates.steady or not self.running:
            return
        self.vanish()
        tell()

    def succeed(self) -> None:
        """Succeed now."""
        if self.running:
            self.vanish()
            self._on_success()

    def stop(self, then: Callable[[], None]) -> None:
        """Stop the workers; `then` is called once none is alive."""
        delay = self._chance.uniform(0.0, self._fates.slowest_stop)

        def gone() -> None:
            if self._asleep():
                self._clockwork.after(0.5, gone)
                return
            self.vanish()
            then()

        if not self.running:
            self.vanish()
            delay = 0.0
        self._clockwork.after(delay, gone)

    def vanish(self) -> None:
        """End all workers at once, without a callback."""
        for handle in self._pending:
            handle.cancel()
        self._pending.clear()
        if self.running:
            self.running = False
            self._losses.crews.discard(self)
            self._referee.stopped(self.group)
