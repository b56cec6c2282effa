"""The limits given to a service reach the part of it that must enforce them."""

from __future__ import annotations

import grpc.aio
import pytest

from rallypoint.rendezvous.api.errors import translate
from rallypoint.rendezvous.api.service import rendezvous_services
from rallypoint.rendezvous.base.limits import Limits, RendezvousLimits, StateLimits
from rallypoint.rendezvous.journal.journal import MemoryJournal
from rallypoint.rendezvous.v1 import state_service_pb2 as pb
from rallypoint.rendezvous.v1 import state_service_pb2_grpc as pb_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.serving.flow import Rate
from rallypoint.serving.server import Server
from support.refusals import refusal
from support.waiting import PATIENCE


async def test_the_streams_of_nodes_are_metered_and_no_others() -> None:
    """Heartbeats come at a fixed interval; store requests come as workers need them."""
    limits = RendezvousLimits(messages_per_second=7.0, message_burst=9)
    async with rendezvous_services(MemoryJournal(), limits=Limits(limits)) as services:
        rates = {service.service_name.rpartition(".")[2]: service.message_rate for service in services}
    assert rates == {"RendezvousService": Rate(7.0, 9), "StoreService": None, "StateService": None}


async def test_the_limits_of_states_hold() -> None:
    """And their time to live, by the service's clock."""
    now = [1000.0]
    async with rendezvous_services(
        MemoryJournal(), clock=lambda: now[0], limits=Limits(state=StateLimits(states=1), state_ttl=60.0)
    ) as services:
        server = Server(ServerOptions(), services=services, translate=translate)
        await server.start()
        async with open_channel(server.address) as channel:
            stub = pb_grpc.StateServiceStub(channel)
            assert (await stub.SetState(pb.SetStateRequest(run_id="a"), timeout=PATIENCE)).has_set
            assert (
                await refusal(stub.SetState(pb.SetStateRequest(run_id="b"), timeout=PATIENCE))
            ).reason == "TOO_MANY_STATES"
            now[0] += 61.0
            # The first request still counts the expired state, the next one does not.
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.SetState(pb.SetStateRequest(run_id="b"), timeout=PATIENCE)
            assert (await stub.SetState(pb.SetStateRequest(run_id="b"), timeout=PATIENCE)).has_set
        await server.stop()
