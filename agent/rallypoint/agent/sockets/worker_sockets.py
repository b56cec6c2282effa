"""The agent's Unix sockets for workers, with the services behind them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from rallypoint.agent.config.job import JobConfig
from rallypoint.agent.sockets.store import StoreSocket, StoreSocketError
from rallypoint.agent.sockets.tcp_store import HOST, TCPStorePort
from rallypoint.agent.sockets.timer_tables import HostWorkers
from rallypoint.agent.sockets.timers import TimerSocket
from rallypoint.agent.sockets.watchdog import HostWatchdog
from rallypoint.rendezvous.client import HeldLease
from rallypoint.rendezvous.store.client import StoreClient, Writer
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import LONGEST_SOCKET_PATH, SettingError
from rallypoint.rpc.replica_client import Where
from rallypoint.timer.client.client import NodeTimers

# The folder for temporary files, then the sockets' folder and the longest name of a socket.
_LONGEST_FOLDER = LONGEST_SOCKET_PATH - len("/rallypoint_sockets_12345678/timer_stream")


class WorkerSockets:
    """The sockets, which exist while the context is open.

    Attributes:
        environment: The variables with the sockets' addresses, for workers; `${local_rank}` is to be replaced.
        watchdog: State of the timer service as this host sees it.
    """

    def __init__(
        self,
        config: JobConfig,
        rendezvous: Where,
        watchdog: HostWatchdog,
        workers: HostWorkers,
        register_cleanup: Callable[[Path], None],
    ) -> None:
        """Set up.

        Args:
            config: The job.
            rendezvous: Address of the rendezvous service, which serves the store too.
            watchdog: Gets the state of the connection to the timer service.
            workers: The workers.
            register_cleanup: Called with the sockets' temporary folder as soon as that exists.
        """
        self.environment: dict[str, str] = {}
        self.watchdog = watchdog
        self._config = config
        self._rendezvous = rendezvous
        self._workers = workers
        self._register_cleanup = register_cleanup
        self._stack = AsyncExitStack()
        self._folder = Path()
        self._timers: NodeTimers | None = None
        self._timer_socket: TimerSocket | None = None
        self._lease: HeldLease | None = None
        self._tcp_store: TCPStorePort | None = None

    async def __aenter__(self) -> Self:
        """Open the sockets.

        Raises:
            SettingError: They can't be made; one line.
        """
        try:
            async with AsyncExitStack() as stack:
                await self._open(stack)
                self._stack = stack.pop_all()
        except (OSError, StoreSocketError) as error:
            raise SettingError(
                f"can't make the workers' sockets: {error}; set TMPDIR to another folder"
            ) from None
        return self

    async def _open(self, stack: AsyncExitStack) -> None:
        folder = tempfile.TemporaryDirectory(prefix="rallypoint_sockets_", dir=roomy_folder())
        self._folder = Path(stack.enter_context(folder))
        self._register_cleanup(self._folder)
        self.environment = {
            "RALLYPOINT_STORE_SOCKET": str(self._folder / "store"),
            "RALLYPOINT_TIMER_SOCKET": str(self._folder / "timer"),
            "RALLYPOINT_TIMER_STREAM_SOCKET": str(self._folder / "timer_stream"),
            "TORCHELASTIC_TIMER_FILE": str(self._folder / "torch.${local_rank}"),
        }
        client = StoreClient(self._rendezvous, self._config.run_id, writer=self._writer)
        store = StoreSocket(self._folder / "store", client)
        await store.start()
        stack.push_async_callback(store.stop)
        if self._config.store == "rallypoint":
            self._tcp_store = TCPStorePort(client)
            stack.push_async_callback(self._tcp_store.stop)
            port = await self._tcp_store.start()
            self.environment |= {
                "MASTER_ADDR": HOST,
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def _writer(self) -> Writer:
        assert self._lease is not None, "no worker runs before `act_under`"
        return Writer(self._config.node_id, self._lease.number, self._lease.token)

    async def act_under(self, lease: HeldLease, round_: int) -> None:
        """Use this lease of the node for store writes and timers, and serve the workers of this round.

        The lease only grows within an incarnation of the run. No worker of an earlier round is alive.
        """
        if self._timers is None:
            self._timers = await self._open_timers(lease)
        elif lease != self._lease:
            self._timers.renew(lease.number, lease.incarnation, lease.timer_token)
        self._lease = lease
        if self._tcp_store is not None:
            self._tcp_store.serve(round_)

    def introduce(self) -> None:
        """Serve workers that have become known."""
        if self._timer_socket is not None:
            self._timer_socket.introduce()

    def progress_of(self, worker: str) -> tuple[int, float] | None:
        """Return the last step that a worker reported, and the seconds since then; None if it reported none."""
        return self._timers.progress_of(worker) if self._timers is not None else None

    def clear(self, worker: str) -> None:
        """Forget the timers of a worker that is gone."""
        if self._timer_socket is not None:
            self._timer_socket.clear(worker)

    async def _open_timers(self, lease: HeldLease) -> NodeTimers:
        config = self._config
        channel = open_channel(config.timer.endpoint, config.timer.security)
        self._stack.push_async_callback(channel.close)
        timers = NodeTimers(
            channel,
            run_id=config.run_id,
            node_id=config.node_id,
            lease=lease.number,
            incarnation=lease.incarnation,
            token=lease.timer_token,
            stall_after=config.stall_after,
        )
        timers.on_trouble = self.watchdog.note
        self._timer_socket = TimerSocket(
            self.environment["RALLYPOINT_TIMER_SOCKET"],
            timers,
            self._workers,
            stream_path=self.environment["RALLYPOINT_TIMER_STREAM_SOCKET"],
            fifos=[self._folder / f"torch.{local_rank}" for local_rank in range(config.local_world_size)],
        )
        await self._timer_socket.start()
        self._stack.push_async_callback(self._timer_socket.stop)
        return timers


def roomy_folder() -> str:
    """Return the folder for temporary files, or /tmp if its path (long on some clusters) is too long for a socket."""
    chosen = tempfile.gettempdir()
    return chosen if len(os.fsencode(chosen)) <= _LONGEST_FOLDER else "/tmp"  # noqa: S108 (a private one inside)
