"""Operators, a stranger and nodes act on a run while its server is killed: each action has its actor afterwards."""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.errors import decode
from serving.conftest import Certificates, client_certificate, make_certificates
from torture.crowd import Crowd, crowd
from torture.length import ordinarily
from torture.mortal_server import PATIENCE, QuickServer, serving
from torture.test_kill_storm import NODES, SETTINGS
from torture.tormented_node import RUN

DURATION = ordinarily(6.0, in_full=60.0)  # seconds of chaos
SERVED = 0.6  # seconds that a server serves before it is killed
NAMES = [f"spiffe://rallypoint.test/{name}" for name in ("alice", "bob", "mallory")]
*OPERATORS, STRANGER = NAMES
POLICY = f"""
[[grant]]
names = {json.dumps(OPERATORS)}
roles = ["operator"]
runs = ["*"]

[[grant]]
names = ["first client"]
roles = ["node"]
runs = ["*"]
"""

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(DURATION + 4 * PATIENCE)]


@dataclass
class Person:
    """A caller that repeats actions, and the reasons in its calls, by outcome."""

    name: str
    answered: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)

    async def act(self, server: QuickServer, files: Certificates, draw: random.Random, over: float) -> None:
        """Restart the run, or evict a node that does not exist, again and again."""
        security = client_certificate(files, f"URI:{self.name}")
        async with open_channel(server.endpoint, security) as channel:
            stub, number = pb_grpc.RendezvousServiceStub(channel), 0
            while time.monotonic() < over:
                number += 1
                reason = f"{self.name} {number}"
                node = f"spare-{number % 5}"
                try:
                    if draw.random() < 0.5:
                        await stub.RestartRun(pb.RestartRunRequest(run_id=RUN, reason=reason), timeout=1.0)
                    else:
                        evict = pb.EvictNodeRequest(run_id=RUN, node_id=node, reason=reason)
                        await stub.EvictNode(evict, timeout=1.0)
                except grpc.aio.AioRpcError as error:
                    ends = self.refused if decode(error).reason == "NOT_PERMITTED" else self.unknown
                    ends.add(reason)
                else:
                    self.answered.add(reason)
                await asyncio.sleep(draw.uniform(0.0, 0.2))


async def torment(server: QuickServer, nodes: Crowd, draw: random.Random, over: float) -> None:
    """Kill the server and some nodes, and start them again, over and over."""
    while time.monotonic() < over:
        await asyncio.sleep(SERVED)
        await asyncio.to_thread(server.kill)
        some = draw.sample(nodes.nodes, 5)
        for node in some:
            await node.die()
        await asyncio.to_thread(server.start)
        for node in some:
            node.join()
        with suppress(AssertionError):
            await nodes.agree(timeout=SERVED)
            draw.choice(some).break_worker()


async def test_every_action_of_a_chaos_run_has_its_actor(tmp_path: Path) -> None:
    """The events have it; the audit log has each answered action, and each refusal, exactly once."""
    draw = random.Random(NODES)
    files = make_certificates(tmp_path / "tls", "first")
    audit, policy = tmp_path / "audit.jsonl", tmp_path / "policy.toml"
    policy.write_text(POLICY)
    server = QuickServer(tmp_path, files, ("--audit-log", str(audit), "--policy", str(policy)))
    people = [Person(name) for name in NAMES]
    async with serving(server), crowd(server.endpoint, SETTINGS, NODES, draw, server.security) as nodes:
        await nodes.agree(PATIENCE)
        over = time.monotonic() + DURATION
        await asyncio.gather(
            torment(server, nodes, draw, over), *(person.act(server, files, draw, over) for person in people)
        )
        async with open_channel(server.endpoint, client_certificate(files, f"URI:{OPERATORS[0]}")) as channel:
            stub = pb_grpc.RendezvousServiceStub(channel)
            events: list[pb.Event] = []
            token = ""
            while token or not events:
                page = await stub.ListEvents(pb.ListEventsRequest(run_id=RUN, page_token=token))
                events += page.events
                token = page.next_page_token
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    by_reason = {line["request"]["reason"]: line for line in lines if line["event"] == "operator call"}
    assert len(by_reason) == sum(line["event"] == "operator call" for line in lines)
    assert all(reason.startswith(f"{line['caller']} ") for reason, line in by_reason.items())
    for person in people:
        assert person.answered <= {r for r, line in by_reason.items() if line["caller"] == person.name}
    refusals = [line for line in lines if line["event"] == "call refused"]
    stranger = people[-1]
    assert {line["caller"] for line in refusals} == {STRANGER}
    assert not stranger.answered
    assert len(stranger.refused) <= sum(1 + line["left_out"] for line in refusals)
    names = {node.name for node in nodes.nodes}
    assert {event.actor.kind for event in events} == {
        pb.ACTOR_KIND_NODE,
        pb.ACTOR_KIND_OPERATOR,
        pb.ACTOR_KIND_SERVICE,
    }
    for event in events:
        asked = event.kind in (pb.EVENT_KIND_RESTART_REQUESTED, pb.EVENT_KIND_NODE_EVICTED)
        if event.actor.kind == pb.ACTOR_KIND_SERVICE:
            assert not asked, event
            continue
        assert event.actor.peer.startswith("ipv4:127.0.0.1:"), event
        if asked:
            assert f"{event.actor.name} " in event.detail, event
        else:
            assert event.actor.kind == pb.ACTOR_KIND_NODE, event
            assert event.actor.name in ((event.node_id,) if event.node_id else names), event
    assert server.complaints() == []
    print(f"{server.kills} kills, {len(events)} events, {len(by_reason)} actions, {len(refusals)} refusals")  # noqa: T201
