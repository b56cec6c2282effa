"""A job's own rendezvous over an etcd: a few of its agents serve it as replicas, and each agent finds the owner.

No host is special. If the serving agent is lost, another one continues with the state in etcd, and the workers of the
other hosts are not affected. The client of an agent uses a fixed endpoint inside the agent, which redirects it to the
present owner of the run.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from rallypoint.agent.config.job import Peer
from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.endpoint import EtcdAddress
from rallypoint.etcd.errors import EtcdError, EtcdUnavailable
from rallypoint.etcd.session import Session
from rallypoint.launcher.run_lease import (
    SEAT_TTL,
    LeasedClient,
    RedirectingLocator,
    forgotten,
    keep_alive,
    run_lease,
    seat,
    shared_secret,
)
from rallypoint.launcher.services import LAST_WORD, calls_to_end, listening, listening_host
from rallypoint.rendezvous.api.errors import translate
from rallypoint.rendezvous.api.service import registrations
from rallypoint.rendezvous.cluster.keys import replica_name
from rallypoint.rendezvous.cluster.ownership import MoveSettings
from rallypoint.rendezvous.cluster.replica import Replicas
from rallypoint.rendezvous.cluster.service import ReplicatedServices, replicated_services
from rallypoint.rendezvous.core.state import Phase
from rallypoint.rpc.endpoint import (
    AccessFiles,
    ClientSecurity,
    Endpoint,
    ServerOptions,
    SettingError,
    parse_endpoint,
)
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.loop import cancel_all
from rallypoint.rpc.pace import Pace
from rallypoint.rpc.runtime_folder import new_run_socket
from rallypoint.serving.server import Server

# Longest pause in seconds between two attempts to serve, for example after etcd was unreachable.
_LONGEST_BACKOFF = 5.0

# One run is one shard. There is nothing else to balance, so a move to a newer host would have no use.
_WANTED = Replicas(
    lease_ttl=SEAT_TTL, shards=1, moves=MoveSettings(balancing=0), keeps_etcd=False, keys_end=True
)

_log = get_logger("rallypoint.run")


class OwnReplica:
    """An agent's part in serving its run's rendezvous.

    Attributes:
        peer: Address of the rendezvous for this process.
    """

    def __init__(
        self,
        etcd: EtcdAddress,
        run_id: str,
        address: str,
        security: ClientSecurity,
        peer: Peer,
        *,
        access: AccessFiles,
    ) -> None:
        """Start nothing yet; see `replicated_rendezvous`."""
        self.peer = peer
        self._etcd = etcd
        self._run_id = run_id
        self._address = address
        self._security = security
        self._access = access
        self._pace = Pace()
        self._services: ReplicatedServices | None = None
        # Seconds that the last attempt to serve lasted.
        self._stood = 0.0
        # The error why this host can't serve, for `begun`.
        self._refused: asyncio.Future[SettingError] = asyncio.get_running_loop().create_future()
        self._leaving = asyncio.Event()
        self._renewals: asyncio.Task[None] | None = None

    def begin(self, client: EtcdClient) -> None:
        """Serve whenever there is a free seat, until `stop_when_over` or `end`."""
        self._renewals = asyncio.create_task(self._renew(client))

    async def begun(self, locator: RedirectingLocator, timeout: float) -> None:
        """Wait until the run is served by any agent, at most `timeout` seconds.

        Raises:
            SettingError: It is not served, and this host can't serve it; one line.
        """
        served = asyncio.create_task(locator.served())
        try:
            either: tuple[asyncio.Future[Any], ...] = served, self._refused
            await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if self._refused.done() and not served.done():
                raise self._refused.result()
        finally:
            self._refused.cancel()
            served.cancel()

    async def stop_when_over(
        self, run_id: str, reason: str, signals: Sequence[int], *, succeeded: bool
    ) -> None:
        """Stop serving in good order, within a time limit: other nodes find the run at another agent.

        Args:
            reason: How this node's job ended; no other node ends with it.
            signals: Ignored: there is no wait that they could end.
            succeeded: True if this host's workers succeeded.
        """
        self._leaving.set()
        if self._renewals is None:
            return
        if self._services is None:
            self._renewals.cancel()
        await asyncio.wait({self._renewals})

    async def end(self) -> None:
        """Stop serving at once."""
        if self._renewals is not None:
            self._renewals.cancel()
            await asyncio.wait({self._renewals})

    async def _renew(self, client: EtcdClient) -> None:
        backoff, reported = self._pace.backoff(_LONGEST_BACKOFF), ""
        while not self._leaving.is_set():
            self._stood = 0.0
            try:
                async with seat(client, f"{self._address} {socket.gethostname()}", self._pace) as held:
                    await self._serve(client, held)
            except Exception as error:
                if isinstance(error, SettingError) and not self._refused.done():
                    self._refused.set_result(error)
                # Log a repeated error once: an outage may last. The run continues with the state that its nodes have.
                elif reported != repr(error) or self._stood > SEAT_TTL:
                    reported = repr(error)
                    _warn(error)
            if self._stood > SEAT_TTL:
                backoff.reset()
            if not self._leaving.is_set():
                await self._pace.sleep(backoff.next())

    async def _serve(self, client: EtcdClient, held: Session) -> None:
        """Serve as a replica while the seat is held, or until this agent leaves.

        Raises:
            EtcdError: etcd did not reply, or refused.
            SettingError: The run can't be served here; one line.
        """
        lease = await run_lease(client, self._run_id)
        connect = partial(LeasedClient, lease=lease)
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with AsyncExitStack() as stack:
            services = await stack.enter_async_context(
                replicated_services(self._etcd, _WANTED, pace=self._pace, connect=connect)
            )
            host = await listening_host(Endpoint(self._address, 0))
            server = Server(
                listening(host, 0, self._security, self._access),
                services=services.registrations,
                translate=translate,
                instance=services.replica.registration.instance,
            )
            await server.start()
            stack.push_async_callback(server.stop)
            advertised = str(Endpoint(self._address, parse_endpoint(server.address).port))
            services.begin(replica_name("", advertised), advertised, partial(_fail, failed))
            _log.debug("this agent has a seat: it may serve the run's rendezvous", address=advertised)
            ends = [
                asyncio.ensure_future(each)
                for each in (
                    held.lost(),
                    keep_alive(client, lease, self._pace),
                    forgotten(client, lease, self._pace),
                    self._leaving.wait(),
                    failed,
                )
            ]
            self._services = services
            began = self._pace.clock()
            try:
                done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if self._leaving.is_set():
                    await self._hand_over(services, server)
                for end in done:
                    end.result()
            finally:
                self._services = None
                self._stood = self._pace.clock() - began
                await cancel_all(ends)

    async def _hand_over(self, services: ReplicatedServices, server: Server) -> None:
        over = await self._is_over(services)
        if over:
            # A closed run is not taken over: its nodes learn of the end from this server.
            await calls_to_end(server)
        await services.drain(finished=over)
        await server.drain()

    async def _is_over(self, services: ReplicatedServices) -> bool:
        """Return True if the run is served here and closed."""
        try:
            engine = services.locator.shard(self._run_id).engine
            async with asyncio.timeout(LAST_WORD):
                return await engine.read_run(self._run_id, lambda state: state.phase is Phase.CLOSED)
        except Exception as error:
            _log.debug("the run is not served here", reason=str(error))
            return False


@asynccontextmanager
async def replicated_rendezvous(
    etcd: EtcdAddress,
    run_id: str,
    address: str,
    security: ClientSecurity,
    timeout: float,
    *,
    access: AccessFiles,
) -> AsyncIterator[OwnReplica]:
    """Take part in a run's rendezvous over an etcd, as long as the context lasts.

    Args:
        etcd: The etcd; its prefix is for this run alone.
        address: Address of this host for other hosts.
        security: How the job's connections are secured; None: by a secret that the job keeps in the etcd.
        timeout: Seconds after which an etcd that does not reply counts as a wrong address.
        access: Which calls from other hosts are refused.

    Raises:
        SettingError: etcd does not reply, or refuses, or this host can't serve; one line.
    """
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(EtcdClient(etcd))
        await _reach(client, timeout)
        locator = RedirectingLocator()
        secret = await shared_secret(client) if security is None else None
        endpoint = stack.enter_context(new_run_socket("rendezvous", run_id, secret))
        security = security or secret
        server = Server(
            ServerOptions(host=endpoint),
            services=registrations(locator, list_replicas=locator.list_replicas, replicated=True),
            translate=translate,
        )
        await server.start()
        stack.push_async_callback(server.stop)
        following = asyncio.create_task(locator.follow(client))
        stack.push_async_callback(cancel_all, [following])
        replica = OwnReplica(etcd, run_id, address, security, Peer(endpoint, security), access=access)
        replica.begin(client)
        stack.push_async_callback(replica.end)
        await replica.begun(locator, timeout)
        yield replica


async def _reach(client: EtcdClient, timeout: float) -> None:
    """Return once etcd replies."""
    pace = Pace()
    deadline = pace.clock() + timeout
    logged = False
    while True:
        try:
            await client.get(f"{client.address.prefix}/run".encode())
            return
        except EtcdUnavailable as error:
            endpoints = _endpoints(client.address)
            if (left := deadline - pace.clock()) <= 0:
                raise SettingError(
                    f"no etcd answers at {endpoints} ({error}; retried for {timeout:g} s): check "
                    "--rdzv-endpoint, and that etcd runs"
                ) from None
            if not logged:
                logged = True
                _log.warning(
                    "no etcd answers yet, trying again", at=endpoints, timeout=timeout, error=str(error)
                )
        except EtcdError as error:
            raise SettingError(f"etcd at {_endpoints(client.address)} refuses us: {error}") from None
        await pace.sleep(min(left, 1.0) * pace.draw())


def _endpoints(etcd: EtcdAddress) -> str:
    return ",".join(map(str, etcd.endpoints))


def _warn(error: Exception) -> None:
    event = "this agent can't serve the run's rendezvous at present"
    if isinstance(error, EtcdError | SettingError):
        _log.warning(event, error=str(error))
    else:
        _log.exception(event, error=error)


def _fail(failed: asyncio.Future[None], error: BaseException) -> None:
    if not failed.done():
        failed.set_exception(error)
