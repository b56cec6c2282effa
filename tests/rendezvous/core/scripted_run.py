"""A run that is driven step by step, with a simulated clock, for tests that read like a specification."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from rallypoint.rendezvous.core import apply, commands, decide, facts
from rallypoint.rendezvous.core.newcomers import READY_AFTER
from rallypoint.rendezvous.core.state import Phase, ReportedFailure, RunSettings, RunState

_F = TypeVar("_F", bound=facts.Fact)


class ScriptedRun:
    """A run whose nodes act when the test calls a method. Nodes send heartbeats unless they are `silent`.

    Restarts have a back-off only if `restart_backoff` is given.
    """

    def __init__(self, min_nodes: int = 1, max_nodes: int = 1, **settings: object) -> None:
        given: dict[str, object] = {"restart_backoff": 0.0, **settings}
        self.settings = replace(RunSettings(min_nodes=min_nodes, max_nodes=max_nodes), **given)  # type: ignore[arg-type]
        self.state = RunState("run")
        self.now = 100.0
        self.facts: list[facts.Fact] = []

    # ---- events

    def do(self, command: commands.Command) -> list[facts.Fact]:
        happened = decide.execute(self.state, command, self.now)
        self.facts += happened
        return happened

    def join(self, *node_ids: str, workers: int = 1, role: str = "trainer") -> int:
        """Let nodes join, in this order; return the lease of the last."""
        for node_id in node_ids:
            self.do(commands.Join(node_id, self.settings, f"{node_id}.cluster", workers, role))
        return self.of_type(facts.NodeJoined)[-1].lease

    def let_in(self, *node_ids: str) -> None:
        """Let nodes join, and stay connected for as long as a newcomer must before a round ends for it."""
        self.join(*node_ids)
        self.later(READY_AFTER)

    def confirm(self, *node_ids: str, round_: int | None = None, port: int = 29500) -> None:
        for node_id in node_ids:
            number = self.state.round if round_ is None else round_
            self.do(commands.Confirm(node_id, self.lease(node_id), number, port))

    def start(self, *node_ids: str) -> None:
        """Let nodes join and confirm: their round runs."""
        self.join(*node_ids)
        self.run_round()

    def run_round(self) -> None:
        """Wait for the end of the last call, if there is one, and let all participants confirm."""
        if self.state.last_call_deadline is not None:
            self.later(self.state.last_call_deadline - self.now)
        self.confirm(*self.ranks)
        assert self.phase is Phase.FINAL

    def failure(
        self, node_id: str, message: str = "it broke", *, round_: int | None = None
    ) -> ReportedFailure:
        """Return a failure of a node's first worker."""
        number = self.state.round if round_ is None else round_
        seat = self.state.seats.get(node_id)
        rank = seat.base_rank if seat is not None else 0
        return ReportedFailure(number, rank, 0, "trainer", node_id, "host", 4711, 1, 1.7e9, message, "", "")

    def fail(
        self, node_id: str, message: str = "it broke", *, round_: int | None = None, **more: object
    ) -> list[facts.Fact]:
        """Let a node report a failure of its first worker; `more` replaces fields."""
        failure = replace(self.failure(node_id, message, round_=round_), **more)  # type: ignore[arg-type]
        return self.do(commands.ReportFailure(node_id, self.lease(node_id), failure))

    def succeed(self, *node_ids: str) -> None:
        for node_id in node_ids:
            self.do(commands.ReportSuccess(node_id, self.lease(node_id), self.state.round))

    def depart(self, node_id: str, reason: str = "told to stop") -> None:
        self.do(commands.Depart(node_id, self.lease(node_id), reason))

    def leave(self, node_id: str, reason: str = "told to stop") -> None:
        self.do(commands.Leave(node_id, self.lease(node_id), reason))

    def restart(self, reason: str = "new data") -> list[facts.Fact]:
        return self.do(commands.Restart(reason))

    def evict(self, *node_ids: str, reason: str = "bad memory") -> None:
        for node_id in node_ids:
            self.do(commands.Evict(node_id, reason))

    def readmit(self, node_id: str) -> list[facts.Fact]:
        return self.do(commands.Readmit(node_id, "mended"))

    def lose(self, *node_ids: str) -> None:
        """Kill the nodes' agents: their streams break, and the disconnect grace passes."""
        for node_id in node_ids:
            apply.disconnect(self.state, node_id, self.now)
        self.later(self.settings.disconnect_grace, silent=node_ids)

    def resume(self, *node_ids: str) -> list[facts.Fact]:
        """Reopen the nodes' streams; return the facts that follow."""
        for node_id in node_ids:
            apply.renew(self.state, node_id, self.now)
        happened = decide.settle(self.state, self.now)
        self.facts += happened
        return happened

    def later(self, seconds: float, silent: tuple[str, ...] = ()) -> list[facts.Fact]:
        """Let time pass; nodes that are not silent send heartbeats. Return the facts that `settle` made."""
        happened: list[facts.Fact] = []
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + self.settings.keep_alive_interval)
            for node_id, node in self.state.nodes.items():
                if node_id not in silent and node.connected:
                    apply.renew(self.state, node_id, self.now)
            happened += decide.settle(self.state, self.now)
        self.facts += happened
        return happened

    # ---- observable state

    @property
    def phase(self) -> Phase:
        return self.state.phase

    @property
    def round(self) -> int:
        return self.state.round

    @property
    def ranks(self) -> list[str]:
        """The participants by group rank."""
        return [seat.node_id for seat in sorted(self.state.seats.values(), key=lambda seat: seat.group_rank)]

    @property
    def waiting(self) -> list[str]:
        return [node.node_id for node in self.state.waiting]

    def lease(self, node_id: str) -> int:
        return self.state.nodes[node_id].lease

    def of_type(self, kind: type[_F]) -> list[_F]:
        return [fact for fact in self.facts if isinstance(fact, kind)]
