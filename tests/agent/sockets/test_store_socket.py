"""The agent's end of the store socket: bounded, one call at a time; it keeps nothing of a worker that disconnects,
and no frame breaks it."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from rallypoint.agent.sockets.store import StoreSocket, StoreSocketError
from rallypoint.rendezvous.store.service import StoreService
from rallypoint.worker.store import MAX_PART_BYTES, PREFIX, encode_frame
from rendezvous.store.store_fakes import RUN, TestJournal, agent_socket, channel_to, client_of, open_store
from support.waiting import PATIENCE

SET = {"op": "set", "key": "k", "round": 1, "writer_round": 1, "timeout": 30.0}
GET = {"op": "get", "key": "k", "round": 1, "timeout": 30.0}


@pytest.fixture
def store() -> StoreService:
    return open_store(TestJournal())


@pytest.fixture
async def path(tmp_path: Path, store: StoreService) -> AsyncIterator[str]:
    async with agent_socket(tmp_path, store, max_connections=3) as path:
        yield path


class Worker:
    """A connection that sends any bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, path: str) -> Worker:
        return cls(*await asyncio.open_unix_connection(path))

    async def answer(self) -> tuple[dict[str, Any], bytes]:
        header, body = PREFIX.unpack(await self.reader.readexactly(PREFIX.size))
        return json.loads(await self.reader.readexactly(header)), await self.reader.readexactly(body)

    async def call(self, header: dict[str, Any], body: bytes = b"") -> tuple[dict[str, Any], bytes]:
        self.writer.write(encode_frame(header, body))
        return await self.answer()

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


async def until(store: StoreService, path: str, waiting: int) -> None:
    """Return when `waiting` calls wait in the service; each check is itself a call, and so part of the sequence."""
    async with asyncio.timeout(PATIENCE):
        worker = await Worker.connect(path)
        while True:
            await worker.call({"op": "check", "keys": ["k"], "round": 1, "timeout": 30.0})
            if store._runs[RUN].waits.waiters == waiting:
                break
        await worker.close()


async def test_a_frame_may_come_in_any_pieces(path: str) -> None:
    worker = await Worker.connect(path)
    for byte in encode_frame(SET, b"\x00\xff"):
        worker.writer.write(bytes([byte]))
        await worker.writer.drain()
    assert await worker.answer() == ({}, b"")
    assert await worker.call(GET) == ({}, b"\x00\xff")
    await worker.close()


async def test_the_example_of_the_documentation_is_right(path: str) -> None:
    worker = await Worker.connect(path)
    header = b'{"op":"set","key":"k","round":3,"writer_round":3,"timeout":300.0}'
    frame = struct.pack(">II", 0x41, 2) + header + b"\xff\x00"
    assert encode_frame(json.loads(header), b"\xff\x00") == frame
    worker.writer.write(frame)
    answer, _ = await worker.answer()
    assert answer["error"]["reason"] == "ROUND_NOT_BEGUN"
    await worker.close()


async def test_a_waiting_call_holds_up_no_other_connection(path: str, store: StoreService) -> None:
    waiter, other = await Worker.connect(path), await Worker.connect(path)
    waiter.writer.write(encode_frame(GET, b""))
    await until(store, path, 1)
    assert await other.call(SET, b"1") == ({}, b"")
    assert await waiter.answer() == ({}, b"1")
    await waiter.close()
    await other.close()


async def test_nothing_is_left_of_a_worker_that_goes(path: str, store: StoreService) -> None:
    """Its wait ends in the agent and in the service."""
    worker = await Worker.connect(path)
    worker.writer.write(encode_frame(GET, b""))
    await until(store, path, 1)
    await worker.close()
    await until(store, path, 0)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({}, "'op' is None; expected str"),
        ({"op": "drop"}, "'op' is 'drop'; expected one of set, get, add"),
        ({"op": ["set"]}, "'op' is ['set']"),
        ({**SET, "key": 5}, "'key' is 5; expected str"),
        ({**SET, "key": "\ud800"}, "cannot be encoded as UTF-8"),
        ({**SET, "round": "1"}, "'round' is '1'"),
        ({**SET, "round": True}, "'round' is True"),
        ({**SET, "round": 2**31}, "32 bits"),
        ({**SET, "writer_round": None}, "'writer_round' is None"),
        ({**SET, "timeout": -1}, "'timeout' is -1"),
        ({**SET, "timeout": True}, "'timeout' is True"),
        ({**SET, "timeout": "soon"}, "'timeout' is 'soon'"),
        ({**SET, "op": "add", "amount": 2**63}, "64 bits"),
        ({**SET, "op": "add", "amount": 1.5}, "'amount' is 1.5"),
        ({**SET, "op": "compare_set", "expected_length": 1}, "body has 0 bytes"),
        ({**SET, "op": "compare_set", "expected_length": -1}, "'expected_length' is -1"),
        ({**GET, "op": "wait", "keys": "k"}, "'keys' is 'k'; expected list"),
        ({**GET, "op": "wait", "keys": [1]}, "Unicode strings only"),
        ({**GET, "op": "keys", "prefix": ""}, "'page' is None"),
    ],
)
async def test_a_malformed_call_is_refused_and_the_connection_stays(
    path: str, header: dict[str, Any], message: str
) -> None:
    worker = await Worker.connect(path)
    answer, _ = await worker.call(header)
    assert answer["error"]["code"] == "INVALID_ARGUMENT"
    assert message in answer["error"]["message"]
    assert "last" not in answer
    assert await worker.call(SET, b"1") == ({}, b"")
    await worker.close()


@pytest.mark.parametrize(
    "frame",
    [
        PREFIX.pack(MAX_PART_BYTES + 1, 0),
        PREFIX.pack(2, MAX_PART_BYTES + 1),
        PREFIX.pack(0, 0) + b"x",
        encode_frame(SET, b"") * 2,
    ],
    ids=["header", "body", "surplus", "pipelined"],
)
async def test_a_broken_frame_ends_the_connection(path: str, frame: bytes) -> None:
    worker = await Worker.connect(path)
    worker.writer.write(frame)
    answer, _ = await worker.answer()
    assert answer["error"]["reason"] == "MALFORMED_CALL"
    assert answer["last"] is True
    assert await worker.reader.read() == b""
    await worker.close()


@pytest.mark.parametrize("header", [b"", b"{", b"[]", b"\xff", b'"set"'])
async def test_a_header_that_is_no_object_is_refused(path: str, header: bytes) -> None:
    worker = await Worker.connect(path)
    worker.writer.write(PREFIX.pack(len(header), 0) + header)
    answer, _ = await worker.answer()
    assert answer["error"]["reason"] == "MALFORMED_CALL"
    await worker.close()


async def test_a_second_call_before_the_answer_ends_the_connection(path: str, store: StoreService) -> None:
    worker = await Worker.connect(path)
    worker.writer.write(encode_frame(GET, b""))
    await until(store, path, 1)
    answer, _ = await worker.call(GET)
    assert answer["last"] is True
    await worker.close()
    await until(store, path, 0)


async def test_connections_are_bounded(path: str) -> None:
    """One too many gets the reason, and is accepted once another has closed."""
    workers = [await Worker.connect(path) for _ in range(3)]
    for worker in workers:
        await worker.call(SET)
    surplus = await Worker.connect(path)
    answer, _ = await surplus.call(SET)
    assert answer["error"]["reason"] == "TOO_MANY_CONNECTIONS"
    assert answer["last"] is True
    await surplus.close()
    await workers.pop().close()
    async with asyncio.timeout(PATIENCE):
        while True:
            again = await Worker.connect(path)
            answer, _ = await again.call(SET)
            await again.close()
            if "error" not in answer:
                break
    for worker in workers:
        await worker.close()


async def test_stopping_ends_calls_and_connections(tmp_path: Path, store: StoreService) -> None:
    async with agent_socket(tmp_path, store) as path:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        idle, waiter = await Worker.connect(path), await Worker.connect(path)
        await idle.call(SET)
        waiter.writer.write(encode_frame({**GET, "key": "never"}, b""))
        await until(store, path, 1)
    assert not Path(path).exists()  # noqa: ASYNC240
    for worker in (idle, waiter):
        assert await worker.reader.read() == b""
        await worker.close()


async def test_a_call_after_the_end_of_the_channel_gets_an_error(tmp_path: Path, store: StoreService) -> None:
    """When its channel is closed, a call gets an error reply, and does not wait for ever."""
    async with channel_to(f"{tmp_path}/store.sock") as channel:
        sock = StoreSocket(tmp_path / "agent.sock", client_of(channel))
        await sock.start()
    worker = await Worker.connect(f"{tmp_path}/agent.sock")
    answer, _ = await worker.call(SET)
    assert answer["error"]["code"] == "UNAVAILABLE"
    await worker.close()
    await sock.stop()
    await sock.stop()


def test_it_runs_on_uvloop(tmp_path: Path) -> None:
    async def talk() -> None:
        store = open_store(TestJournal())
        async with agent_socket(tmp_path, store) as path:
            worker, waiter = await Worker.connect(path), await Worker.connect(path)
            waiter.writer.write(encode_frame(GET, b""))
            await until(store, path, 1)
            value = os.urandom(1024) * 4000
            assert await worker.call(SET, value) == ({}, b"")
            assert await waiter.answer() == ({}, value)
            await worker.close()
            waiter.writer.write(encode_frame({**GET, "key": "never"}, b""))
            await until(store, path, 1)
        assert await waiter.reader.read() == b""
        await waiter.close()

    uvloop.run(talk())


async def test_an_unusable_socket_path_is_explained(tmp_path: Path) -> None:
    async with channel_to(f"{tmp_path}/store.sock") as channel:
        client = client_of(channel)
        with pytest.raises(StoreSocketError, match=r"can't listen for workers at .*missing.*No such file"):
            await StoreSocket(tmp_path / "missing" / "s", client).start()
