"""Scenarios of a worker's calls to the store."""

from __future__ import annotations

import asyncio
import json

from rallypoint.conformance.checks import HOLD
from rallypoint.conformance.worker_scene import WorkerScene, worker_scenario
from rallypoint.worker.store import encode_frame

_RAW = bytes(range(256))
_LARGE = bytes(range(256)) * 4_096
_GRACE = 4.0  # seconds after the timeout, in which the worker must not give up
_STRANGE = 'quote " backslash \\ slash / \x01 \x7f é € 😀'


@worker_scenario("S01", "S02", "S03", "S04", "S10")
async def values(scene: WorkerScene) -> None:
    """Values of all bytes, and an empty one, over one connection."""
    for value in (_RAW, b""):
        call = await scene.call("S04", "set", "key", value.hex())
        scene.has("S04", call, value, key="key")
        call.reply()
        await scene.result("S04", "ok")
        call = await scene.call("S04", "get", "key", 1.5)
        scene.has("S04", call, key="key")
        scene.check("S02", call.header["timeout"] == 1.5, "`timeout` 1.5", str(call.header["timeout"]))
        call.reply({}, value)
        await scene.result("S04", f"ok\t{value.hex()}")
    for deleted in (True, False):
        call = await scene.call("S04", "delete", "key")
        scene.has("S04", call, key="key")
        call.reply({"deleted": deleted})
        await scene.result("S04", f"ok\t{deleted:d}")
    scene.check("S10", call.connection == 1, "one connection", f"{call.connection} connections after 6 calls")


@worker_scenario("S05", "S03")
async def sums(scene: WorkerScene) -> None:
    """Numbers of 64 bits are added."""
    for amount, value in ((3, 3), (-(2**63), 2**63 - 1), (2**53 + 1, -(2**53) - 1)):
        call = await scene.call("S05", "add", "key", amount)
        scene.has("S05", call, key="key", amount=amount)
        call.reply({"value": value})
        await scene.result("S05", f"ok\t{value}")


@worker_scenario("S06", "S03")
async def compare_set(scene: WorkerScene) -> None:
    """A value is replaced; another one is not; a key that was not set is."""
    for expected, desired, swapped, after in (
        (b"old", b"new!", True, b"new!"),
        (b"\xff", b"", False, b"other"),
        (b"", b"first", True, b"first"),
    ):
        call = await scene.call("S06", "compare_set", "key", expected.hex(), desired.hex())
        scene.has("S06", call, expected + desired, key="key", expected_length=len(expected))
        call.reply({"swapped": swapped, "exists": True}, after)
        await scene.result("S06", f"ok\t{after.hex()}")


@worker_scenario("S07")
async def several_keys(scene: WorkerScene) -> None:
    """Waiting for keys, and checking them."""
    call = await scene.call("S07", "wait", 2.5, "a", "b")
    scene.has("S07", call, keys=["a", "b"], timeout=2.5)
    call.reply()
    await scene.result("S07", "ok")
    for present in (True, False):
        call = await scene.call("S07", "check", "a")
        scene.has("S07", call, keys=["a"])
        call.reply({"present": present})
        await scene.result("S07", f"ok\t{present:d}")


@worker_scenario("S08", "S09")
async def listing(scene: WorkerScene) -> None:
    """Three pages of keys, one of them empty."""
    scene.do("keys", "pre")
    page = ""
    for keys, following in ((["pre1", f"pre{_STRANGE}"], "next \\ page"), ([], "last"), (["pre2"], "")):
        call = await scene.next_call("S08", "keys")
        scene.has("S08", call, prefix="pre", page=page)
        page = following
        call.reply({"next_page": following}, json.dumps(keys).encode())
    await scene.result("S08", f"ok\tpre1\tpre{_STRANGE}\tpre2")


@worker_scenario("S09", "S01")
async def strange_keys(scene: WorkerScene) -> None:
    """Keys that need care in JSON."""
    call = await scene.call("S09", "set", _STRANGE, "00")
    scene.has("S09", call, b"\0", key=_STRANGE)
    call.reply()
    await scene.result("S09", "ok")
    call = await scene.call("S09", "wait", 1, _STRANGE, "b")
    scene.has("S09", call, keys=[_STRANGE, "b"])
    call.reply()
    await scene.result("S09", "ok")
    scene.do("keys", "")
    call = await scene.next_call("S09", "keys")
    keys = json.dumps([_STRANGE], ensure_ascii=False).replace("/", "\\/").encode()
    call.reply({"next_page": ""}, keys)
    await scene.result("S09", f"ok\t{_STRANGE}")


_KINDS = (
    ("S13", "timeout", "DEADLINE_EXCEEDED", "KEY_WAIT_TIMED_OUT"),
    ("S14", "round-over", "FAILED_PRECONDITION", "ROUND_OVER LEASE_LOST"),
    ("S15", "unavailable", "UNAVAILABLE", "STORE_UNAVAILABLE AGENT_FAILED JOURNAL_FAILED OF_TOMORROW"),
    ("S15", "refused", "INVALID_ARGUMENT", "MALFORMED_CALL OPERATION_REUSED"),
    ("S15", "refused", "RESOURCE_EXHAUSTED", "ANSWER_TOO_LARGE RUN_STORE_FULL STORES_FULL STORE_BUSY"),
    ("S15", "refused", "RESOURCE_EXHAUSTED", "TOO_MANY_KEYS TOO_MANY_WAITERS"),
    ("S15", "refused", "FAILED_PRECONDITION", "INTEGER_OVERFLOW NOT_AN_INTEGER ROUND_NOT_BEGUN"),
    ("S15", "refused", "FAILED_PRECONDITION", "OPERATION_SUPERSEDED VALUE_TOO_LARGE OF_TOMORROW"),
)
ERRORS = [(rule, code, reason, kind) for rule, kind, code, reasons in _KINDS for reason in reasons.split()]
"""Each error with its rule, its code, and the kind that a program sees."""


@worker_scenario("S13", "S14", "S15", "S10", "S16")
async def errors(scene: WorkerScene) -> None:
    """Each error of the store and of the agent, and some that a newer one may send."""
    for rule, code, reason, expected in ERRORS:
        call = await scene.call("S10", "get", "key", 1)
        scene.check(
            "S10", call.connection == 1, "one connection, also after errors", f"connection {call.connection}"
        )
        more = {"current_round": 8} if reason == "ROUND_OVER" else {}
        call.fail(code, reason, **more)
        await scene.result(rule, f"error\t{expected}")
    call = await scene.call("S16", "get", "key", 1)
    error = {
        "of_tomorrow": {"code": "OK"},
        "code": "FAILED_PRECONDITION",
        "message": 'a "b" {',
        "reason": "ROUND_OVER",
    }
    call.reply({"of_tomorrow": [{"last": True}], "error": {**error, "details": [None, 1.5e3, "]"]}})
    await scene.result("S16", "error\tround-over")
    call = await scene.call("S16", "add", "key", 1)
    call.reply({"deep": {"value": 4, "error": {"code": "UNAVAILABLE"}}, "value": 5, "text": '\\"value": 6'})
    await scene.result("S16", "ok\t5")


@worker_scenario("S11")
async def pieces(scene: WorkerScene) -> None:
    """A reply comes byte by byte, and a large one."""
    call = await scene.call("S11", "get", "key", 30)
    for byte in encode_frame({}, _RAW[:20]):
        call.writer.write(bytes([byte]))
        await asyncio.sleep(0.005)
    await scene.result("S11", f"ok\t{_RAW[:20].hex()}")
    call = await scene.call("S11", "get", "key", 30)
    call.reply({}, _LARGE)
    await scene.result("S11", f"ok\t{_LARGE.hex()}")


@worker_scenario("S12")
async def slow_agent(scene: WorkerScene) -> None:
    """The agent begins to read a large call late."""
    scene.sockets.reading.clear()
    scene.do("set", "key", _LARGE.hex())
    await asyncio.sleep(HOLD)
    scene.sockets.reading.set()
    call = await scene.next_call("S12", "set")
    scene.has("S12", call, _LARGE, key="key")
    call.reply()
    await scene.result("S12", "ok")


@worker_scenario("S17", "S19")
async def last_reply(scene: WorkerScene) -> None:
    """Replies with `last`, after which the agent does not close the connection at once."""
    for number in (1, 2):
        call = await scene.call("S19", "get", "key", 1)
        scene.check("S17", call.connection == number, "another connection after `last`", "the same")
        call.reply(
            {
                "error": {"code": "RESOURCE_EXHAUSTED", "reason": "TOO_MANY_CONNECTIONS", "message": ""},
                "last": True,
            }
        )
        await scene.result("S15", "error\trefused")


@worker_scenario("S18", "S19")
async def lost_replies(scene: WorkerScene) -> None:
    """The agent closes the connection before the reply, and within it; later no agent listens."""
    for number, part in enumerate((b"", encode_frame({"value": 3}, b"")[:-4]), 1):
        call = await scene.call("S19", "add", "key", 1)
        scene.check("S19", call.connection == number, "another connection", f"connection {call.connection}")
        call.writer.write(part)
        call.writer.close()
        await scene.result("S18", "error\tunavailable")
        calls = len(scene.sockets.calls)
        scene.check("S18", calls == number, "the call once", f"{calls} calls")
    call = await scene.call("S19", "get", "key", 1)
    call.reply({}, b"\x01")
    await scene.result("S19", "ok\t01")
    await scene.sockets.stop()
    for _ in range(2):
        scene.do("get", "key", 1)
        await scene.result("S18", "error\tunavailable")
    scene.sockets.start()
    call = await scene.call("S19", "get", "key", 1)
    call.reply({}, b"\x02")
    await scene.result("S19", "ok\t02")


@worker_scenario("S20")
async def late_reply(scene: WorkerScene) -> None:
    """The reply comes some seconds after the timeout."""
    call = await scene.call("S20", "get", "key", 0.5)
    await scene.hold(
        "S20", lambda: call.connection not in scene.sockets.ended, "the connection stays", 0.5 + _GRACE
    )
    call.reply({}, b"\x01")
    await scene.result("S20", "ok\t01")


@worker_scenario("S21")
async def silent_agent(scene: WorkerScene) -> None:
    """No reply comes at all."""
    call = await scene.call("S21", "get", "key", 0)
    await scene.result("S21", "error\tunavailable")
    await scene.until("S21", lambda: call.connection in scene.sockets.ended, "the end of the connection")
    again = await scene.call("S21", "get", "key", 1)
    scene.check("S21", again.connection != call.connection, "another connection", "the same one")
    again.reply({}, b"\x01")
    await scene.result("S21", "ok\t01")
