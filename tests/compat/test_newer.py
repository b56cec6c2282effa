"""Messages and journals of a newer version are handled as in "Other versions" of docs/protocol.md."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from compat import golden_journal, release
from rallypoint.journal.v1.journal_pb2 import JournalRecord, RunSnapshot
from rallypoint.rendezvous.client import Admitted, Event, Membership, MembershipUpdate
from rallypoint.rendezvous.journal.journal import MemoryJournal, Recovered
from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import store_service_pb2 as store_pb
from rallypoint.rpc.channel import open_channel
from support.refusals import refusal
from support.waiting import PATIENCE

UNKNOWN = b"\x82\x7d\x03new"
"""Field 2,000, which no message has."""

_M = TypeVar("_M", bound=Message)


def newer(message: _M) -> _M:
    """Return the message with an unknown field in it, and in each nested message."""
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in value if field.is_repeated else [value]:
                newer(each)
    message.MergeFromString(UNKNOWN)
    return message


def join(**settings: Any) -> pb.JoinRun:
    """Return the request of a node that is alone in its run."""
    run = pb.RunSettings(min_nodes=1, max_nodes=1, **settings)
    return pb.JoinRun(run_id="run", node_id="a", settings=run, address="a", local_world_size=1)


async def test_a_service_ignores_unknown_fields_and_messages(tmp_path: Path) -> None:
    """Unknown fields are ignored in all messages; a message of an unknown kind is a sign of life, as a heartbeat."""
    async with golden_journal.served(MemoryJournal(), f"unix:{tmp_path}/socket") as service:
        stream = service.runs.Join(timeout=PATIENCE)
        await stream.write(newer(pb.JoinRequest(join=join())))
        lease = (await stream.read()).lease
        await stream.write(pb.JoinRequest.FromString(UNKNOWN))
        await stream.write(newer(pb.JoinRequest(confirm=pb.ConfirmRound(round=1, master_port=1))))
        while (await stream.read()).update.phase != pb.PHASE_FINAL:
            pass
        writer = store_pb.StoreWriter(node_id="a", lease=lease.number, token=lease.token)
        request = newer(store_pb.SetRequest(run_id="run", key="key", value=b"value", writer=writer))
        await service.store.Set(request, timeout=PATIENCE)
        got = await service.store.Get(newer(store_pb.GetRequest(run_id="run", key="key")), timeout=PATIENCE)
        assert got.value == b"value"
        await stream.write(newer(pb.JoinRequest(leave=pb.LeaveRun(reason="done"))))
        await stream.done_writing()
        while await stream.read() is not grpc.aio.EOF:
            pass
        assert await stream.code() is grpc.StatusCode.OK


async def test_a_service_refuses_a_choice_that_it_does_not_know(tmp_path: Path) -> None:
    """It can't do as requested, and must not do something else: an unknown enum value is refused."""
    async with golden_journal.served(MemoryJournal(), f"unix:{tmp_path}/socket") as service:
        stream = service.runs.Join(timeout=PATIENCE)
        await stream.write(pb.JoinRequest(join=join(rank_policy=99)))
        error = await refusal(stream.read())
        assert (error.reason, [field for field, _ in error.field_violations]) == (
            "INVALID_ARGUMENT",
            ["settings.rank_policy"],
        )


async def test_a_node_ignores_unknown_fields_and_messages(tmp_path: Path) -> None:
    """Unknown fields, and a message with no known field, are ignored. An unknown phase reaches the agent."""
    lease = pb.Lease(number=7, token=b"token")
    lease.keep_alive_interval.FromSeconds(5)
    lease.time_to_live.FromSeconds(15)
    update = pb.NodeUpdate(revision=3, phase=pb.PHASE_FINAL, assignment=pb.Assignment(round=1))
    responses = [
        newer(pb.JoinResponse(lease=lease)),
        pb.JoinResponse.FromString(UNKNOWN),
        newer(pb.JoinResponse(update=update)),
        pb.JoinResponse(update=pb.NodeUpdate(revision=4, phase=99)),  # type: ignore[arg-type]
        pb.JoinResponse(update=pb.NodeUpdate(revision=5, phase=pb.PHASE_CLOSED)),
    ]
    events: list[Event] = []
    async with _scripted(responses, f"unix:{tmp_path}/socket") as channel:
        membership = Membership(channel, "the script", join(), events.append, connect_timeout=PATIENCE)
        async with asyncio.timeout(PATIENCE):
            await membership.run()
    assert isinstance(events[0], Admitted)
    assert events[0].lease == 7
    updates = [event.update for event in events[1:] if isinstance(event, MembershipUpdate)]
    assert [(each.revision, each.phase) for each in updates] == [
        (3, pb.PHASE_FINAL),
        (4, 99),
        (5, pb.PHASE_CLOSED),
    ]


class NewerJournal(SqliteJournal):
    """A journal in which each record and checkpoint has fields of a newer version."""

    async def open(self) -> Recovered:
        found = await super().open()
        kinds = ((found.records, JournalRecord), (found.checkpoints, RunSnapshot))
        records, checkpoints = (
            [
                replace(each, content=newer(kind.FromString(each.content)).SerializeToString())
                for each in entries
            ]
            for entries, kind in kinds
        )
        return replace(found, records=records, checkpoints=checkpoints)  # type: ignore[arg-type]


async def test_a_journal_with_unknown_fields_is_read_without_them(tmp_path: Path) -> None:
    """They are no damage: a version can be rolled back. An unknown fact is refused (test_restoring.py)."""
    await release.write_journal(tmp_path)
    expected = json.loads((tmp_path / release.EXPECTED).read_text())
    async with golden_journal.served(
        NewerJournal(tmp_path / release.JOURNAL), f"unix:{tmp_path}/socket"
    ) as service:
        assert await service.contents() == expected["contents"]


@asynccontextmanager
async def _scripted(responses: list[pb.JoinResponse], endpoint: str) -> AsyncIterator[grpc.aio.Channel]:
    async def answer(requests: AsyncIterator[pb.JoinRequest], context: Any) -> AsyncIterator[pb.JoinResponse]:
        await anext(aiter(requests))
        for response in responses:
            yield response

    method = grpc.stream_stream_rpc_method_handler(
        answer, pb.JoinRequest.FromString, pb.JoinResponse.SerializeToString
    )
    server = grpc.aio.server()
    service = grpc.method_handlers_generic_handler(
        "rallypoint.rendezvous.v1.RendezvousService", {"Join": method}
    )
    server.add_generic_rpc_handlers((service,))
    server.add_insecure_port(endpoint)
    await server.start()
    channel = open_channel(endpoint)
    try:
        yield channel
    finally:
        await channel.close()
        await server.stop(None)
