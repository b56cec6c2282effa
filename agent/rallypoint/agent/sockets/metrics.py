"""The agent's socket for measurements of workers (rallypoint.worker.metrics)."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from rallypoint.agent.sockets.worker_sockets import roomy_folder
from rallypoint.rpc.endpoint import SettingError
from rallypoint.worker.metrics import METRICS_VARIABLE, Measurement

# Measurements accepted per second from all workers of a host, on average and at once. Each costs the agent some 20 µs;
# further ones stay in the socket, and are lost when that is full.
MOST_PER_SECOND = 2_000

_LONGEST = 4096  # bytes of one
_LONGEST_NAME = 120  # characters


class MeasurementSocket:
    """Receives measurements while the context is open.

    Attributes:
        environment: The variable with the socket's path, for workers.
    """

    def __init__(
        self, on_measured: Callable[[Measurement, int], None], *, most: int = MOST_PER_SECOND
    ) -> None:
        """Set up.

        Args:
            on_measured: Called with each measurement and the global rank of its worker.
            most: Measurements accepted per second.
        """
        self.environment: dict[str, str] = {}
        self._on_measured = on_measured
        self._most = most
        self._left = most
        self._refill: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        """Open it.

        Raises:
            SettingError: The socket can't be made; one line.
        """
        self._loop = asyncio.get_running_loop()
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="rallypoint_metrics_", dir=roomy_folder())
            path = str(Path(self._folder.name) / "metrics")
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            self._socket.bind(path)
            os.chmod(path, 0o600)
        except OSError as error:
            raise SettingError(
                f"can't make the workers' socket for metrics: {error}; set TMPDIR to another folder"
            ) from None
        self.environment = {METRICS_VARIABLE: path}
        self._loop.add_reader(self._socket, self._receive)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._loop.remove_reader(self._socket)
        if self._refill is not None:
            self._refill.cancel()
        self._receive_last()
        self._socket.close()
        self._folder.cleanup()

    def _receive(self) -> None:
        if self._refill is None:
            self._left = self._most
            self._refill = self._loop.call_later(1.0, self._next_second)
        for _ in range(min(64, self._left)):  # a bound, so that other tasks of this loop can run
            if not self._take_one():
                return
            self._left -= 1
        if not self._left:
            self._loop.remove_reader(self._socket)

    def _next_second(self) -> None:
        self._refill = None
        self._loop.add_reader(self._socket, self._receive)

    def _receive_last(self) -> None:
        """Receive measurements that workers sent just before they ended."""
        while self._left and self._take_one():
            self._left -= 1

    def _take_one(self) -> bool:
        try:
            data = self._socket.recv(_LONGEST)
        except OSError:
            return False
        if (measurement := read_measurement(data)) is not None:
            self._on_measured(*measurement)
        return True


def read_measurement(data: bytes) -> tuple[Measurement, int] | None:
    """Parse a measurement and the rank of its worker; None if invalid, because workers can send any bytes."""
    try:
        record: dict[str, Any] = json.loads(data)
        name = str(record["name"])
        rank = int(record.get("rank", 0))
        numbers = [None if record.get(key) is None else float(record[key]) for key in ("seconds", "value")]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    seconds, value = numbers
    if any(number is not None and not math.isfinite(number) for number in numbers):
        return None
    if not 0 < len(name) <= _LONGEST_NAME or not name.isprintable() or (seconds is None) == (value is None):
        return None
    if seconds is not None and seconds < 0:
        return None
    return Measurement(name, seconds, bool(record.get("raised")), value), rank
