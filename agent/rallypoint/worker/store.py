"""The run's key-value store for workers: small data that they exchange.

A worker talks to its agent over a Unix socket, and the agent to the store service; docs/store-socket.md describes the
protocol. No gRPC is loaded. While the service restarts, calls only take longer.

    store = Store.from_environment()
    store.set(f"address/{rank}", "10.0.0.7:4000")
    peers = [store.get(f"address/{peer}") for peer in range(world_size)]
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Union

DEFAULT_TIMEOUT = 300.0
"""Default time limit of a call in seconds; long enough for a restart of the service."""

MAX_VALUE_BYTES = 4 * 1024 * 1024 - 16 * 1024
"""Size limit of a value in bytes; for `compare_set`, of both values together."""

MAX_PART_BYTES = 4 * 1024 * 1024
"""Size limit in bytes of a frame's header, and of its body."""

PREFIX = struct.Struct("!II")
"""Prefix of a frame: the lengths of its header and of its body."""

# Seconds. The agent replies within a call's timeout and a little more, unless it hangs.
_AGENT_GRACE = 10.0

Value = Union[bytes, bytearray, memoryview, str]
Header = dict[str, Any]


class StoreError(Exception):
    """A call to the store failed."""


class StoreTimeoutError(StoreError, TimeoutError):
    """Keys were not set in time."""


class RoundOverError(StoreError):
    """The worker's round is over: other workers continue without it, and it should exit.

    Attributes:
        current_round: The present round of the run; None if unknown.
    """

    def __init__(self, message: str, current_round: int | None = None) -> None:
        super().__init__(message)
        self.current_round = current_round


class StoreUnavailableError(StoreError, ConnectionError):
    """The agent or the store service did not reply. It is unknown whether a write took effect."""


class StoreRequestError(StoreError):
    """The store refused the call; a repetition would not help.

    Attributes:
        reason: Reason for programs: RUN_STORE_FULL, NOT_AN_INTEGER, … (store_service.proto has the list).
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def encode_frame(header: Mapping[str, object], body: bytes) -> bytes:
    """Return the bytes of a frame; the header is JSON, the body is raw.

    Raises:
        ValueError: The header is too long.
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > MAX_PART_BYTES:
        raise ValueError(f"the call's keys have {len(text):,} bytes together; at most {MAX_PART_BYTES:,} fit")
    return PREFIX.pack(len(text), len(body)) + text + body


class Store:
    """The store of the worker's run: of the worker's round (`scope="round"`) or of all rounds ("run").

    Keys of a round are deleted when the next round begins; keys of the run stay. A worker whose round is over can
    write to neither, and gets RoundOverError.

    All methods are thread-safe, and a waiting call blocks no other: each concurrent call has its own connection. A
    forked child opens new connections. Keys are strings of 1 to 1,024 bytes of UTF-8; values are bytes, and strings
    are stored as UTF-8. Every method may raise StoreError or one of its subclasses.
    """

    def __init__(
        self,
        path: str,
        *,
        round: int,
        scope: Literal["round", "run"] = "round",
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        """Make a store; it connects on first use.

        Args:
            path: The agent's socket.
            round: The worker's round; at least 1.
            scope: "round" or "run".
            timeout: Time limit in seconds of calls without their own timeout; 0 to 86,400.
        """
        if scope not in ("round", "run"):
            raise ValueError(f'scope is {scope!r}; expected "round" or "run"')
        if round < 1:
            raise ValueError(f"round is {round}; expected the worker's round, at least 1")
        self._path = path
        self._round = round
        self._space = round if scope == "round" else 0
        self._timeout = _seconds(timeout)
        self._connections = _Connections()

    @classmethod
    def from_environment(
        cls,
        *,
        scope: Literal["round", "run"] = "round",
        timeout: float = DEFAULT_TIMEOUT,
        environment: Mapping[str, str] = os.environ,
    ) -> Store:
        """Make the store of this worker, from the variables that its agent has set.

        Raises:
            StoreUnavailableError: No agent has started this process.
        """
        path, round = environment.get("RALLYPOINT_STORE_SOCKET"), environment.get("RALLYPOINT_ROUND")
        if not path or not round:
            missing = "RALLYPOINT_ROUND" if path else "RALLYPOINT_STORE_SOCKET"
            raise StoreUnavailableError(
                f"{missing} is not set: only a worker that a Rallypoint agent started has a store; "
                "start the program with `rallypoint run`"
            )
        if not (round.isascii() and round.isdigit()):
            raise StoreUnavailableError(f"RALLYPOINT_ROUND is {round!r}; expected a number")
        return cls(path, round=int(round), scope=scope, timeout=timeout)

    def set(self, key: str, value: Value) -> None:
        """Store a value, and replace an existing one. It is durable when this returns."""
        self._call({"op": "set", "key": key}, _bytes(value))

    def get(self, key: str, timeout: float = DEFAULT_TIMEOUT) -> bytes:
        """Return the value of a key; wait until the key is set.

        Args:
            timeout: Longest wait in seconds; 0: no wait.

        Raises:
            StoreTimeoutError: The key was not set in time.
        """
        return self._call({"op": "get", "key": key}, timeout=timeout)[1]

    def add(self, key: str, amount: int) -> int:
        """Add to a 64-bit integer, 0 if the key is absent; return the sum.

        The amount is added exactly once, also across restarts of the service. The value is stored as decimal ASCII.
        """
        return int(self._call({"op": "add", "key": key, "amount": int(amount)})[0]["value"])

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Set a key to `desired` if its value is `expected`, or if it is absent and `expected` is empty.

        Returns:
            The value afterwards, as in torch's stores: `desired` if it was set. If the key is absent and stays so,
            because `expected` is not empty: `expected`.
        """
        before, after = _bytes(expected), _bytes(desired)
        header, value = self._call(
            {"op": "compare_set", "key": key, "expected_length": len(before)}, before + after
        )
        return value if header["exists"] else before

    def wait(self, keys: Sequence[str], timeout: float = DEFAULT_TIMEOUT) -> None:
        """Return when all keys are set.

        Args:
            keys: The keys; at least one.
            timeout: Longest wait in seconds; 0: no wait.

        Raises:
            StoreTimeoutError: Some were not set in time; the message names them.
        """
        self._call({"op": "wait", "keys": _keys(keys)}, timeout=timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all keys, at least one, are set now."""
        return bool(self._call({"op": "check", "keys": _keys(keys)})[0]["present"])

    def delete(self, key: str) -> bool:
        """Remove a key; return True if it was set."""
        return bool(self._call({"op": "delete", "key": key})[0]["deleted"])

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with `prefix`, in the order of their code points."""
        found: list[str] = []
        page = ""
        while True:
            header, body = self._call({"op": "keys", "prefix": prefix, "page": page})
            found += json.loads(body)
            page = header["next_page"]
            if not page:
                return found

    def close(self) -> None:
        """Close the idle connections. The store may be used again."""
        self._connections.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(
        self, header: Header, body: bytes = b"", *, timeout: float | None = None
    ) -> tuple[Header, bytes]:
        seconds = self._timeout if timeout is None else _seconds(timeout)
        if len(body) > MAX_VALUE_BYTES:
            raise ValueError(
                f"value of key {header['key']!r} has {len(body):,} bytes; at most {MAX_VALUE_BYTES:,} fit, "
                "split it over several keys"
            )
        header |= {"round": self._space, "writer_round": self._round, "timeout": seconds}
        frame = encode_frame(header, body)
        if self._connections.process != os.getpid():
            # A forked child: replies on the inherited connections belong to the parent.
            self._connections.close()
            self._connections = _Connections()
        deadline = time.monotonic() + seconds + _AGENT_GRACE
        with self._connections.one(self._path, deadline) as connection:
            answer, value = connection.call(frame, deadline)
        if "error" in answer:
            raise _error(answer["error"])
        return answer, value


class _Connections:
    """The idle connections of one process. A deque's append and pop need no lock, so a fork can't break it."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._idle: deque[_StoreConnection] = deque()

    @contextmanager
    def one(self, path: str, deadline: float) -> Iterator[_StoreConnection]:
        """Lend a connection for one call; after a failed call it is closed, because a late reply may follow."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = _StoreConnection(path, deadline)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        if connection.open:
            self._idle.append(connection)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()


class _StoreConnection:
    """One connection to the agent, with at most one call at a time."""

    def __init__(self, path: str, deadline: float) -> None:
        self.open = True
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Not settimeout: it makes the socket non-blocking, and connect then fails at once while the agent has many
            # connections to accept, instead of waiting.
            wait = max(1, int(deadline - time.monotonic()))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", wait, 0))
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise StoreUnavailableError(
                f"can't reach the agent at {path} ({error.strerror or error}); is it still running?"
            ) from None

    def call(self, frame: bytes, deadline: float) -> tuple[Header, bytes]:
        try:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            self._socket.sendall(frame)
            header_size, body_size = PREFIX.unpack(self._receive(PREFIX.size, deadline))
            header = json.loads(self._receive(header_size, deadline))
            body = self._receive(body_size, deadline)
            if header.get("last"):
                self.close()
            return header, body
        except TimeoutError:
            raise StoreUnavailableError(f"the agent at {self._path} gave no answer in time") from None
        except OSError as error:
            raise StoreUnavailableError(
                f"lost the agent at {self._path} ({error.strerror or error}); "
                "whether a write took effect is unknown"
            ) from None

    def close(self) -> None:
        self.open = False
        self._socket.close()

    def _receive(self, size: int, deadline: float) -> bytes:
        received = bytearray(size)
        view = memoryview(received)
        while view:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            count = self._socket.recv_into(view)
            if count == 0:
                raise ConnectionError("it closed the connection")
            view = view[count:]
        return bytes(received)


def _error(error: Mapping[str, Any]) -> StoreError:
    reason, message = error["reason"], error["message"]
    if reason == "KEY_WAIT_TIMED_OUT":
        return StoreTimeoutError(message)
    if reason in ("ROUND_OVER", "LEASE_LOST"):  # in both cases other workers continue without this one
        return RoundOverError(message, error.get("current_round"))
    if error["code"] == "UNAVAILABLE":
        return StoreUnavailableError(message)
    return StoreRequestError(message, reason)


def _bytes(value: Value) -> bytes:
    if isinstance(value, str):
        return value.encode()
    # Not bytes(value): for an integer n that makes n zeros.
    return value if isinstance(value, bytes) else bytes(memoryview(value))


def _keys(keys: Sequence[str]) -> list[str]:
    if isinstance(keys, str):
        raise TypeError(f"keys is the string {keys!r}; expected a list of keys")
    return list(keys)


def _seconds(timeout: float) -> float:
    if not 0 <= timeout <= 24 * 3600:
        raise ValueError(f"timeout is {timeout} s; expected 0 to 86,400 s")
    return float(timeout)
