"""The agent's Unix sockets that workers talk to, and what stands behind them."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

import grpc

from rallypoint.agent.config import JobConfig
from rallypoint.agent.store_socket import StoreSocket
from rallypoint.rendezvous.store.client import StoreClient


class WorkerSockets:
    """Stands the sockets up for as long as the context lasts."""

    def __init__(
        self,
        config: JobConfig,
        channel: grpc.aio.Channel,
        *,
        worker_of: Callable[[int], tuple[int, int] | None],
        on_hung: Callable[[int, int, str], Awaitable[None]],
    ) -> None:
        """Set up.

        Args:
            config: The job.
            channel: To the rendezvous service, where the store is.
            worker_of: (round, local rank) of the worker that a process belongs to; None for a stranger.
            on_hung: Called with (round, local rank, one sentence) for a worker whose timer expired; returns
                when it is dead.
        """
        self.environment: dict[str, str] = {}
        self._config = config
        self._channel = channel
        self._worker_of = worker_of
        self._on_hung = on_hung
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        # In the folder for temporary files, whose path is short: a socket's has 107 bytes at most.
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="rallypoint_sockets_")))
        store = StoreSocket(folder / "store", StoreClient(self._channel, self._config.run_id))
        await store.start()
        self._stack.push_async_callback(store.stop)
        self.environment = {"RALLYPOINT_STORE_SOCKET": str(folder / "store")}
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def lease_granted(self, lease: int) -> None:
        pass

    def clear_round(self, round_: int) -> None:
        pass
