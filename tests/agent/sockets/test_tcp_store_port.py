"""The TCPStore port is for this user only and bounded, and keeps nothing of a program that disconnects."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rallypoint.agent.sockets.tcp_store import TCPStorePort, owner_of
from rallypoint.rendezvous.core.commands import LeaseLost
from rallypoint.rendezvous.store.service import StoreService
from rendezvous.store.store_fakes import RUN, Rounds, TestJournal, channel_to, client_of, open_store, serving
from support.waiting import PATIENCE, until

VALIDATE = b"\0" + struct.pack("<I", 0x3C85F7CE)
STRANGER = 65_534


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


SET = b"\1" + text(b"/k") + text(b"v")
GET = b"\3" + text(b"/k")
WAIT = b"\6" + struct.pack("<Q", 1) + text(b"/k")
CANCEL = b"\x0c"


@pytest.fixture
def rounds() -> Rounds:
    return Rounds()


@pytest.fixture
def store(rounds: Rounds) -> StoreService:
    return open_store(TestJournal(), rounds)


class Program:
    """A connection that sends any bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def call(self, query: bytes, reply: bytes) -> None:
        """Send a query, and check its reply."""
        self.writer.write(query)
        async with asyncio.timeout(PATIENCE):
            assert await self.reader.readexactly(len(reply)) == reply

    async def is_refused(self) -> bool:
        """Return True if the port does not reply to a first query."""
        self.writer.write(b"\x0d1234")
        try:
            return await self.reader.read(4) == b""
        except ConnectionError:
            return True

    async def ended(self) -> bool:
        """Wait for the end of the connection; return True if there was no reply."""
        async with asyncio.timeout(PATIENCE):
            try:
                return await self.reader.read() == b""
            except ConnectionError:
                return True


class Served:
    """A port that listens, and connections to it."""

    def __init__(self, port: TCPStorePort, number: int) -> None:
        self.port, self.number = port, number
        self._programs: list[Program] = []

    async def connect(self, first: bytes = VALIDATE) -> Program:
        program = Program(*await asyncio.open_connection("127.0.0.1", self.number))
        self._programs.append(program)
        program.writer.write(first)
        return program

    def close(self) -> None:
        """Close all connections."""
        for program in self._programs:
            program.writer.close()


@pytest.fixture
async def served(tmp_path: Path, store: StoreService) -> AsyncIterator[Served]:
    path = f"{tmp_path}/store.sock"
    async with serving(store, path), channel_to(path) as channel:
        port = TCPStorePort(client_of(channel), max_connections=3)
        served = Served(port, await port.start())
        port.serve(1)
        yield served
        await port.stop()
        served.close()


async def until_waiting(store: StoreService, count: int) -> None:
    """Wait until `count` requests wait in the service."""

    def waiting() -> int:
        return store._runs[RUN].waits.waiters if RUN in store._runs else 0

    await until(lambda: waiting() == count, f"{count} requests wait")


async def test_queries_in_any_pieces(served: Served) -> None:
    program = await served.connect(b"")
    for byte in VALIDATE + SET + GET:
        program.writer.write(bytes([byte]))
        await program.writer.drain()
    await program.call(b"", text(b"v"))


async def test_queries_that_come_at_once_are_answered_in_their_order(served: Served) -> None:
    program = await served.connect()
    await program.call(SET + GET + SET + GET + WAIT, 2 * text(b"v") + b"\0")


async def test_a_wait_is_cancelled(served: Served, store: StoreService) -> None:
    """This includes a wait that has just ended: the client then reads two replies."""
    program = await served.connect()
    program.writer.write(WAIT)
    await until_waiting(store, 1)
    await program.call(CANCEL, b"\1")
    await until_waiting(store, 0)
    await program.call(SET + WAIT, b"\0")
    await program.call(CANCEL + GET, b"\1" + text(b"v"))


async def test_nothing_is_left_of_a_program_that_goes(served: Served, store: StoreService) -> None:
    """Its wait ends in the service; a value that it set before takes effect."""
    program = await served.connect()
    program.writer.write(SET.replace(b"/k", b"/l") + WAIT)
    await until_waiting(store, 1)
    program.writer.close()
    await until_waiting(store, 0)
    other = await served.connect(VALIDATE + SET)
    other.writer.write_eof()
    third = await served.connect()
    await third.call(WAIT, b"\0")
    await third.call(GET.replace(b"/k", b"/l"), text(b"v"))


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not begin as torch's TCPStore client does"),
        (b"\1" + VALIDATE[1:], "does not begin as torch's TCPStore client does"),
        (VALIDATE + b"\x13", "query 19 is unknown"),
        (VALIDATE + VALIDATE, "query 0 is unknown"),
        (VALIDATE + b"\3" + struct.pack("<Q", 8193), "of 8,193 bytes; at most 8,192 fit"),
        (VALIDATE + b"\1" + text(b"/k") + struct.pack("<Q", 2**63), "at most 4,177,920 fit"),
        (
            VALIDATE + b"\5" + struct.pack("<Q", 2**64 - 1),
            "18,446,744,073,709,551,615 keys; at most 131,072 fit",
        ),
        (VALIDATE + b"\5" + struct.pack("<Q", 600) + 600 * text(b"k" * 8_000), "bytes in sum"),
        (VALIDATE + b"\3" + text(b"\xff"), "a key is not UTF-8"),
        (VALIDATE + b"\3" + text(b"k" * 2_000), "a key has at most 1,024"),
        (VALIDATE + WAIT + SET, "a query came during a wait"),
    ],
)
async def test_bytes_that_no_client_sends_end_the_connection_alone(
    served: Served, caplog: pytest.LogCaptureFixture, sent: bytes, reason: str
) -> None:
    good = await served.connect()
    bad = await served.connect(sent)
    assert await bad.ended()
    assert reason in caplog.text
    await good.call(SET + GET, text(b"v"))


async def test_connections_are_bounded(served: Served) -> None:
    programs = [await served.connect() for _ in range(3)]
    for program in programs:
        await program.call(b"\x0d1234", b"1234")
    assert await (await served.connect()).ended()
    programs[0].writer.close()
    async with asyncio.timeout(PATIENCE):
        while await (again := await served.connect()).is_refused():
            pass
    await again.call(SET + GET, text(b"v"))


async def test_connections_of_a_round_end_with_it(served: Served, rounds: Rounds) -> None:
    """New connections use the keys of the next round."""
    old = await served.connect()
    await old.call(SET + GET, text(b"v"))
    rounds.of[RUN] = 2
    served.port.serve(2)
    assert await old.ended()
    new = await served.connect()
    await new.call(GET, text(b""))


async def test_a_wait_in_a_round_that_ends_does_not_hang(
    served: Served, store: StoreService, rounds: Rounds
) -> None:
    program = await served.connect(VALIDATE + WAIT)
    await until_waiting(store, 1)
    rounds.of[RUN] = 2
    store.forget_rounds_before(RUN, 2)
    assert await program.ended()


async def test_a_node_without_its_lease_can_not_write(served: Served, rounds: Rounds) -> None:
    program = await served.connect()

    def refuse(*lease: object) -> None:
        raise LeaseLost(RUN, "node", 1, None)

    rounds.check = refuse
    program.writer.write(SET)
    assert await program.ended()


# ---- another user of the host

_STRANGER = """
import encodings.idna, os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.sendall(bytes.fromhex(sys.argv[2]))
if sys.argv[3] == "wait":
    try:
        print(connection.recv(100))
    except ConnectionError:
        print(b"")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
@pytest.mark.parametrize("ending", ["wait", "close"])
async def test_another_user_is_refused(served: Served, ending: str) -> None:
    """This includes a user that closes the connection after the query: the kernel names root as owner of that."""
    for _ in range(1 if ending == "wait" else 20):
        found = await asyncio.to_thread(
            lambda: subprocess.run(
                [sys.executable, "-c", _STRANGER, str(served.number), (VALIDATE + SET + GET).hex(), ending],
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
        )
        assert found.stdout == ("b''\n" if ending == "wait" else ""), found.stderr
    program = await served.connect()
    await program.call(GET, text(b""))


@pytest.mark.parametrize("ended", ["", "shutdown", "close"])
def test_the_owner_of_a_connection(ended: str) -> None:
    """It is unknown once the program has closed it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, peer = server.accept()
        with accepted, client:
            assert owner_of(peer, accepted.getsockname()) == os.geteuid()
            if ended == "shutdown":
                client.shutdown(socket.SHUT_WR)
            elif ended:
                client.close()
            assert owner_of(peer, accepted.getsockname()) == (None if ended else os.geteuid())


def test_an_address_without_a_connection_has_no_owner() -> None:
    assert owner_of(("127.0.0.1", 1), ("127.0.0.1", 2)) is None
