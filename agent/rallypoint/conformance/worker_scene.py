"""One play of a scenario for workers: the worker, its agent's sockets, which play a script, and the checks of rules."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from fcntl import fcntl
from functools import partial
from pathlib import Path
from typing import Any

from rallypoint.agent.sockets.timers import MessageFrames, receive_message
from rallypoint.conformance.checks import Checks, ClientFailed, Scenario, register_in
from rallypoint.conformance.client import TestedProcess
from rallypoint.rpc.loop import Notifier
from rallypoint.timer.worker import wire
from rallypoint.timer.worker.table import MalformedTable, TableReader
from rallypoint.worker.store import MAX_PART_BYTES, PREFIX, encode_frame

ROUND = 7
"""RALLYPOINT_ROUND of the worker."""

# F_GET_SEALS of Linux; its seals against a change of the size, and against other seals.
_GET_SEALS, _SEALS = 1034, 0x7
# The first byte that is zero in a message of each kind.
_UNUSED = {1: 4, 2: 2, 3: 2, 4: 2, 5: 2, 6: 2}
_BACKLOG = 128


class NotOffered(Exception):
    """The worker does not offer a step: the scenario ends without a finding."""


@dataclass(frozen=True)
class ObservedTimer:
    """A timer that the worker holds. Seconds; `since` is by CLOCK_MONOTONIC, 0 if the worker left it out."""

    scope: str
    after: float
    since: float
    signal: int


class ObservedConnection:
    """One connection to a timer socket.

    Attributes:
        messages: All messages so far.
        mistakes: The violations of the protocol so far, by rule.
        table: The worker's table.
        over: True once the worker has closed it.
    """

    def __init__(self, connected: socket.socket, changed: Notifier) -> None:
        connected.setblocking(False)
        self.messages: list[wire.Message] = []
        self.mistakes: dict[str, str] = {}
        self.table: TableReader | None = None
        self.over = False
        self._socket = connected
        self._frames = MessageFrames() if connected.type == socket.SOCK_STREAM else None
        self._held: dict[int, ObservedTimer] = {}
        self._slots: list[ObservedTimer] = []
        self._changed = changed
        self.resume()

    def pause(self) -> None:
        """Read nothing until `resume`."""
        asyncio.get_running_loop().remove_reader(self._socket)

    def resume(self) -> None:
        """Read again, and go on."""
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def close(self) -> None:
        """Close it."""
        self.pause()
        self._socket.close()
        self.over = True

    @property
    def timers(self) -> list[ObservedTimer]:
        """The timers that the agent knows of."""
        return [*self._held.values(), *self._slots]

    def read_table(self) -> None:
        """Read the table, as an agent does after a message, and when it polls."""
        if self.table is not None:
            self._slots = [
                ObservedTimer(
                    each.scope.decode(errors="replace"), each.after / 1e9, each.since / 1e9, each.signal
                )
                for each in self.table.slots()
            ]

    def _read(self) -> None:
        descriptors: list[int] = []
        try:
            message, descriptors = receive_message(self._socket, self._frames)
            if message:
                self._take(message, descriptors)
            else:
                self.close()
        except BlockingIOError:
            return
        except (wire.MalformedMessage, OSError) as error:
            if isinstance(error, wire.MalformedMessage):
                self.mistakes["T02"] = str(error)
            self.close()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._changed.notify()

    def _take(self, message: bytes, descriptors: list[int]) -> None:
        decoded = wire.decode(message)
        if any(message[_UNUSED.get(message[0], 8) : 8]):
            raise wire.MalformedMessage(f"bytes that are not zero in {message[:8].hex(' ')}")
        match decoded:
            case wire.Acquire(token, since, after, scope, signal):
                self._held[token] = ObservedTimer(scope, after, since, signal)
            case wire.Release(token):
                self._held.pop(token, None)
            case wire.Clear():
                self._held.clear()
            case wire.TableMessage():
                if mistake := self._open_table(descriptors):
                    self.mistakes["T15"] = mistake
        self.messages.append(decoded)
        self.read_table()

    def _open_table(self, descriptors: list[int]) -> str:
        """Open the table that came with a message; return its mistake, if any."""
        if self.messages or len(descriptors) != 1:
            return f"message {len(self.messages) + 1} of the connection, with {len(descriptors)} descriptors"
        try:
            if (seals := fcntl(descriptors[0], _GET_SEALS)) & _SEALS != _SEALS:
                return f"memory with the seals {seals}"
            view = memoryview(mmap.mmap(descriptors[0], 0))
            self.table = TableReader(view)
        except (MalformedTable, OSError, ValueError) as error:
            return str(error)
        return "word 1 is not 0" if any(view[8:16]) else ""


class ObservedCall:
    """A call of the worker."""

    def __init__(
        self, header: dict[str, Any], body: bytes, connection: int, writer: asyncio.StreamWriter
    ) -> None:
        self.header, self.body, self.connection = header, body, connection
        self.writer = writer

    def reply(self, header: dict[str, Any] | None = None, body: bytes = b"") -> None:
        """Send a reply."""
        self.writer.write(encode_frame(header or {}, body))

    def fail(self, code: str, reason: str, **more: object) -> None:
        """Send a reply that is an error."""
        self.reply({"error": {"code": code, "reason": reason, "message": "scripted", **more}})


class ScriptedSockets:
    """The sockets of an agent.

    Attributes:
        environment: The variables with their paths.
        timers: All connections to the timer sockets so far.
        calls: All calls of the store so far.
        ended: The numbers of the connections to the store socket that the worker has closed.
        mistake: The violation of S01, if any.
        changed: Notified of connections, messages, calls and ends.
        refusing: True to close new connections to the timer sockets at once.
        reading: Clear to read no call from the store socket.
    """

    def __init__(self, folder: Path) -> None:
        """Set up; `start` listens."""
        names = {"STORE": "store", "TIMER": "timer", "TIMER_STREAM": "stream"}
        self.environment = {f"RALLYPOINT_{name}_SOCKET": str(folder / path) for name, path in names.items()}
        self.timers: list[ObservedConnection] = []
        self.calls: list[ObservedCall] = []
        self.ended: set[int] = set()
        self.mistake = ""
        self.changed = Notifier()
        self.refusing = False
        self.reading = asyncio.Event()
        self.reading.set()
        self._connections = 0
        self._serving: set[asyncio.Task[None]] = set()
        self._listeners: list[socket.socket] = []

    def start(self) -> None:
        """Listen at all sockets."""
        kinds = {
            "TIMER": socket.SOCK_SEQPACKET,
            "TIMER_STREAM": socket.SOCK_STREAM,
            "STORE": socket.SOCK_STREAM,
        }
        for name, kind in kinds.items():
            listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
            listener.bind(self.environment[f"RALLYPOINT_{name}_SOCKET"])
            listener.listen(_BACKLOG)
            accept = self._accept_call if name == "STORE" else self._accept_timers
            asyncio.get_running_loop().add_reader(listener, accept, listener)
            self._listeners.append(listener)

    async def stop(self) -> None:
        """Close all sockets and connections; the paths are free again."""
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
            os.unlink(listener.getsockname())
            listener.close()
        self._listeners.clear()
        for connection in self.timers:
            if not connection.over:
                connection.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _accept_timers(self, listener: socket.socket) -> None:
        with suppress(BlockingIOError):
            connection = ObservedConnection(listener.accept()[0], self.changed)
            self.timers.append(connection)
            if self.refusing:
                connection.close()
            self.changed.notify()

    def _accept_call(self, listener: socket.socket) -> None:
        with suppress(BlockingIOError):
            connected, _ = listener.accept()
            connected.setblocking(False)
            self._connections += 1
            task = asyncio.get_running_loop().create_task(self._serve(connected, self._connections))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, connected: socket.socket, number: int) -> None:
        """Read the calls of one connection."""
        await self.reading.wait()
        reader, writer = await asyncio.open_unix_connection(sock=connected)
        try:
            while True:
                header_size, body_size = PREFIX.unpack(await reader.readexactly(PREFIX.size))
                if not 0 < header_size <= MAX_PART_BYTES or body_size > MAX_PART_BYTES:
                    self.mistake = f"a frame of {header_size:,} + {body_size:,} bytes"
                    break
                text = await reader.readexactly(header_size)
                body = await reader.readexactly(body_size)
                try:
                    header = json.loads(text.decode())
                except ValueError as error:
                    header = str(error)
                if not isinstance(header, dict):
                    self.mistake = f"a header that is no JSON object in UTF-8: {header}"
                    break
                self.calls.append(ObservedCall(header, body, number, writer))
                self.changed.notify()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self.ended.add(number)
            writer.close()
            self.changed.notify()


class WorkerScene(Checks):
    """A scenario that is played.

    Attributes:
        sockets: The agent's sockets.
    """

    def __init__(self, sockets: ScriptedSockets, client: TestedProcess, timeout: float) -> None:
        """`timeout`: seconds to wait for each expected action of the worker."""
        super().__init__(client, sockets.changed, timeout)
        self.sockets = sockets
        self._calls = 0
        self._results: list[list[str]] = []
        self._steps: list[str] = []
        self._process: asyncio.subprocess.Process
        self._reader: asyncio.Task[None]

    async def begin(self) -> None:
        """Start the worker; wait until it carries out steps.

        Raises:
            ClientFailed: It ended before, or was silent.
        """
        own = ("RALLYPOINT_", "TORCHELASTIC_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        run = {"RALLYPOINT_RUN_ID": "conformance", "RALLYPOINT_NODE": "node", "RALLYPOINT_ROUND": str(ROUND)}
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        environment = {**inherited, **run, **ranks, **self.sockets.environment}
        self._process = await self.client.launch(environment, pipes=True)
        self._reader = asyncio.get_running_loop().create_task(self._read())
        self.do("hello")
        ready = await self.changed.until(lambda: bool(self._results or self._ended), self.timeout)
        if not ready or not self._results:
            ending = "was silent" if not ready else f"ended with exit code {await self._process.wait()}"
            raise ClientFailed(
                f"the worker {ending} before it had a result for a step; its last lines: {self.client.last_lines}"
            )
        self._results.clear()
        self._steps.clear()

    @property
    def _ended(self) -> bool:
        return self._reader.done()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                self._results.append(line.decode(errors="replace").rstrip("\n").split("\t"))
                self.changed.notify()
        finally:
            self.changed.notify()

    def state(self) -> str:
        """Describe the worker's present state, for people."""
        timers = [each for connection in self.sockets.timers for each in connection.timers]
        return (
            f"{len(self.sockets.timers)} timer connections, {len(timers)} timers, {len(self.sockets.calls)} calls; "
            f"{len(self._steps) - len(self._results)} steps without a result, the last: {self._steps[-1:]!r}; "
            f"last lines: {self.client.last_lines}"
        )

    # ---- Steps

    def do(self, *fields: object) -> None:
        """Send a step to the worker."""
        line = "\t".join(map(str, fields))
        self._steps.append(line)
        assert self._process.stdin is not None
        if (
            not self._process.stdin.is_closing()
        ):  # a worker that has ended is found when its result is awaited
            self._process.stdin.write(f"{line}\n".encode())

    async def results(self, rule: str) -> list[list[str]]:
        """Wait for the results of all steps since the last call of this, and return them.

        Raises:
            NotOffered: The worker does not offer one of the steps.
        """
        steps, results = self._steps, self._results
        await self.until(rule, lambda: len(results) >= len(steps), f"a result for each of {len(steps)} steps")
        for step, result in zip(steps, results, strict=False):
            if result == ["unsupported"]:
                raise NotOffered(f"the worker does not offer {step.split()[0]}")
        self._steps, self._results = [], []
        return results

    async def result(self, rule: str, expected: str) -> None:
        """Wait for the result of the step, which must be this, up to a message of an error."""
        results = await self.results(rule)
        seen = "\t".join(results[-1])
        same = seen == expected or (expected.startswith("error") and seen.startswith(f"{expected}\t"))
        self.check(rule, same, f"the result {expected!r} of the step", repr(seen))

    async def step(self, rule: str, *fields: object) -> None:
        """Have a step carried out that succeeds without a value."""
        self.do(*fields)
        await self.result(rule, "ok")

    # ---- Timers

    def checked_timers(self) -> list[ObservedTimer]:
        """Return the timers of all open connections, after a check of all messages so far."""
        for connection in self.sockets.timers:
            for rule, mistake in connection.mistakes.items():
                self.check(rule, False, "messages as the page describes them", mistake)
        return [
            each for connection in self.sockets.timers if not connection.over for each in connection.timers
        ]

    async def holds(self, rule: str, *scopes: str) -> list[ObservedTimer]:
        """Wait until the agent knows of timers with exactly these scopes; return them, in the order of their scopes."""
        await self.until(
            rule,
            lambda: sorted(each.scope for each in self.checked_timers()) == sorted(scopes),
            f"timers {sorted(scopes)}",
        )
        self.check("T02", True, "", "")
        return sorted(self.checked_timers(), key=lambda each: each.scope)

    def connection(self) -> ObservedConnection:
        """Return the last connection to a timer socket."""
        return self.sockets.timers[-1]

    async def reconnected(self, rule: str, former: ObservedConnection | None) -> ObservedConnection:
        """Have the worker report progress until it opens another connection; return that."""
        step, end = 0, self.now + self.timeout
        while not (timers := self.sockets.timers) or timers[-1] is former:
            step += 1
            await self.step("T09", "progress", 1_000 + step)
            self.check(rule, self.now < end, "another connection to the timer socket", self.state())
            await self.changed.since(self.changed.count, 0.1)
        self.check(rule, True, "", "")
        return self.connection()

    # ---- Calls

    async def call(self, rule: str, op: str, *fields: object) -> ObservedCall:
        """Have a step of the store begun; return its call, which the scenario answers.

        Raises:
            NotOffered: The worker does not offer the step.
        """
        self.do(op, *fields)
        return await self.next_call(rule, op)

    async def next_call(self, rule: str, op: str) -> ObservedCall:
        """Return the next call."""

        def come() -> bool:
            self.check(
                "S01", not self.sockets.mistake, "a frame as the page describes it", self.sockets.mistake
            )
            return len(self.sockets.calls) > self._calls or len(self._results) >= len(self._steps)

        await self.until(rule, come, f"a call `{op}`")
        if len(self.sockets.calls) <= self._calls:
            results = await self.results(rule)
            self.check(rule, False, f"a call `{op}`", f"none, and the result {results[-1]}")
        call = self.sockets.calls[self._calls]
        self._calls += 1
        seen = call.header
        self.check(rule, seen.get("op") == op, f"a call `{op}`", str(seen.get("op")))
        whole = type(seen.get("round")) is int and seen["round"] in (0, ROUND)
        timeout = seen.get("timeout")
        number = isinstance(timeout, int | float) and not isinstance(timeout, bool) and timeout >= 0
        self.check(
            "S02", whole and number, f"`round` {ROUND} or 0, and `timeout` in seconds", str(seen)[:200]
        )
        if op in ("set", "add", "compare_set", "delete"):
            self.check("S03", seen.get("writer_round") == ROUND, f"`writer_round` {ROUND}", str(seen)[:200])
        return call

    def has(self, rule: str, call: ObservedCall, body: bytes = b"", **fields: object) -> None:
        """Check header fields and the body of a call."""
        seen = {name: call.header.get(name) for name in fields}
        same = seen == fields and {name: type(seen[name]) for name in seen} == {
            n: type(v) for n, v in fields.items()
        }
        self.check(rule, same, str(fields), str(seen))
        shown = f"a body of {len(call.body):,} bytes: {call.body[:20].hex()}"
        self.check(rule, call.body == body, f"a body of {len(body):,} bytes: {body[:20].hex()}", shown)


@asynccontextmanager
async def open_worker_scene(
    words: list[str], folder: Path, name: str, timeout: float
) -> AsyncIterator[WorkerScene]:
    """Open a scene for one scenario, with a worker that waits for its first step: see `Kit`."""
    worker = TestedProcess(words, folder)
    sockets = ScriptedSockets(folder)
    scene = WorkerScene(sockets, worker, timeout)
    try:
        sockets.start()
        await scene.begin()
        yield scene
    finally:
        await sockets.stop()
        await worker.kill()


def monotonic() -> float:
    """Return CLOCK_MONOTONIC, seconds."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


WORKER_SCENARIOS: dict[str, Scenario] = {}
"""All scenarios for workers by name, in the order of their files; `report` imports these."""

worker_scenario = partial(register_in, WORKER_SCENARIOS)
"""Register a function as a scenario for workers: see `register_in`."""
