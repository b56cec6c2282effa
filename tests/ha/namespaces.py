"""Hosts as network namespaces, each connected to a bridge by a virtual cable.

    this process ── rpha7 ╮
    etcd-0 ── eth0 ───────┼── bridge, in a namespace of its own
    replica-0 ── eth0 ────╯

A namespace has no name: one sleeping process holds it, which the kernel kills when this process dies, however it dies;
then the kernel removes the namespace and its cables. So nothing can be left behind, and no clean-up is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from functools import cache, partial

from ha.network import AGENTS, missing
from ha.waiting import until
from support.mortal import mortal

_BRIDGE = "bridge"
_TOOLS = ("ip", "iptables", "nsenter", "setpriv", "tc", "unshare")
# Seconds, enough on any machine for the kernel to remove a network, and for a short command.
_TIMEOUT = 60.0


class NetworkError(Exception):
    """A command that sets up the network failed; the message has its output."""


class Namespaces:
    """See `Network`. Open it before use, and always close it."""

    parts = True
    why_not = ""

    def __init__(self, number: int, hosts: Sequence[str]) -> None:
        """Set up nothing yet.

        Args:
            number: A number that no other network has; it determines names and addresses.
            hosts: Their names.
        """
        # 198.18/15 is reserved for network benchmarks (RFC 2544): no real host is there.
        self._subnet = f"198.{18 + number // 256}.{number % 256}"
        self._cable = f"rpha{number}"
        self._addresses = {AGENTS: f"{self._subnet}.1"} | {
            host: f"{self._subnet}.{place}" for place, host in enumerate(hosts, start=11)
        }
        self._holders: dict[str, subprocess.Popen[bytes]] = {}

    async def open(self) -> None:
        """Create the namespaces and their cables.

        Raises:
            NetworkError: The machine doesn't allow it.
        """
        for host in (_BRIDGE, *self._addresses):
            if host != AGENTS:
                self._holders[host] = _hold_namespace()
        for host, holder in self._holders.items():
            await until(f"a namespace for {host}", partial(_not_apart, holder))
        await self._ip(_BRIDGE, "link", "add", "br0", "type", "bridge")
        await self._ip(_BRIDGE, "link", "set", "br0", "up")
        await self._ip(AGENTS, "link", "add", self._cable, "type", "veth", *self._plug("agents"))
        for place, host in enumerate(self._addresses):
            if host == AGENTS:
                await self._connect(host, self._cable, "agents")
                continue
            await self._ip(host, "link", "set", "lo", "up")
            await self._ip(host, "link", "add", "eth0", "type", "veth", *self._plug(f"port{place}"))
            await self._connect(host, "eth0", f"port{place}")

    async def close(self) -> None:
        """Remove the namespaces; return when this host has no cable left."""
        for holder in self._holders.values():
            holder.kill()
        for holder in self._holders.values():
            await asyncio.to_thread(holder.wait, _TIMEOUT)

        async def cables() -> str:
            return self._cable if self._cable in os.listdir("/sys/class/net") else ""

        await until("the end of all cables", cables)

    def address(self, host: str) -> str:
        return self._addresses[host]

    async def reach(self, one: str, other: str, port: int) -> str:
        return f"{self._addresses[other]}:{port}"

    def command(self, host: str, *command: str) -> list[str]:
        if host == AGENTS:
            return list(command)
        return ["nsenter", f"--net=/proc/{self._holders[host].pid}/ns/net", "--", *command]

    def why_inseparable(self, one: str, other: str) -> str:
        return ""

    async def part(self, one: str, other: str) -> None:
        # One of the two drops packets both ways; the rules of this host are never changed.
        here, there = (other, one) if one == AGENTS else (one, other)
        for chain, flag in (("INPUT", "-s"), ("OUTPUT", "-d")):
            await self._run(here, "iptables", "-w", "-A", chain, flag, self._addresses[there], "-j", "DROP")

    async def cut(self, host: str) -> None:
        """Partition a host from all others: it sends nothing and receives nothing from now on."""
        drop = "iptables -w -A OUTPUT ! -o lo -j DROP && iptables -w -A INPUT ! -i lo -j DROP"
        await self._run(host, "sh", "-c", drop)

    async def power_off(self, host: str) -> None:
        """Remove a host's cable, then kill all its processes; return when the host is gone for good.

        As the cable is removed first, no peer receives the end of a connection.
        """
        await self._ip(_BRIDGE, "link", "delete", f"port{list(self._addresses).index(host)}")
        holder = self._holders.pop(host)
        namespace = os.readlink(f"/proc/{holder.pid}/ns/net")

        async def processes() -> str:
            alive = await asyncio.to_thread(_processes_of, namespace)
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return f"{alive} are there" if alive else ""

        await until(f"the end of {host}", processes)
        await asyncio.to_thread(holder.wait, _TIMEOUT)

    async def slow(self, host: str, kilobits: int) -> None:
        assert host != AGENTS, "its cable is everybody's"
        shape = ("root", "tbf", "rate", f"{kilobits}kbit", "burst", "16kb", "limit", "4mb")
        place = list(self._addresses).index(host)
        await self._run(host, "tc", "qdisc", "replace", "dev", "eth0", *shape)
        await self._run(_BRIDGE, "tc", "qdisc", "replace", "dev", f"port{place}", *shape)

    async def heal(self) -> None:
        for place, host in enumerate(self._addresses):
            if host in self._holders:
                await self._run(host, "iptables", "-w", "-F")
                await self._run(host, "tc", "qdisc", "replace", "dev", "eth0", "root", "noqueue")
                await self._run(_BRIDGE, "tc", "qdisc", "replace", "dev", f"port{place}", "root", "noqueue")

    def _plug(self, port: str) -> tuple[str, ...]:
        """The other end of a cable: a port in the namespace of the bridge."""
        return ("peer", "name", port, "netns", str(self._holders[_BRIDGE].pid))

    async def _connect(self, host: str, end: str, port: str) -> None:
        await self._ip(host, "address", "add", f"{self._addresses[host]}/24", "dev", end)
        await self._ip(host, "link", "set", end, "up")
        await self._ip(_BRIDGE, "link", "set", port, "master", "br0")
        await self._ip(_BRIDGE, "link", "set", port, "up")

    async def _ip(self, host: str, *arguments: str) -> None:
        await self._run(host, "ip", *arguments)

    async def _run(self, host: str, *command: str) -> None:
        said = await asyncio.to_thread(_failure, self.command(host, *command))
        if said is not None:
            raise NetworkError(f"{' '.join(command)} on {host}: {said}")


@cache
def why_no_namespaces() -> str:
    """Return the reason for which network namespaces can't be used here, in one line; empty if they can."""
    if lacking := missing(*_TOOLS):
        return f"hosts can't be parted without {', '.join(lacking)}"
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    # Try everything that is needed, in a namespace that ends with the command.
    trial = (
        "ip link add eth0 type veth peer name eth1 && ip link add br0 type bridge && ip link set eth1 master br0"
        " && iptables -w -A INPUT -s 198.18.0.9 -j DROP"
        " && tc qdisc replace dev eth0 root tbf rate 1mbit burst 16kb limit 4mb"
    )
    said = _failure(["unshare", "--net", "sh", "-c", trial])
    return "" if said is None else f"this machine allows no network namespaces: {said}"


def _hold_namespace() -> subprocess.Popen[bytes]:
    """Start a process that enters its own namespace, and holds it until it is killed."""
    return subprocess.Popen(mortal("unshare", "--net", "sleep", "infinity"))


async def _not_apart(holder: subprocess.Popen[bytes]) -> str:
    """Return the reason for which a holder is not in its own namespace yet; empty if it is."""
    if (code := holder.poll()) is not None:
        raise NetworkError(f"a namespace could not be made: exit code {code}")
    namespaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in ("self", holder.pid)}
    return "" if len(namespaces) == 2 else "it shares ours"


def _processes_of(namespace: str) -> list[int]:
    """Return the processes of a network namespace, without zombies."""
    found = []
    for name in os.listdir("/proc"):
        # A zombie has left its namespaces.
        with contextlib.suppress(OSError):
            if name.isdigit() and os.readlink(f"/proc/{name}/ns/net") == namespace:
                found.append(int(name))
    return found


def _failure(command: list[str]) -> str | None:
    """Run a command; return its output in one line if it failed, None if it did not."""
    done = subprocess.run(
        mortal(*command),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return None if done.returncode == 0 else " ".join((done.stderr or done.stdout).split()) or "no word"
