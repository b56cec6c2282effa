"""Real replicas of the rendezvous service over one etcd, each on a host of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cli.cli_process import RALLYPOINT
from ha.network import AGENTS, Network
from ha.process import HostProcess
from ha.waiting import PATIENCE, until

PORT = 29400
PREFIX = "/ha"
"""Of all keys in etcd."""


class Replicas:
    """Replicas by name.

    Attributes:
        replicas: Their processes.
        programs: By name, the `rallypoint` that a replica runs; by default that of this environment.
        wrappers: By name, the command that a replica is started by, in front of its own; most have none.
        ttl: Of a replica's lease, seconds.
    """

    def __init__(self, names: Sequence[str], network: Network, folder: Path, ttl: float) -> None:
        """Start nothing yet; logs go to `folder`."""
        self.replicas = {name: HostProcess(name, network, folder) for name in names}
        self.programs = dict.fromkeys(names, RALLYPOINT)
        self.wrappers: dict[str, Sequence[str]] = {}
        self.ttl = ttl
        self._network = network
        self._endpoints: dict[str, str] = {}
        self._etcd: dict[str, str] = {}

    def endpoint(self, name: str) -> str:
        """Where agents reach a replica, as `host:port`."""
        return self._endpoints[name]

    @property
    def endpoints(self) -> str:
        """Where agents reach them, as `--rdzv-endpoint` takes it."""
        return ",".join(map(self.endpoint, self.replicas))

    async def connect(self, members: Sequence[str], port: int) -> None:
        """Settle how they reach members of etcd, and how agents reach them; to be done before any is started."""
        for name in self.replicas:
            self._endpoints[name] = await self._network.reach(AGENTS, name, PORT)
            etcd = [await self._network.reach(name, member, port) for member in members]
            self._etcd[name] = f"etcd://{','.join(etcd)}{PREFIX}"

    async def open(self) -> None:
        """Start them all; returns once all serve."""
        for name in self.replicas:
            self.spawn(name)
        await self.serve()

    def spawn(self, name: str) -> None:
        """Start a replica, or start it again; don't wait until it serves."""
        self.replicas[name].spawn(
            [
                *self.wrappers.get(name, ()),
                *[
                    str(self.programs[name]),
                    "serve",
                    "rendezvous",
                    "--log-format",
                    "json",
                    "--journal",
                    self._etcd[name],
                ],
                *["--host", self._network.address(name), "--port", str(PORT)],
                *["--insecure", "--replica-name", name, "--lease-ttl", f"{self.ttl:g}"],
                *["--advertise", self.endpoint(name)],
            ]
        )

    async def serve(self, *names: str, timeout: float = PATIENCE) -> None:
        """Wait until these replicas (by default all) say that they are ready.

        Raises:
            AssertionError: They don't.
        """
        for name in names or self.replicas:
            await until(f"{name} to be ready", partial(self._silence, name), timeout)

    async def restart(self, name: str) -> None:
        """Start a replica again; returns once it serves."""
        self.spawn(name)
        await self.serve(name)

    def complaints(self) -> list[str]:
        """What any of their processes logged as an error, or wrote besides its log. There is to be none."""
        return [
            f"{log.stem}: {line}"
            for replica in self.replicas.values()
            for log in replica.logs()
            for line in _grave_lines(log.read_text(errors="replace"))
        ]

    async def _silence(self, name: str) -> str:
        """What a replica has logged that is not ready; empty: it is."""
        replica = self.replicas[name]
        replica.check_alive()
        log = replica.log()
        return "" if any(record.get("event") == "ready" for record in records(log)) else log or "no word"

    def close(self) -> None:
        """Leave no process behind."""
        for replica in self.replicas.values():
            replica.close()


def records(log: str) -> list[dict[str, Any]]:
    """The records of a log in JSON; a last line that is not whole is left out."""
    return [json.loads(line) for line in log.split("\n")[:-1] if line.startswith("{")]


def _grave_lines(log: str) -> list[str]:
    # A process that was killed may have left half a line behind.
    lines = log.split("\n")[:-1]
    return [
        line
        for line in lines
        if (json.loads(line)["level"] in ("error", "critical") if line.startswith("{") else line)
    ]
