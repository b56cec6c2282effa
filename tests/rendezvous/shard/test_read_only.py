"""A replica reads runs that it does not own: with the same answers as the owner's, and no other effects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import cast

import pytest

from rallypoint.rendezvous.api.event_pages import EventServicer
from rallypoint.rendezvous.api.requests import NodesPage, RunsPage
from rallypoint.rendezvous.base.cooperative import finish
from rallypoint.rendezvous.base.entries import Operation, Writer
from rallypoint.rendezvous.base.errors import NotOwner
from rallypoint.rendezvous.base.limits import MAX_VALUE_BYTES, Limits, RendezvousLimits
from rallypoint.rendezvous.base.refusals import AnswerTooLarge, KeyWaitTimedOut
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.core.commands import SERVICE, Refused, RoundOver, RunNotFound
from rallypoint.rendezvous.core.state import ReportedFailure, RunState
from rallypoint.rendezvous.journal.journal import JournalError, Record
from rallypoint.rendezvous.runs import run as hosted_run
from rallypoint.rendezvous.shard.locator import RunLocator
from rallypoint.rendezvous.shard.reader import ReadOnlyRuns, RunReader
from rallypoint.rendezvous.state.core import SetState
from rallypoint.rendezvous.store.writes import Add, DeleteKey, Set
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.serving.flow import Turns
from rendezvous.shard_fixtures import OWNER, RUN, Scene, ShardJournal, elsewhere, opened

RUNS = [RUN, "other", "nowhere"]
WAITING, RUNNING = pb.NODE_STATE_WAITING, pb.NODE_STATE_RUNNING
KEYS = ["here", "k1", "k2", "k3"]
LIMITS = RendezvousLimits(events_per_run=60, run_ttl=600.0)


def reading(scene: Scene) -> ReadOnlyRuns:
    """The runs that another replica reads from a scene's journal."""
    restoring = ReadOnlyRuns.restore(
        scene.journal.kept(),
        not_owner=elsewhere,
        clock=lambda: 5.0,  # its own clock
        wall_clock=lambda: 1.7e9,
        limits=LIMITS,
    )
    return finish(restoring)


class _OneReader:
    """A run locator that can only read."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader

    async def reader(self, run_id: str) -> RunReader:
        return self._reader


async def outcome(ask: Callable[..., object], *arguments: object) -> object:
    """The answer, or the refusal."""
    try:
        answer = ask(*arguments)
        return await answer if isinstance(answer, Awaitable) else answer
    except Refused as refusal:
        return type(refusal).__name__, str(refusal)


def run_page(state: RunState) -> pb.GetRunResponse:
    """A run, without the fields that only the owner knows."""
    run = hosted_run.run_message(state)
    for node in run.nodes:
        node.connected = False
    return pb.GetRunResponse(run=run)


def nodes_page(page: NodesPage, state: RunState) -> pb.ListNodesResponse:
    """A page of the nodes of a run, without the fields that only the owner knows."""
    response = page.read(state)
    for node in response.nodes:
        node.connected = False
    return response


async def answers(reader: RunReader) -> dict[tuple[object, ...], object]:
    """The answers to all reads that need no wait."""
    events = EventServicer(cast(RunLocator, _OneReader(reader)), lambda: None, Turns(1))
    store = reader.store
    asked: dict[tuple[object, ...], tuple[Callable[..., object], *tuple[object, ...]]] = {
        ("ListRuns",): (RunsPage(pb.ListRunsRequest()).read, [reader.runs])
    }
    for run_id in RUNS:
        asked["GetRun", run_id] = reader.runs.read_run, run_id, run_page
        for size in (1, 2):
            nodes = NodesPage(
                pb.ListNodesRequest(filter=pb.NodeFilter(states=[WAITING, RUNNING]), page_size=size)
            )
            asked["ListNodes", run_id, size] = reader.runs.read_run, run_id, partial(nodes_page, nodes)
        for newest_first in (False, True):
            request = pb.ListEventsRequest(run_id=run_id, newest_first=newest_first, page_size=20)
            asked["ListEvents", run_id, newest_first] = events.list, request
        asked["GetState", run_id] = reader.states.get, run_id
        for round_ in range(5):
            asked["ListKeys", run_id, round_] = store.list_keys, run_id, round_, "k", "k1", 9
            asked["Check", run_id, round_] = store.check, run_id, round_, KEYS
            asked["MultiGet", run_id, round_] = store.multi_get, run_id, round_, KEYS[:2], 0.0
            for key in KEYS:
                asked["Get", run_id, round_, key] = store.get, run_id, round_, key, 0.0
    return {what: await outcome(*ask) for what, ask in asked.items()}


class Life:
    """Random changes of a scene."""

    def __init__(self, scene: Scene, draw: Random) -> None:
        self.scene = scene
        self.draw = draw
        self.sequence = 0

    async def happen(self) -> None:
        """Make one change; it may be refused."""
        draw, engine = self.draw, self.scene.shard.engine
        run_id, node_id = draw.choice(RUNS[:2]), draw.choice("abcd")
        run = engine._runs.get(run_id)
        node = run.state.nodes.get(node_id) if run is not None else None
        lease, round_ = (node.lease, run.state.round) if run is not None and node is not None else (0, 0)
        failure = ReportedFailure(round_, 0, 0, "trainer", node_id, "host", 1, 1, 1.7e9, "it broke", "", "")
        command: dict[str, commands.Command] = {
            "confirm": commands.Confirm(node_id, lease, round_, 29500),
            "fail": commands.ReportFailure(node_id, lease, failure),
            "succeed": commands.ReportSuccess(node_id, lease, round_),
            "leave": commands.Leave(node_id, lease, "told to stop"),
            "evict": commands.Evict(node_id, "a bad host"),
            "readmit": commands.Readmit(node_id, "mended"),
            "restart": commands.Restart("the operator wants it"),
            "close": commands.Close("the operator wants it"),
        }
        self.sequence += 1
        operation = Operation("client", draw.randrange(3), self.sequence) if draw.random() < 0.5 else None
        space, key = draw.randrange(4), draw.choice(KEYS)
        writer = Writer("nobody", 1)
        if run is not None and run.state.nodes:
            holder = run.state.nodes[draw.choice([*run.state.nodes])]
            writer = Writer(holder.node_id, holder.lease, holder.token)
        weights = {
            "join": 8, "confirm": 8, "fail": 1, "succeed": 1, "leave": 1, "evict": 1, "readmit": 2,
            "restart": 1, "close": 0.2, "set": 6, "add": 2, "delete": 1, "state": 4, "time": 1, "long time": 0.2,
        }  # fmt: skip
        match draw.choices(list(weights), list(weights.values()))[0]:
            case "join":
                await self.scene.join(node_id, run_id)
            case "set":
                write = Set(writer=writer, round=space, key=key, value=draw.randbytes(3), operation=operation)
                await self.scene.shard.store.write(run_id, write)
            case "add":
                counter = Add(writer=writer, round=space, key="k3", amount=1, operation=operation)
                await self.scene.shard.store.write(run_id, counter)
            case "delete":
                await self.scene.shard.store.write(
                    run_id, DeleteKey(writer=writer, round=space, key=key, operation=operation)
                )
            case "state":
                held = self.scene.shard.states.get(run_id)
                token = held.token if held is not None else None
                asked = SetState(run_id=run_id, state=draw.randbytes(3), token=token, operation=operation)
                await self.scene.shard.states.set(asked)
            case "time":
                self.scene.now += 20.0  # leases are lost
            case "long time":
                self.scene.now += 1_000.0  # runs are forgotten
            case name:
                await engine.execute(run_id, command[name], SERVICE)


@pytest.mark.parametrize("seed", range(12))
async def test_it_answers_as_the_owner_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds at any point of any history, over checkpoints, expired runs and take-overs."""
    monkeypatch.setattr(hosted_run, "_RECORDS_PER_CHECKPOINT", 10)
    draw = Random(seed)
    journal, seen = ShardJournal(), set[str]()
    for _ in range(3):
        async with opened(journal, limits=Limits(LIMITS)) as scene:
            life = Life(scene, draw)
            for step in range(60):
                with suppress(Refused):
                    await life.happen()
                if step % 6 == 0:
                    await scene.shard.engine.settled()
                    read = await answers(reading(scene))
                    assert read == await answers(scene.shard)
                    seen |= {type(answer).__name__ for answer in read.values()}
            await scene.shard.retire(NotOwner)
        journal = ShardJournal(journal.durable)
    assert seen >= {"GetRunResponse", "FencedState", "bytes", "list", "tuple", "bool", "NoneType"}


async def test_a_read_that_would_have_to_wait_is_sent_to_the_owner() -> None:
    """Keys that are there are returned; a missing one is an error only for a request that does not wait."""
    async with opened() as scene:
        store = reading(scene).store
        assert await store.get(RUN, 0, "here", 1.0) == b"value"
        assert await store.multi_get(RUN, 0, ["here", "here"], 1.0) == [b"value", b"value"]
        await store.wait(RUN, 0, ["here"], 1.0)
        waits: Sequence[Callable[[float], Awaitable[object]]] = [
            lambda seconds: store.get(RUN, 0, "nowhere", seconds),
            lambda seconds: store.multi_get(RUN, 0, ["here", "nowhere"], seconds),
            lambda seconds: store.wait(RUN, 1, ["nowhere"], seconds),
        ]
        for wait in waits:
            with pytest.raises(NotOwner) as sent:
                await wait(0.001)
            assert (sent.value.run_id, sent.value.owner) == (RUN, OWNER)
            with pytest.raises(KeyWaitTimedOut):
                await wait(0.0)


async def test_values_that_do_not_fit_into_one_answer() -> None:
    """They are refused as by the owner."""
    async with opened() as scene:
        await scene.set("large", b"x" * MAX_VALUE_BYTES)
        with pytest.raises(AnswerTooLarge):
            await reading(scene).store.multi_get(RUN, 0, ["large", "here", "large"], 1.0)


async def test_a_round_is_over_though_the_journal_still_has_its_keys() -> None:
    """The deletion of its entries may be under way."""
    async with opened() as scene:
        await scene.shard.store.write(RUN, Set(writer=scene.writer, round=1, key="key", value=b"value"))
        kept = list(scene.journal.durable)
        await scene.restart()
        rounds = [entry for entry in scene.journal.durable if isinstance(entry, Record)]
        scene.journal.durable = [*kept, *rounds[len([e for e in kept if isinstance(e, Record)]) :]]
        assert any(entry.round == 1 for entry in scene.journal.kept().store_entries)
        store = reading(scene).store
        with pytest.raises(RoundOver):
            await store.get(RUN, 1, "key", 0.0)
        with pytest.raises(RoundOver):
            store.list_keys(RUN, 1, "", "", 10)


async def test_it_has_neither_tasks_nor_deadlines() -> None:
    """It is read and dropped: nothing in it needs to be stopped."""
    async with opened() as scene:
        before = asyncio.all_tasks()
        reader = reading(scene)
        with pytest.raises(RunNotFound):
            await reader.runs.read_run("nowhere", lambda state: state)
        await answers(reader)
        assert asyncio.all_tasks() == before


async def test_a_journal_that_a_newer_version_has_written_is_an_error() -> None:
    """The error has one line, as for the owner."""
    async with opened() as scene:
        scene.journal.durable = scene.journal.durable[1:]
        with pytest.raises(JournalError, match="the journal is damaged"):
            reading(scene)
