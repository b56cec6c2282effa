"""The agent's Unix sockets that workers talk to, and what stands behind them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from rallypoint.agent.config.job import JobConfig
from rallypoint.agent.hangs.hung_worker import HungWorker
from rallypoint.agent.sockets.store import StoreSocket, StoreSocketError
from rallypoint.agent.sockets.timers import TimerSocket
from rallypoint.agent.sockets.watchdog import HostWatchdog
from rallypoint.rendezvous.store.client import StoreClient, Writer
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import SettingError
from rallypoint.rpc.replica_client import Where
from rallypoint.timer.client.client import NodeTimers

# A socket's path has 107 bytes at most. Ours adds its folder's name and its own to that of the folder.
_LONGEST_FOLDER = 107 - len("/rallypoint_sockets_12345678/store")


class WorkerSockets:
    """Stands the sockets up for as long as the context lasts.

    Attributes:
        environment: The variables that tell workers where the sockets are; `${local_rank}` is to be replaced.
        watchdog: Whether the timer service guards the workers.
    """

    def __init__(
        self,
        config: JobConfig,
        rendezvous: Where,
        watchdog: HostWatchdog,
        *,
        worker_of: Callable[[int], str | None],
        rank_of: Callable[[str], int | None],
        on_hung: Callable[[HungWorker], Awaitable[bool | None]],
        worker_at: Callable[[int], tuple[str, int] | None] = lambda local_rank: None,
        entrust: Callable[[Path], None] = lambda _folder: None,
    ) -> None:
        """Set up.

        Args:
            config: The job.
            rendezvous: Where the rendezvous service is, and with it the store.
            watchdog: Gets the state of the connection to the timer service.
            worker_of: The worker that a process is, or descends from; None for a stranger.
            rank_of: The global rank of a worker; None if there is no such worker.
            on_hung: Called with a timer that expired while its worker held it; returns when what is to be done
                about that is done. False: it could not be done, and is to be tried again later.
            worker_at: The name and the process of the worker with a local rank; None if it does not run.
            entrust: Called with the temporary folder that they are in, as soon as it is there.
        """
        self.environment: dict[str, str] = {}
        self.watchdog = watchdog
        self._config = config
        self._rendezvous = rendezvous
        self._worker_of = worker_of
        self._rank_of = rank_of
        self._on_hung = on_hung
        self._worker_at = worker_at
        self._register_cleanup = entrust
        self._stack = AsyncExitStack()
        self._folder = Path()
        self._timers: NodeTimers | None = None
        self._timer_socket: TimerSocket | None = None
        self._lease = 0
        self._incarnation = ""

    async def __aenter__(self) -> Self:
        """Stand them up.

        Raises:
            SettingError: There is no place for them; one line.
        """
        try:
            async with AsyncExitStack() as stack:
                await self._stand_up(stack)
                self._stack = stack.pop_all()
        except (OSError, StoreSocketError) as error:
            raise SettingError(
                f"can't make the workers' sockets: {error}; set TMPDIR to another folder"
            ) from None
        return self

    async def _stand_up(self, stack: AsyncExitStack) -> None:
        folder = tempfile.TemporaryDirectory(prefix="rallypoint_sockets_", dir=roomy_folder())
        self._folder = Path(stack.enter_context(folder))
        self._register_cleanup(self._folder)
        self.environment = {
            "RALLYPOINT_STORE_SOCKET": str(self._folder / "store"),
            "RALLYPOINT_TIMER_SOCKET": str(self._folder / "timer"),
            "TORCHELASTIC_TIMER_FILE": str(self._folder / "torch.${local_rank}"),
        }
        client = StoreClient(self._rendezvous, self._config.run_id, writer=self._writer)
        store = StoreSocket(self._folder / "store", client)
        await store.start()
        stack.push_async_callback(store.stop)

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def _writer(self) -> Writer | None:
        return Writer(self._config.node_id, self._lease) if self._lease else None

    async def act_under(self, lease: int, incarnation: str = "") -> None:
        """Write and watch timers in the name of a lease of this node, which only grows in an incarnation of the run."""
        if self._timers is None:
            self._timers = await self._open_timers(lease, incarnation)
        elif (lease, incarnation) != (self._lease, self._incarnation):
            self._timers.renew(lease, incarnation)
        self._lease, self._incarnation = lease, incarnation

    def introduce(self) -> None:
        """More workers have become known to `worker_of`."""
        if self._timer_socket is not None:
            self._timer_socket.introduce()

    def progress_of(self, worker: str) -> tuple[int, float] | None:
        """The last step of which a worker told, and the seconds since it came to that; None if it told none."""
        return self._timers.progress_of(worker) if self._timers is not None else None

    def clear(self, worker: str) -> None:
        """Forget the timers of a worker that is gone."""
        if self._timer_socket is not None:
            self._timer_socket.clear(worker)

    async def _open_timers(self, lease: int, incarnation: str) -> NodeTimers:
        config = self._config
        channel = open_channel(config.timer.endpoint, config.timer.tls)
        self._stack.push_async_callback(channel.close)
        timers = NodeTimers(
            channel,
            run_id=config.run_id,
            node_id=config.node_id,
            lease=lease,
            incarnation=incarnation,
            stall_after=config.stall_after,
        )
        timers.on_trouble = self.watchdog.note
        self._timer_socket = TimerSocket(
            self.environment["RALLYPOINT_TIMER_SOCKET"],
            timers,
            worker_of=self._worker_of,
            rank_of=self._rank_of,
            on_expired=self._on_hung,
            fifos=[self._folder / f"torch.{local_rank}" for local_rank in range(config.local_world_size)],
            worker_at=self._worker_at,
        )
        await self._timer_socket.start()
        self._stack.push_async_callback(self._timer_socket.stop)
        return timers


def roomy_folder() -> str:
    """The folder for temporary files, or /tmp where its path (on some clusters, long) leaves a socket no room."""
    chosen = tempfile.gettempdir()
    return chosen if len(os.fsencode(chosen)) <= _LONGEST_FOLDER else "/tmp"  # noqa: S108 (a private one inside)
