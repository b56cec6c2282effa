"""Measurements of workers reach the agent; other data is dropped, and their rate is limited."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from rallypoint.agent.sockets.metrics import MeasurementSocket, read_measurement
from rallypoint.worker.metrics import METRICS_VARIABLE, Measurement
from support.waiting import until


def _sender(place: str) -> tuple[socket.socket, Callable[[object], None]]:
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    def send(record: object) -> None:
        sender.sendto(json.dumps(record).encode(), place)

    return sender, send


async def test_durations_and_values_arrive_with_the_rank_of_their_worker() -> None:
    """The socket is removed with the job."""
    taken: list[tuple[Measurement, int]] = []
    async with MeasurementSocket(lambda *each: taken.append(each)) as here:
        place = here.environment[METRICS_VARIABLE]
        sender, send = _sender(place)
        with sender:
            send({"name": "save", "seconds": 1.5, "raised": True, "value": None, "rank": 3})
            send({"name": "loss", "value": 2})
            await until(lambda: len(taken) == 2, "both")
            assert taken == [(Measurement("save", 1.5, raised=True), 3), (Measurement("loss", value=2.0), 0)]
            send({"name": "last", "value": 1})  # as the worker ends
    assert taken[-1][0].name == "last"
    assert not Path(place).parent.exists()


async def test_measurements_above_the_rate_limit_are_read_later() -> None:
    """Workers that measure each step of a hot loop must not use up the agent's processor."""
    taken: list[Measurement] = []
    async with MeasurementSocket(lambda measurement, _: taken.append(measurement), most=5) as here:
        sender, send = _sender(here.environment[METRICS_VARIABLE])
        with sender:
            for number in range(8):
                send({"name": "hot", "value": number})
            await until(lambda: len(taken) == 5, "as many as there may be")
            assert not asyncio.get_running_loop().remove_reader(here._socket), "it is not even listened to"
            await until(lambda: len(taken) == 8, "the rest, when its time has come")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"name": "x"}',
        b'{"name": "x", "seconds": 1, "value": 1}',
        b'{"name": "x", "seconds": -1}',
        b'{"name": "x", "value": NaN}',
        b'{"name": "x", "value": 1e999}',
        b'{"name": "x", "value": "many"}',
        b'{"name": "", "value": 1}',
        b'{"name": "two\\nlines", "value": 1}',
        b'{"name": "x", "value": 1, "rank": "first"}',
        json.dumps({"name": "x" * 121, "value": 1}).encode(),
    ],
)
def test_invalid_measurements_are_dropped(data: bytes) -> None:
    """Workers may send any data."""
    assert read_measurement(data) is None
