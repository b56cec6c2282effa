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
"""Prefix of all keys in etcd."""


class Replicas:
    """Replicas by name.

    Attributes:
        replicas: Their processes.
        programs: By name, the `rallypoint` that a replica runs; by default that of this environment.
        wrappers: By name, a command that is put in front of the replica's own; most have none.
        ttl: Time to live of a replica's lease, seconds.
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
        """Return the address at which agents reach a replica, `host:port`."""
        return self._endpoints[name]

    @property
    def endpoints(self) -> str:
        """The addresses at which agents reach them, in the form of `--rdzv-endpoint`."""
        return ",".join(map(self.endpoint, self.replicas))

    async def connect(self, members: Sequence[str], port: int) -> None:
        """Set the addresses at which they reach etcd members, and agents reach them; call it before any start."""
        for name in self.replicas:
            self._endpoints[name] = await self._network.reach(AGENTS, name, PORT)
            etcd = [await self._network.reach(name, member, port) for member in members]
            self._etcd[name] = f"etcd://{','.join(etcd)}{PREFIX}"

    async def open(self) -> None:
        """Start all replicas; return when all serve."""
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
        """Wait until these replicas (by default all) have logged that they are ready.

        Raises:
            AssertionError: They have not in time.
        """
        for name in names or self.replicas:
            await until(f"{name} to be ready", partial(self._silence, name), timeout)

    async def restart(self, name: str) -> None:
        """Start a replica again; return when it serves."""
        self.spawn(name)
        await self.serve(name)

    def complaints(self) -> list[str]:
        """Return the errors that their processes logged, and output that is no log record: none is expected."""
        return [
            f"{log.stem}: {line}"
            for replica in self.replicas.values()
            for log in replica.logs()
            for line in _error_lines(log.read_text(errors="replace"))
        ]

    async def _silence(self, name: str) -> str:
        """Return the log of a replica that is not ready; empty if it is ready."""
        replica = self.replicas[name]
        replica.check_alive()
        log = replica.log()
        return "" if any(record.get("event") == "ready" for record in records(log)) else log or "no word"

    def close(self) -> None:
        """Kill all replicas."""
        for replica in self.replicas.values():
            replica.close()


def records(log: str) -> list[dict[str, Any]]:
    """Return the records of a log in JSON; an incomplete last line is left out."""
    return [json.loads(line) for line in log.split("\n")[:-1] if line.startswith("{")]


def _error_lines(log: str) -> list[str]:
    # A process that was killed may have left half a line.
    lines = log.split("\n")[:-1]
    return [
        line
        for line in lines
        if (json.loads(line)["level"] in ("error", "critical") if line.startswith("{") else line)
    ]
