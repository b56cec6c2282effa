"""A small worker that keeps every rule of docs/timer-socket.md and docs/store-socket.md; each bug makes it break one.

Usage: reference_worker.py packets|stream|table [BUG]
"""

from __future__ import annotations

import array
import fcntl
import json
import mmap
import os
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable, Sequence
from typing import Any

BUGS = {
    "connection-for-each-timer": ("packets", "T01"),
    "dirty-bytes": ("packets", "T02"),
    "scope-cut-in-bytes": ("packets", "T02"),
    "learned-without-flag": ("packets", "T02"),
    "no-frames": ("stream", "T02"),
    "little-endian-frames": ("stream", "T02"),
    "torn-frames": ("stream", "T02"),
    "timeout-in-milliseconds": ("packets", "T03"),
    "signal-by-default": ("stream", "T03"),
    "learned-with-timeout": ("packets", "T04"),
    "wall-clock": ("packets", "T05"),
    "scope-cut-short": ("packets", "T06"),
    "release-by-scope": ("packets", "T07"),
    "step-of-32-bits": ("packets", "T08"),
    "ends-with-the-agent": ("packets", "T09"),
    "ends-without-an-agent": ("stream", "T09"),
    "never-connects-again": ("packets", "T10"),
    "forgets-timers": ("packets", "T11"),
    "begins-timers-again": ("packets", "T11"),
    "repeats-ended-timers": ("stream", "T11"),
    "storm": ("packets", "T12"),
    "waits-at-each-change": ("packets", "T13"),
    "drops-changes": ("packets", "T14"),
    "unsealed": ("table", "T15"),
    "short-table": ("table", "T15"),
    "word-1-kept": ("table", "T15"),
    "no-look": ("table", "T16"),
    "look-flood": ("table", "T17"),
    "look-while-polled": ("table", "T17"),
    "little-endian-lengths": ("packets", "S01"),
    "header-in-utf-16": ("packets", "S01"),
    "unescaped-keys": ("packets", "S01"),
    "no-timeout": ("packets", "S02"),
    "round-as-text": ("packets", "S02"),
    "no-writer-round": ("packets", "S03"),
    "value-as-text": ("packets", "S04"),
    "amount-as-double": ("packets", "S05"),
    "length-of-both": ("packets", "S06"),
    "keys-as-text": ("packets", "S07"),
    "first-page-only": ("packets", "S08"),
    "keys-in-ascii": ("packets", "S09"),
    "connection-for-each-call": ("packets", "S10"),
    "closes-after-error": ("packets", "S10"),
    "one-recv": ("packets", "S11"),
    "one-send": ("packets", "S12"),
    "timeout-is-refused": ("packets", "S13"),
    "lease-lost-is-refused": ("packets", "S14"),
    "unknown-reason-is-refused": ("packets", "S15"),
    "strict-replies": ("packets", "S16"),
    "ignores-last": ("packets", "S17"),
    "repeats-calls": ("packets", "S18"),
    "no-second-store-connection": ("packets", "S19"),
    "impatient": ("packets", "S20"),
    "waits-for-ever": ("packets", "S21"),
    "keeps-silent-connection": ("packets", "S21"),
}
"""Each bug, the form of the timer socket that it uses, and the rule that it breaks."""

FORMS = ("packets", "stream", "table")

_FIRST, _LONGEST, _LIVED = 0.1, 5.0, 1.0  # seconds
_BYTES, _MAGIC = 409_664, 0x313074796C6C6172
_ADD_SEALS, _SEALS = 1033, 0x7

form, bug = "packets", ""
if __name__ == "__main__":
    form, bug = sys.argv[1], (sys.argv[2:] or [""])[0]
    assert form in FORMS
    assert not bug or BUGS[bug][0] == form, bug


class Timers:
    """Timers and progress, as messages or in a table."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[int, int, bytes]] = {}
        self.link: socket.socket | None = None
        self.opened = self.retry = self.pause = 0.0
        self.connected = False
        self.spare: list[socket.socket] = []
        if form == "table":
            size = 4_096 if bug == "short-table" else _BYTES
            self.memory = os.memfd_create("timers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.memory, size)
            if bug != "unsealed":
                fcntl.fcntl(self.memory, _ADD_SEALS, _SEALS)
            self.words = memoryview(mmap.mmap(self.memory, size)).cast("Q")
            self.words[0] = _MAGIC
            self.slots: dict[int, int] = {}
            self.tokens = 0

    def acquire(self, token: int, seconds: float, scope: str) -> None:
        """Start a timer."""
        text = scope.encode()
        if bug == "scope-cut-in-bytes":
            text = text[:256]
        elif len(text) > 256:
            text = text[: 40 if bug == "scope-cut-short" else 256].decode(errors="ignore").encode()
        after = int(seconds * (1e6 if bug == "timeout-in-milliseconds" else 1e9))
        if bug == "learned-with-timeout" and not after:
            after = 10**9
        since = time.time_ns() if bug == "wall-clock" else time.monotonic_ns()
        self.held[token] = (since, after, text)
        if form == "table":
            self.write(token, since, after, text)
            self.look()
        else:
            self.change(self.message(token))
        if bug == "connection-for-each-timer" and self.link is not None:
            self.spare.append(self.link)
            self.link = None
            self.held.clear()

    def message(self, token: int) -> bytes:
        """Return the message of a timer that is held."""
        since, after, text = self.held[token]
        if bug == "begins-timers-again":
            since = time.monotonic_ns()
        flags = 0 if after or bug == "learned-without-flag" else 1
        signal = 9 if bug == "signal-by-default" else 0
        dirt = b"dirt" if bug == "dirty-bytes" else bytes(4)
        return struct.pack("<BBBB4sQQQ", 1, 1, signal, flags, dirt, token, since, after) + text

    def release(self, token: int) -> None:
        """End a timer."""
        gone = [token]
        if bug == "release-by-scope" and token in self.held:
            gone = [each for each, timer in self.held.items() if timer[2] == self.held[token][2]]
        for each in gone:
            if bug != "repeats-ended-timers":
                self.held.pop(each, None)
            if form == "table":
                if each in self.slots:
                    self.words[8 + 40 * self.slots.pop(each)] = 0
                self.look()
            else:
                self.change(struct.pack("<BB6xQ", 2, 1, each))

    def progress(self, step: int) -> None:
        """Report progress."""
        if bug == "step-of-32-bits":
            step &= 2**32 - 1
        when = time.time_ns() if bug == "wall-clock" else time.monotonic_ns()
        if form == "table":
            self.words[4:7] = array.array("Q", [step, when, step ^ when])
            self.look()
        else:
            self.ready()
            self.change(struct.pack("<BB6xQQ", 4, 1, step, when))

    def write(self, token: int, since: int, after: int, text: bytes) -> None:
        """Write a timer into a free slot of the table."""
        slot = next(each for each in range(1_024) if each not in self.slots.values())
        self.slots[token] = slot
        at = 8 + 40 * slot
        padded = text.ljust(256, b"\0")
        self.words[at + 8 : at + 40] = memoryview(padded).cast("Q")
        self.words[2] = max(self.words[2], slot + 1)
        self.tokens += 1
        kind = len(text) | (0 if after else 257 << 32)
        check = self.tokens ^ since ^ after ^ kind
        self.words[at + 1 : at + 5] = memoryview(struct.pack("=4Q", since, after, kind, check)).cast("Q")
        self.words[at] = self.tokens

    def look(self) -> None:
        """Send Look, unless the agent looks without it."""
        if not self.ready() or self.link is None or bug == "no-look":
            return
        unread = struct.unpack("i", fcntl.ioctl(self.link, termios.TIOCOUTQ, bytes(4)))[0]
        if unread and bug != "look-flood":
            return
        if time.monotonic_ns() > self.words[1] or bug == "look-while-polled":
            self.change(bytes([6, 1]) + bytes(6))

    def change(self, message: bytes) -> None:
        """Send a message; or open a connection, which gets all timers."""
        if not self.ready() or self.link is None:
            return
        try:
            self.send(message)
        except BlockingIOError:
            if bug not in ("waits-at-each-change", "drops-changes", "torn-frames"):
                self.lost()
                self.ready()
        except OSError:
            self.lost()
            self.ready()

    def ready(self) -> bool:
        """Return True if there was a connection; otherwise open one, if it is time to.

        In a table the change that opened a connection may need a Look as well.
        """
        if self.link is not None:
            return True
        if time.monotonic() < self.retry and bug != "storm":
            return False
        if self.connected and bug == "never-connects-again":
            return False
        kind, name = (
            (socket.SOCK_STREAM, "RALLYPOINT_TIMER_STREAM_SOCKET")
            if form == "stream"
            else (socket.SOCK_SEQPACKET, "RALLYPOINT_TIMER_SOCKET")
        )
        link = socket.socket(socket.AF_UNIX, kind)
        wait = 0 if bug in ("drops-changes", "torn-frames") else 50_000
        if wait:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, wait))
        self.opened = time.monotonic()
        try:
            link.connect(os.environ[name])
            link.setblocking(bool(wait))
            self.link = link
            first = not self.connected
            self.connected = True
            if form == "table":
                self.introduce(link)
            elif first or bug != "forgets-timers":
                for token in self.held:
                    self.send(self.message(token))
        except OSError:
            if bug == "ends-without-an-agent":
                raise
            self.lost()
        return form == "table" and self.link is not None

    def introduce(self, link: socket.socket) -> None:
        """Send the table."""
        if bug != "word-1-kept":
            self.words[1] = 0
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self.memory]))
        link.sendmsg([bytes([5, 1]) + bytes(6)], [rights], socket.MSG_NOSIGNAL)

    def send(self, message: bytes) -> None:
        assert self.link is not None
        if form == "stream" and bug != "no-frames":
            message = (
                struct.pack("<II" if bug == "little-endian-frames" else ">II", len(message), 0) + message
            )
        sent = self.link.send(message, socket.MSG_NOSIGNAL)
        if sent < len(message) and bug != "torn-frames":
            raise BlockingIOError
        if bug == "torn-frames":
            self.link.send(message[:5], socket.MSG_NOSIGNAL)

    def lost(self) -> None:
        """Close the connection, and decide when to open the next one."""
        if bug == "ends-with-the-agent" and self.connected:
            sys.exit("the agent is gone")
        if self.link is not None:
            self.link.close()
            if time.monotonic() - self.opened > _LIVED:
                self.pause = 0.0
        self.link = None
        self.retry = time.monotonic() + self.pause
        self.pause = min(2 * self.pause or _FIRST, _LONGEST)


class CallFailed(Exception):
    """A call failed; the argument is the kind of the failure."""


class Store:
    """Calls to the store."""

    def __init__(self) -> None:
        self.link: socket.socket | None = None
        self.closed = False

    def call(
        self, op: str, body: bytes = b"", *, timeout: float = 300.0, **fields: Any
    ) -> tuple[dict[str, Any], bytes]:
        """Carry out a call."""
        round_ = int(os.environ["RALLYPOINT_ROUND"])
        header = {"op": op, "round": round_, "writer_round": round_, "timeout": timeout, **fields}
        if bug == "no-timeout":
            del header["timeout"]
        elif bug == "round-as-text":
            header["round"] = str(round_)
        elif bug == "no-writer-round":
            del header["writer_round"]
        text = json.dumps(header, ensure_ascii=False)
        if bug == "unescaped-keys":
            text = text.replace('\\"', '"')
        elif bug == "keys-in-ascii":
            text = text.encode("ascii", "ignore").decode()
        encoded = text.encode("utf-16" if bug == "header-in-utf-16" else "utf-8")
        lengths = "<II" if bug == "little-endian-lengths" else ">II"
        frame = struct.pack(lengths, len(encoded), len(body)) + encoded + body
        try:
            reply, value = self.exchange(frame, timeout)
        except OSError as error:
            if not (bug == "keeps-silent-connection" and isinstance(error, TimeoutError)):
                self.close()
            if bug == "repeats-calls":
                try:
                    reply, value = self.exchange(frame, timeout)
                except OSError:
                    raise CallFailed("unavailable") from None
            raise CallFailed("unavailable") from None
        last = reply.get("last") and bug != "ignores-last"
        if last or bug == "connection-for-each-call" or (bug == "closes-after-error" and "error" in reply):
            self.close()
        if bug == "strict-replies":
            assert set(reply) <= {"error", "value", "last", "next_page", "deleted", "present"}, reply
        if "error" in reply:
            raise CallFailed(_kind(**reply["error"]))
        return reply, value

    def exchange(self, frame: bytes, timeout: float) -> tuple[dict[str, Any], bytes]:
        """Send a frame, and receive the reply."""
        if self.link is None:
            if self.closed and bug == "no-second-store-connection":
                raise ConnectionError
            self.link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.link.connect(os.environ["RALLYPOINT_STORE_SOCKET"])
        grace = 1.0 if bug == "impatient" else 6.0
        self.link.settimeout(None if bug == "waits-for-ever" else timeout + grace)
        if bug == "one-send":
            self.link.settimeout(0.05)
            self.link.send(frame)
            self.link.settimeout(timeout + grace)
        else:
            self.link.sendall(frame)
        header, body = struct.unpack(">II", self.receive(8))
        return json.loads(self.receive(header)), self.receive(body)

    def receive(self, size: int) -> bytes:
        """Receive so many bytes."""
        assert self.link is not None
        received = b""
        while len(received) < size:
            part = self.link.recv(size - len(received))
            if not part:
                raise ConnectionError
            received += part
            if bug == "one-recv":
                return received.ljust(size, b"\0")
        return received

    def close(self) -> None:
        """Close the connection."""
        if self.link is not None:
            self.link.close()
        self.link, self.closed = None, True


def _kind(*, code: str, reason: str, **_: object) -> str:
    if reason == "KEY_WAIT_TIMED_OUT":
        return "refused" if bug == "timeout-is-refused" else "timeout"
    if reason in ("ROUND_OVER", "LEASE_LOST"):
        return "refused" if bug == "lease-lost-is-refused" and reason == "LEASE_LOST" else "round-over"
    if bug == "unknown-reason-is-refused" and reason == "OF_TOMORROW":
        return "refused"
    return "unavailable" if code == "UNAVAILABLE" else "refused"


timers, store = Timers(), Store()


def _set(key: str, value: str) -> Sequence[object]:
    body = bytes.fromhex(value)
    store.call("set", body.decode("latin-1").encode() if bug == "value-as-text" else body, key=key)
    return ()


def _add(key: str, amount: str) -> Sequence[object]:
    number = float(amount) if bug == "amount-as-double" else int(amount)
    return [store.call("add", key=key, amount=number)[0]["value"]]


def _compare_set(key: str, expected: str, desired: str) -> Sequence[object]:
    body = bytes.fromhex(expected + desired)
    length = len(body) if bug == "length-of-both" else len(expected) // 2
    return [store.call("compare_set", body, key=key, expected_length=length)[1].hex()]


def _several(op: str, keys: Sequence[str], **fields: Any) -> dict[str, Any]:
    return store.call(op, keys=" ".join(keys) if bug == "keys-as-text" else list(keys), **fields)[0]


def _wait(timeout: str, *keys: str) -> Sequence[object]:
    _several("wait", keys, timeout=float(timeout))
    return ()


def _keys(prefix: str) -> Sequence[object]:
    found: list[str] = []
    page = ""
    while True:
        header, body = store.call("keys", prefix=prefix, page=page)
        found += json.loads(body)
        page = header["next_page"]
        if not page or bug == "first-page-only":
            return found


_STEPS: dict[str, Callable[..., Sequence[object] | None]] = {
    "acquire": lambda token, seconds, scope: timers.acquire(int(token), float(seconds), scope),
    "release": lambda token: timers.release(int(token)),
    "progress": lambda step: timers.progress(int(step)),
    "set": _set,
    "get": lambda key, timeout: [store.call("get", key=key, timeout=float(timeout))[1].hex()],
    "add": _add,
    "compare_set": _compare_set,
    "wait": _wait,
    "check": lambda *keys: [int(_several("check", keys)["present"])],
    "delete": lambda key: [int(store.call("delete", key=key)[0]["deleted"])],
    "keys": _keys,
}


def main() -> None:
    """Carry out steps until the end of the input."""
    for line in sys.stdin.buffer:
        name, *fields = line.decode().rstrip("\n").split("\t")
        try:
            result = ["ok", *(_STEPS[name](*fields) or ())] if name in _STEPS else ["unsupported"]
        except CallFailed as failed:
            result = ["error", failed.args[0], "scripted"]
        sys.stdout.buffer.write(("\t".join(map(str, result)) + "\n").encode())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
