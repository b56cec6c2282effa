"""The rendezvous service inside the agent of one of a job's hosts, as with torch's `static` and `c10d`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from rallypoint.agent.addresses import advertised
from rallypoint.agent.config.job import Peer
from rallypoint.launcher.plan import Hosted
from rallypoint.launcher.services import (
    RendezvousServer,
    calls_to_end,
    listening,
    listening_host,
    own_addresses,
    rendezvous_server,
    resolves,
)
from rallypoint.rendezvous.api.service import SERVICE_NAME
from rallypoint.rendezvous.core.commands import RunNotFound
from rallypoint.rendezvous.core.state import Phase
from rallypoint.rendezvous.runs.engine import RendezvousEngine
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import (
    AccessFiles,
    ClientSecurity,
    ClientTLS,
    PortInUseError,
    ServiceStartError,
    SettingError,
    parse_endpoint,
)
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.loop import cancel_all, signalled
from rallypoint.rpc.text import one_line
from rallypoint.serving.requests import SENTENCE_BYTES

# Seconds in which the owner of a taken port must reply as a rendezvous service. Another agent on this host that
# started a moment earlier may need some of them.
_ANSWER = 10.0

_TWO_HOSTS = (
    "another agent does; only one host may have --node-rank 0, the default (or is_host=true, with c10d)"
)

_log = get_logger("rallypoint.run")


class EmbeddedService:
    """The service of a run in this process."""

    def __init__(self, serving: RendezvousServer, peer: Peer) -> None:
        """`peer`: its address for this process."""
        self.peer = peer
        self._server = serving.server
        self._engine = serving.engine

    async def stop_when_over(
        self, run_id: str, reason: str, signals: Sequence[int], *, succeeded: bool
    ) -> None:
        """Return when the run is over and its nodes know, or soon after.

        Without its rendezvous a run can't continue. So if this node has succeeded and others still work, wait for them
        until a signal comes; if this node left early, close the run.

        Args:
            reason: How this node's job ended, for people.
            signals: Signals that end the wait for other nodes.
            succeeded: True if this host's workers succeeded.
        """
        engine = self._engine
        with suppress(RunNotFound):  # the run never began
            over = await engine.read_run(run_id, lambda state: state.phase is Phase.CLOSED)
            if not over and succeeded:
                _log.info("waiting for the workers of other hosts: this host serves their rendezvous")
                signalled_by = await _until_closed(engine, run_id, signals)
                over, reason = signalled_by is None, f"got {signalled_by}"
            if not over:
                gone = f"the host that served the run's rendezvous is gone: {reason}"
                await engine.close_run(run_id, one_line(gone, SENTENCE_BYTES))
        await calls_to_end(self._server)


@asynccontextmanager
async def rendezvous_at(
    hosted: Hosted, security: ClientSecurity, access: AccessFiles, run_id: str = ""
) -> AsyncIterator[EmbeddedService | None]:
    """Serve rendezvous at an address while the context lasts; yield None if another host's agent does.

    Args:
        hosted: The address; see Hosted for the serving agent.
        security: How the job's connections are secured.
        access: Which calls are refused.
        run_id: The run of this agent, see `rendezvous_server`.

    Raises:
        SettingError: This agent must serve and can't, or another host's agent serves already; one line.
    """
    endpoint = parse_endpoint(hosted.endpoint)
    async with AsyncExitStack() as stack:
        ours = hosted.here is not False and bool(await own_addresses(endpoint.host))
        if not hosted.here and not ours:
            yield None
            return
        if not ours and await answers_calls(hosted.endpoint, security):
            # The address may lead here in a way that this host does not know, but not while another agent replies.
            raise SettingError(f"can't serve rendezvous at {hosted.endpoint}: {_TWO_HOSTS}")
        if not ours and not hosted.away and await resolves(endpoint.host):
            raise SettingError(
                f"can't serve rendezvous at {hosted.endpoint}: {endpoint.host} is no address of this host, which has "
                "--node-rank 0, the default; give --rdzv-conf is_host=true if that address leads here"
            )
        if not ours:
            warning = f"{endpoint.host} is no address of this host, which serves rendezvous"
            _log.warning(f"{warning}: others join only if that address leads here")
        try:
            host = await listening_host(endpoint)
            serving = await stack.enter_async_context(
                rendezvous_server(listening(host, endpoint.port, security, access), run_id)
            )
        except ServiceStartError as error:
            taken = isinstance(error, PortInUseError) and await answers_calls(hosted.endpoint, security)
            if taken and hosted.here is None:
                yield None  # an agent on this host was first
                return
            why: object = error
            if taken:
                why = _TWO_HOSTS
            elif isinstance(error, PortInUseError):
                why = "another program listens there; stop it, or choose another --master-port or --rdzv-endpoint"
            raise SettingError(f"can't serve rendezvous at {hosted.endpoint}: {why}") from None
        # Certificates are issued for names; anything else is sure to reach this process by its address.
        here = hosted.endpoint if isinstance(security, ClientTLS) else serving.server.address
        yield EmbeddedService(serving, Peer(advertised(here, named=False), security))


async def answers_calls(endpoint: str, security: ClientSecurity) -> bool:
    """Return True if one of our rendezvous services replies at the endpoint within `_ANSWER` seconds."""
    async with open_channel(endpoint, security) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with suppress(grpc.aio.AioRpcError):
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=_ANSWER)
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
    return False


async def _until_closed(engine: RendezvousEngine, run_id: str, signals: Sequence[int]) -> str | None:
    """Wait for the end of a run; return the name of the signal if one came first, else None."""

    async def watch() -> None:
        states = await engine.watch(run_id, 0)
        while (published := await states.take()) is not None and published.run.phase != pb.PHASE_CLOSED:
            pass

    watching = asyncio.ensure_future(watch())
    with signalled(signals) as received:
        waiting = asyncio.ensure_future(received.get())
        await asyncio.wait({watching, waiting}, return_when=asyncio.FIRST_COMPLETED)
    await cancel_all((watching, waiting))
    return waiting.result().name if waiting.done() and not waiting.cancelled() else None
