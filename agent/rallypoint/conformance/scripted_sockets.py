"""The sockets of an agent, which play a script: connections with timers, and calls of the store, as they come."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from fcntl import fcntl
from pathlib import Path
from typing import Any

from rallypoint.agent.sockets.timers import MessageFrames, receive_message
from rallypoint.rpc.loop import Notifier
from rallypoint.timer.worker import wire
from rallypoint.timer.worker.table import MalformedTable, TableReader
from rallypoint.worker.store import MAX_PART_BYTES, PREFIX, encode_frame

# F_GET_SEALS of Linux; its seals against a change of the size, and against other seals.
_GET_SEALS, _SEALS = 1034, 0x7
# The first byte that is zero in a message of each kind.
_UNUSED = {1: 4, 2: 2, 3: 2, 4: 2, 5: 2, 6: 2}
_BACKLOG = 128


@dataclass(frozen=True)
class ObservedTimer:
    """A timer that the worker holds. Seconds; `since` is by CLOCK_MONOTONIC, 0 if the worker left it out."""

    scope: str
    after: float
    since: float
    signal: int


class ObservedConnection:
    """One connection to a timer socket; `mistakes`: the violations of the protocol so far, by rule."""

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
