"""A client that adds to a number all the time, through all failures, and records its waiting times."""

from __future__ import annotations

import asyncio
from typing import Self

from ha.waiting import PATIENCE
from rallypoint.rendezvous.store.client import StoreClient
from rallypoint.rpc.endpoint import Plaintext
from rallypoint.rpc.replica_client import ReplicaClient
from torture.tormented_node import TormentedNode


class SteadyWriter:
    """Adds one to a key of a run repeatedly; every addition counts once, or `go_on` and `stop` fail."""

    def __init__(self, endpoints: str, node: TormentedNode, key: str = "sum", pause: float = 0.01) -> None:
        """Write nothing yet; `endpoints`: in the form of `--rdzv-endpoint`.

        It writes for `node`, which must hold its lease all the time. No other writer may use the key. `pause`:
        seconds between two additions: short, so that each fault meets one, but without overloading the machine.
        """
        self._pause = pause
        self._key = key
        self._board = ReplicaClient(endpoints, Plaintext())
        self._store = StoreClient(self._board, node.run_id, writer=lambda: node.writer)
        # Time of the reply to each addition, by the event loop's clock.
        self._answers: list[float] = []
        self._answered = asyncio.Event()
        self._stopping = False
        self._writing: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        self._writing = asyncio.create_task(self._write())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._writing.cancel()
        await asyncio.wait({self._writing})
        await self._board.close()

    async def go_on(self, times: int = 1) -> None:
        """Wait for the replies to so many additions that begin after this call.

        Raises:
            AssertionError: An addition was lost, or took effect twice.
            ServiceError: One was refused, or never answered.
        """
        wanted = len(self._answers) + 1 + times
        while len(self._answers) < wanted:
            if self._writing.done():
                self._writing.result()
            self._answered.clear()
            waiting = asyncio.create_task(self._answered.wait())
            await asyncio.wait({waiting, self._writing}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()

    async def stop(self) -> int:
        """Stop, wait for the last reply, and return the number of additions.

        Raises:
            AssertionError: An addition was lost, or took effect twice.
        """
        self._stopping = True
        await self._writing
        assert int(await self._store.get(self._key, timeout=PATIENCE)) == len(self._answers)
        return len(self._answers)

    def longest_gap(self, since: float = 0.0) -> float:
        """Return the longest time between two successive replies, the second one after `since`, in seconds."""
        pairs = zip(self._answers, self._answers[1:], strict=False)
        return max(after - before for before, after in pairs if after > since)

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopping:
            total = await self._store.add(self._key, 1, timeout=PATIENCE)
            self._answers.append(loop.time())
            self._answered.set()
            assert total == len(self._answers), "every addition counts once"
            await asyncio.sleep(self._pause)
