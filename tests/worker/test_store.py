"""A worker's store, all the way: worker, agent's socket, gRPC, service. Binary stays binary, waits end by a push,
threads and forks don't disturb each other, and a restart of the service is only a pause."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from rallypoint.agent.sockets.store import StoreSocket
from rallypoint.rendezvous.base import limits
from rallypoint.rendezvous.store.service import StoreService
from rallypoint.worker import store as worker_store
from rallypoint.worker.store import (
    MAX_VALUE_BYTES,
    RoundOverError,
    Store,
    StoreRequestError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from rendezvous.store.store_fakes import (
    RUN,
    Rounds,
    TestJournal,
    agent_socket,
    channel_to,
    client_of,
    open_store,
    serving,
)
from support.waiting import PATIENCE

in_thread = asyncio.to_thread


@dataclass
class Agent:
    """The agent and the service behind the worker's socket."""

    path: str
    store: StoreService
    rounds: Rounds
    journal: TestJournal

    def environment(self, round: int = 1) -> dict[str, str]:
        return os.environ | {"RALLYPOINT_STORE_SOCKET": self.path, "RALLYPOINT_ROUND": str(round)}


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Agent]:
    journal, rounds = TestJournal(), Rounds()
    service = open_store(journal, rounds)
    async with agent_socket(tmp_path, service) as path:
        yield Agent(path, service, rounds, journal)


@pytest.fixture
def store(agent: Agent) -> Iterator[Store]:
    with Store.from_environment(environment=agent.environment()) as store:
        yield store


async def run_worker(agent: Agent, script: str) -> str:
    """Run a worker's program to its end; return its output."""
    worker = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "error",
        "-c",
        textwrap.dedent(script),
        env=agent.environment(),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await worker.communicate()
    assert worker.returncode == 0
    return output.decode()


async def test_every_call_in_a_worker_process_without_grpc(agent: Agent) -> None:
    output = await run_worker(
        agent,
        r"""
        import sys
        from rallypoint.worker.store import Store
        store = Store.from_environment()
        binary = bytes(range(256)) * 5
        store.set("binary", binary)
        assert store.get("binary") == binary
        store.set("text", "é")
        assert store.get("text", 0) == "é".encode()
        store.set("empty", bytearray())
        assert store.get("empty") == b""
        assert store.add("n", 40) == 40 and store.add("n", 2) == 42 and store.get("n") == b"42"
        assert store.compare_set("c", "", "1") == b"1"
        assert store.compare_set("c", b"0", b"2") == b"1"
        assert store.compare_set("c", b"1", b"2") == b"2"
        assert store.compare_set("absent", b"old", b"new") == b"old"
        assert not store.check(["absent"])
        store.wait(["c", "n"], timeout=0)
        assert store.check(["c", "n"])
        assert store.keys() == ["binary", "c", "empty", "n", "text"]
        assert store.keys("t") == ["text"]
        assert store.delete("c") is True and store.delete("c") is False
        with Store.from_environment(scope="run") as run:
            assert run.keys() == []
            run.set("kept", "1")
        assert not [name for name in sys.modules if name.startswith(("grpc", "google", "asyncio"))]
        store.close()
        print("done")
        """,
    )
    assert output == "done\n"
    assert (RUN, 0, "kept") in agent.journal.rows
    assert agent.journal.rows[RUN, 1, "n"] == b"42"


async def test_a_reader_is_woken_by_the_write(agent: Agent, store: Store) -> None:
    """It does not delay another thread of the same store."""
    waiting = asyncio.ensure_future(in_thread(store.get, "k"))
    both = asyncio.ensure_future(in_thread(store.wait, ["k", "j"]))
    await in_thread(store.set, "j", b"")
    assert not waiting.done()
    await in_thread(store.set, "k", b"1")
    assert await waiting == b"1"
    await both


async def test_waits_time_out_with_the_missing_keys(store: Store) -> None:
    with pytest.raises(
        StoreTimeoutError, match=r"key 'k' was not set in run 'digits' within 0(\.01|\.00\d)? s"
    ):
        await in_thread(store.get, "k", 0.01)
    with pytest.raises(TimeoutError, match="2 keys"):
        await in_thread(store.wait, ["k", "j"], 0)
    assert await in_thread(store.add, "n", 1) == 1, "the connection is as good as before"


async def test_a_worker_of_a_round_that_is_over_gets_an_error(agent: Agent, store: Store) -> None:
    waiting = asyncio.ensure_future(in_thread(store.get, "k"))
    await in_thread(store.set, "other", b"")
    agent.rounds.of[RUN] = 4
    agent.store.forget_rounds_before(RUN, 4)
    with pytest.raises(RoundOverError, match="round 1 of run 'digits' is over") as told:
        await waiting
    assert told.value.current_round == 4
    with Store(agent.path, round=1, scope="run") as run, pytest.raises(RoundOverError):
        await in_thread(run.set, "k", b"")
    with Store(agent.path, round=4, scope="run") as run:
        await in_thread(run.set, "k", b"")


async def test_a_forked_child_opens_its_own_connection(agent: Agent) -> None:
    """Parent and child, and a thread of the parent that waits meanwhile, each get their own answers."""
    output = await run_worker(
        agent,
        """
        import os, threading, warnings
        from rallypoint.worker.store import Store
        store = Store.from_environment()
        store.set("parent", b"0")
        answers = []
        waiter = threading.Thread(target=lambda: answers.append(store.get("told")))
        waiter.start()
        children = []
        for number in range(4):
            with warnings.catch_warnings():  # of forking with threads, in Python 3.12 and later
                warnings.simplefilter("ignore")
                child = os.fork()
            if child == 0:
                ok = all(store.get("parent") == b"0" for _ in range(20))
                sums = [store.add("n", 1) for _ in range(20)]
                os._exit(0 if ok and sums == sorted(set(sums)) else 1)
            children.append(child)
            assert store.get("parent") == b"0"
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
        assert store.add("n", 0) == 80
        store.set("told", b"x")
        waiter.join()
        store.close()
        print(answers)
        """,
    )
    assert output == "[b'x']\n"


async def test_threads_share_a_store(agent: Agent, store: Store) -> None:
    """Concurrent calls mix nothing up, and there are as many connections as concurrent calls, not more."""
    sums: list[int] = []
    begin = threading.Barrier(8)

    def work(number: int) -> None:
        begin.wait(PATIENCE)
        for turn in range(20):
            store.set(f"{number}", f"{number}/{turn}")
            assert store.get(f"{number}") == f"{number}/{turn}".encode()
            sums.append(store.add("n", 1))

    with ThreadPoolExecutor(8) as threads:
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(threads, work, number) for number in range(8)))
    assert sorted(sums) == list(range(1, 161))
    assert len(store._connections._idle) <= 8


async def test_a_restart_of_the_service_is_only_a_pause(tmp_path: Path) -> None:
    """A wait, a set and an addition under way when the service dies all end as if nothing had happened."""
    journal, service, path = TestJournal(), f"{tmp_path}/store.sock", tmp_path / "agent.sock"
    async with channel_to(service) as channel:
        sock = StoreSocket(path, client_of(channel))
        await sock.start()
        try:
            with Store(str(path), round=1) as store:
                async with serving(open_store(journal), service):
                    waiting = asyncio.ensure_future(in_thread(store.get, "k"))
                    await in_thread(store.add, "n", 1)
                    journal.hold_after()
                    adding = asyncio.ensure_future(in_thread(store.add, "n", 1))
                    await journal.until_held()
                    setting = asyncio.ensure_future(in_thread(store.set, "k", b"1"))
                restarted = TestJournal()
                restarted.rows = dict(journal.rows)
                journal.fails_with = OSError("dead")
                journal.release()
                async with serving(open_store(restarted), service):
                    assert await adding == 2
                    await setting
                    assert await waiting == b"1"
                    assert await in_thread(store.get, "n") == b"2"
        finally:
            await sock.stop()


async def test_keys_come_page_by_page(agent: Agent, store: Store) -> None:
    names = [f"{number:04}" for number in range(1_001)]
    async with channel_to(f"{Path(agent.path).parent}/store.sock") as channel:
        client = client_of(channel)
        await asyncio.gather(*(client.set(name, b"", round=1) for name in names))
    assert await in_thread(store.keys) == names


async def test_the_largest_value_and_one_byte_more(store: Store) -> None:
    value = os.urandom(1024) * (MAX_VALUE_BYTES // 1024)
    await in_thread(store.set, "k", value)
    assert await in_thread(store.get, "k") == value
    with pytest.raises(ValueError, match="'k' has 4,177,921 bytes; at most 4,177,920 fit"):
        store.set("k", value + b"x")
    with pytest.raises(ValueError, match="at most"):
        store.compare_set("k", value, b"x")
    assert limits.MAX_VALUE_BYTES == MAX_VALUE_BYTES


async def test_refusals_have_a_clear_reason(store: Store) -> None:
    await in_thread(store.set, "text", b"text")
    for call, reason, message in [
        (lambda: store.add("text", 1), "NOT_AN_INTEGER", "holds b'text'"),
        (lambda: store.set("", b""), "INVALID_ARGUMENT", "key: is empty"),
        (lambda: store.set("\ud800", b""), "MALFORMED_CALL", "cannot be encoded as UTF-8"),
        (lambda: store.add("n", 2**63), "MALFORMED_CALL", "64 bits"),
        (lambda: store.wait([]), "INVALID_ARGUMENT", "0 keys"),
    ]:
        with pytest.raises(StoreRequestError, match=message) as refused:
            await in_thread(call)
        assert refused.value.reason == reason
    assert await in_thread(store.get, "text") == b"text", "the connection is as good as before"


def test_wrong_arguments_never_reach_the_agent() -> None:
    store = Store("/nowhere", round=1)
    with pytest.raises(TypeError, match="expected a list of keys"):
        store.wait("key")
    with pytest.raises(TypeError):
        store.set("k", 5)  # type: ignore[arg-type]
    for timeout in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout is"):
            store.get("k", timeout)
    with pytest.raises(ValueError, match="4,194,304"):
        store.check(["k" * 1000] * 5_000)
    with pytest.raises(ValueError, match="scope"):
        Store("/nowhere", round=1, scope="node")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="round is 0"):
        Store("/nowhere", round=0)


def test_outside_of_an_agent_the_error_has_a_remedy() -> None:
    with pytest.raises(StoreUnavailableError, match=r"RALLYPOINT_STORE_SOCKET is not set.*rallypoint run"):
        Store.from_environment(environment={})
    with pytest.raises(StoreUnavailableError, match="RALLYPOINT_ROUND is not set"):
        Store.from_environment(environment={"RALLYPOINT_STORE_SOCKET": "/s"})
    with pytest.raises(StoreUnavailableError, match="'x'; expected a number"):
        Store.from_environment(environment={"RALLYPOINT_STORE_SOCKET": "/s", "RALLYPOINT_ROUND": "x"})


def test_an_agent_that_is_gone_is_named(tmp_path: Path) -> None:
    store = Store(f"{tmp_path}/agent.sock", round=1)
    with pytest.raises(StoreUnavailableError, match=r"can't reach the agent at .*agent\.sock \(No such file"):
        store.get("k")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/agent.sock")
        listener.listen()

        def hang_up() -> None:
            listener.accept()[0].close()

        agent = threading.Thread(target=hang_up)
        agent.start()
        with pytest.raises(StoreUnavailableError, match="lost the agent"):
            store.get("k")
        agent.join()
        assert not store._connections._idle


def test_a_busy_agent_is_waited_for(tmp_path: Path) -> None:
    """With no room among the connections to accept, a worker waits for room, as all ranks connect at once."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(f"{tmp_path}/agent.sock")
        listener.listen(0)
        first.connect(f"{tmp_path}/agent.sock")
        with Store(f"{tmp_path}/agent.sock", round=1) as store, ThreadPoolExecutor(1) as thread:
            getting = thread.submit(store.get, "k")
            with socket.socket(socket.AF_UNIX) as probe:
                # The worker's connection has no room either; its wait is all that can be observed.
                probe.setblocking(False)
                with pytest.raises(BlockingIOError):
                    probe.connect(f"{tmp_path}/agent.sock")
            assert not getting.done()
            listener.accept()[0].close()
            with listener.accept()[0] as connection:
                connection.sendall(worker_store.encode_frame({}, b"1"))
                assert getting.result() == b"1"


async def test_one_call_too_many_may_be_repeated(tmp_path: Path) -> None:
    """The agent closes its connection, which is not used again."""
    async with agent_socket(tmp_path, open_store(TestJournal()), max_connections=1) as path:
        with Store(path, round=1) as first, Store(path, round=1) as second:
            await in_thread(first.set, "k", b"1")
            with pytest.raises(StoreRequestError, match="1 concurrent calls") as refused:
                await in_thread(second.get, "k")
            assert refused.value.reason == "TOO_MANY_CONNECTIONS"
            assert not second._connections._idle
            assert await in_thread(first.get, "k") == b"1"


def test_an_agent_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_store, "_AGENT_GRACE", 0.02)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/agent.sock")
        listener.listen()
        with pytest.raises(StoreUnavailableError, match="gave no answer in time"):
            Store(f"{tmp_path}/agent.sock", round=1).get("k", 0)
