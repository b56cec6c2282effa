"""One play of a scenario for workers: the steps that the worker carries out, and the checks of rules."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from rallypoint.conformance.checks import Checks, ClientFailed, NotOffered, Scenario, register_in
from rallypoint.conformance.client import TestedProcess
from rallypoint.conformance.scripted_sockets import (
    ObservedCall,
    ObservedConnection,
    ObservedTimer,
    ScriptedSockets,
)

ROUND = 7
"""RALLYPOINT_ROUND of the worker."""


class WorkerScene(Checks):
    """A scenario that is played."""

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


WORKER_SCENARIOS: dict[str, Scenario] = {}
"""All scenarios for workers by name, in the order of their files; `report` imports these."""

worker_scenario = partial(register_in, WORKER_SCENARIOS)
"""Register a function as a scenario for workers: see `register_in`."""
