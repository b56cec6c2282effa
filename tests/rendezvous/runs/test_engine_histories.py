"""Under random events, an engine misses no deadline, forgets no member or watcher, and never fails.

`core/test_histories` tests the invariants of a single run, on a model of the engine. This file tests the engine
itself, with several runs at once: commands that arrive together, commits that take their time, members that go away
at any moment, runs that expire and come again, restarts. `RALLYPOINT_ENGINE_SEED=17` replays one.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, get_args

import pytest

from rallypoint.rendezvous.base.cooperative import LatestValue
from rallypoint.rendezvous.base.limits import RendezvousLimits
from rallypoint.rendezvous.core import commands, facts
from rallypoint.rendezvous.core.commands import SERVICE, Refused
from rallypoint.rendezvous.core.starts import StartReport
from rallypoint.rendezvous.core.state import RankPolicy, RecoveryParts, ReportedFailure, ScaleUpPolicy
from rallypoint.rendezvous.journal.codec import DecodedRecord
from rallypoint.rendezvous.journal.journal import Record
from rallypoint.rendezvous.runs import run as hosted_run
from rallypoint.rendezvous.runs.run import Member, PublishedRun
from rendezvous.engine_fixtures import Stage, idle, staged
from support.waiting import PATIENCE

SEED = os.environ.get("RALLYPOINT_ENGINE_SEED")
SEEDS = range(40) if SEED is None else range(int(SEED), int(SEED) + 1)
STEPS = 150
RUNS = ["r1", "r2"]
NODES = ["a", "b", "c", "d"]
LIMITS = RendezvousLimits(runs=2, nodes_per_run=4, subscribers_per_run=3, run_ttl=20.0, events_per_run=40)


class RandomHistory:
    """A random history of one engine after another over one journal."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.settings: dict[str, Any] = {
            "min_nodes": self.draw.choice([1, 2]),
            "max_nodes": self.draw.choice([2, 3]),
            "last_call_timeout": self.draw.choice([0.0, 3.0]),
            "keep_alive_interval": self.draw.choice([2.0, 5.0]),
            "exit_barrier_timeout": self.draw.choice([0.1, 1.0]),
            "scale_up_policy": self.draw.choice(list(ScaleUpPolicy)),
            "scale_up_delay": 2.0,
            "rank_policy": self.draw.choice(list(RankPolicy)),
        }
        self.stage = Stage(limits=LIMITS, **self.settings)
        self.members: list[Member] = []
        self.watchers: list[tuple[str, LatestValue[PublishedRun], int]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.refused = 0
        # The latest published number of each kind, per run.
        self.lease: dict[str, int] = {}
        self.fencing: dict[str, tuple[int, int]] = {}

    # ---- events

    def ask(self, asked: Coroutine[Any, Any, Any], then: Callable[[Any], None] = lambda _: None) -> None:
        """Send a request to the engine; it may be refused, or cancelled before the answer."""

        async def asking() -> None:
            try:
                then(await asked)
            except Refused:
                self.refused += 1

        task = asyncio.create_task(asking())
        self.tasks.append(task)
        if self.draw.random() < 0.05:
            asyncio.get_running_loop().call_soon(task.cancel)

    def join(self) -> None:
        run_id, node_id = self.draw.choice(RUNS), self.draw.choice(NODES)
        there = any((each.run_id, each.node_id) == (run_id, node_id) for each in self.members)
        if there and self.draw.random() < 0.9:
            return

        def admitted(member: Member) -> None:
            assert member.lease.number > self.lease.get(run_id, 0), "a lease was given out twice"
            self.lease[run_id] = member.lease.number
            self.members.append(member)

        self.ask(self.stage.join(node_id, run_id), admitted)

    def resume(self) -> None:
        if self.members:
            self.come_back(self.draw.choice(self.members))

    def come_back(self, member: Member) -> None:
        asked = self.stage.engine.resume(
            member.run_id, member.node_id, member.lease.number, 0, member.lease.token
        )
        self.ask(asked, self.members.append)

    def go_away(self) -> None:
        if self.members:
            self.stage.engine.disconnect(self.members.pop(self.draw.randrange(len(self.members))))

    def beat(self) -> None:
        for member in self.members:
            if self.draw.random() < 0.9:
                self.stage.engine.renew(member)

    def say(self) -> None:
        for member in self.members:
            if (command := self.statement(member)) is not None:
                self.ask(self.stage.engine.execute(member.run_id, command))

    def statement(self, member: Member) -> commands.Command | None:
        node_id, lease, draw = member.node_id, member.lease.number, self.draw.random()
        round_ = self.stage.engine.writable_round(member.run_id) or 0
        if draw < 0.6:
            return commands.Confirm(node_id, lease, round_, 29500)
        if draw < 0.65:
            failure = ReportedFailure(round_, 0, 0, "trainer", node_id, "h", 1, 1, 1.7e9, "it broke", "", "")
            return commands.ReportFailure(node_id, lease, failure)
        if draw < 0.68:
            return commands.Depart(node_id, lease, "bye")
        return commands.Leave(node_id, lease, "bye") if draw < 0.72 else None

    def succeed(self) -> None:
        """The workers of one node are done; those of the others go on."""
        if self.members:
            member = self.draw.choice(self.members)
            round_ = self.stage.engine.writable_round(member.run_id) or 0
            command = commands.ReportSuccess(member.node_id, member.lease.number, round_)
            self.ask(self.stage.engine.execute(member.run_id, command))

    def start(self) -> None:
        """The workers of some nodes have started."""
        for member in self.members:
            if self.draw.random() < 0.7:
                round_ = self.stage.engine.writable_round(member.run_id) or 0
                self.stage.engine.note_start(member, StartReport(round_, RecoveryParts(started=0.5)))

    def operate(self) -> None:
        run_id, node_id = self.draw.choice(RUNS), self.draw.choice(NODES[:2])
        wanted: list[commands.Command] = [
            commands.Restart("again"),
            commands.Evict(node_id, "bad"),
            commands.Readmit(node_id, "good"),
            commands.Readmit(node_id, "good"),
            commands.Close("enough"),
        ]
        self.ask(self.stage.engine.execute(run_id, self.draw.choice(wanted), SERVICE))

    def start_watching(self) -> None:
        run_id = self.draw.choice(RUNS)
        self.ask(self.stage.engine.watch(run_id, 0), lambda slot: self.watchers.append((run_id, slot, 0)))

    def stop_watching(self) -> None:
        if self.watchers:
            run_id, slot, _ = self.watchers.pop()
            self.stage.engine.unwatch(run_id, slot)

    def wait(self) -> None:
        alive = self.draw.random() < 0.7
        for _ in range(self.draw.choice([1, 1, 2, 5, 20, 30])):
            self.stage.now += 1.0
            if alive:
                self.beat()
        self.ask(self.stage.list_runs())  # the engine reads the clock

    def hold_or_release(self) -> None:
        (self.stage.journal.hold if self.draw.random() < 0.5 else self.stage.journal.release)()

    # ---- invariants

    async def calm(self) -> None:
        """Let everything be committed and answered."""
        self.stage.journal.release()
        await idle()
        for outcome in await asyncio.gather(*self.tasks, return_exceptions=True):
            if outcome is not None and not isinstance(outcome, asyncio.CancelledError):
                raise outcome
        self.tasks = []
        await self.stage.list_runs()

    async def check(self) -> None:
        """Check that, with nothing under way, all due deadlines are carried out and all changes published."""
        await self.calm()
        engine, now = self.stage.engine, self.stage.now
        for run_id, run in engine._runs.items():
            deadline = run.next_deadline(LIMITS.run_ttl)
            scheduled = engine._schedule.next()
            assert deadline is None or (scheduled is not None and scheduled <= deadline), "it oversleeps"
            assert run.history.latest == run.state.revision == run.recorded
            assert run.history.latest - run.history.oldest < LIMITS.events_per_run
            assert set(run.members) <= set(run.state.nodes), "a stream of nobody"
            for member in run.members.values():
                assert run.holds_lease(member.node_id, member.lease.number)
            assert run.expires(LIMITS.run_ttl) > now
            self.check_numbers(run_id, run.state.round, run.state.fencing_token)
        for member in self.members:
            self.check_stream(member)
        self.watchers = [await self.caught_up(*watcher) for watcher in self.watchers]
        self.watchers = [watcher for watcher in self.watchers if not watcher[1].ended]

    def check_numbers(self, run_id: str, round_: int, token: int) -> None:
        if not token:
            return  # it has no round of its own yet
        before = self.fencing.get(run_id, (0, 0))
        assert (round_, token) == before or (round_ > before[0] and token > before[1]), "a number came again"
        self.fencing[run_id] = round_, token

    def check_stream(self, member: Member) -> None:
        run = self.stage.engine._runs.get(member.run_id)
        stands = run is not None and run.members.get(member.node_id) is member
        assert stands or member.updates.ended, "a stream that nobody feeds and nobody ends"

    async def caught_up(
        self, run_id: str, slot: LatestValue[PublishedRun], seen: int
    ) -> tuple[str, LatestValue[PublishedRun], int]:
        """Check that a watcher's next state is newer than its last, and that it gets the current one."""
        if slot._value is not None:
            told = slot._value
            assert told.run.revision > seen, "a watcher was told the same twice"
            seen = (await slot.take() or told).run.revision
        run = self.stage.engine._runs.get(run_id)
        if not slot.ended:
            assert run is not None, "a watcher of nothing"
            assert seen == run.state.revision or run.watchers.deadline(run.state) > self.stage.now
        return run_id, slot, seen

    async def play(self) -> None:
        """Make all steps, with a restart now and then."""
        happenings: dict[Callable[[], None], float] = {
            self.join: 8,
            self.say: 10,
            self.beat: 6,
            self.resume: 3,
            self.go_away: 3,
            self.succeed: 6,
            self.start: 6,
            self.operate: 3,
            self.start_watching: 1.5,
            self.stop_watching: 1,
            self.wait: 5,
            self.hold_or_release: 4,
        }
        for _ in range(3):
            async with staged(self.stage) as stage:
                for member in [each for each in self.members if self.draw.random() < 0.7]:
                    self.come_back(member)
                await self.check()
                for _ in range(STEPS // 3):
                    self.draw.choices(list(happenings), list(happenings.values()))[0]()
                    for _ in range(self.draw.choice([0, 1, 3, 20])):
                        await asyncio.sleep(0)
                    if self.draw.random() < 0.3:
                        await self.check()
                await self.check()
                assert stage.engine._closed is None
                assert stage.engine._broken == {}
                listed = await stage.list_runs()
            self.stage = Stage(durable=stage.journal.durable, limits=LIMITS, **self.settings)
            self.watchers = []  # and the members may come back
            assert [run.run_id for run in listed] == sorted(self.stage.engine._runs)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limits from which a run counts as large or old."""
    monkeypatch.setattr(hosted_run, "_BUILD", 0.01)
    monkeypatch.setattr(hosted_run, "_CHEAP", 0.03)
    monkeypatch.setattr(hosted_run, "_RECORDS_PER_CHECKPOINT", 12)
    monkeypatch.setattr(hosted_run, "_RECORDS_PER_NODE", 1)


@pytest.mark.parametrize("seed", SEEDS)
async def test_an_engine_misses_nothing(seed: int) -> None:
    """The invariants hold whenever nothing is under way, also over restarts."""
    story = RandomHistory(seed)
    async with asyncio.timeout(PATIENCE):
        await story.play()


@pytest.mark.slow
async def test_engines_reach_every_corner() -> None:
    """A property is tested only if some history reaches its case."""
    kinds: Counter[str] = Counter()
    for seed in range(30):
        story = RandomHistory(seed)
        await story.play()
        kinds["refused"] += story.refused
        for entry in story.stage.journal.durable:
            kinds[type(entry).__name__] += 1
            if isinstance(entry, Record):
                kinds[type(DecodedRecord(entry.content).fact()).__name__] += 1
    wanted = {kind.__name__ for kind in get_args(facts.Fact)} | {"Checkpoint", "Forgotten", "refused"}
    assert not {kind for kind in wanted if not kinds[kind]}
