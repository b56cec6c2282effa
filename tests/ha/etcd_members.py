"""Three real etcd members, each on a host of its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from ha.etcd_gateway import EtcdSilent, ask, read
from ha.network import Network
from ha.process import HostProcess
from ha.waiting import PATIENCE, until

CLIENT_PORT, PEER_PORT = 23790, 23800

_REPLY_TIMEOUT = 5.0  # seconds for one reply


class EtcdMembers:
    """A cluster of etcd members, by name.

    Attributes:
        members: Their processes.
    """

    def __init__(self, names: tuple[str, ...], network: Network, folder: Path) -> None:
        """Start nothing yet; data and logs go to `folder`."""
        self.members = {name: HostProcess(name, network, folder) for name in names}
        self._network = network
        self._folder = folder

    def endpoint(self, name: str) -> str:
        """Return the address of a member for clients, `host:port`."""
        return f"{self._network.address(name)}:{CLIENT_PORT}"

    @property
    def endpoints(self) -> list[str]:
        """The addresses of all members for clients, each `host:port`."""
        return [self.endpoint(name) for name in self.members]

    async def open(self) -> None:
        """Start all members; return when they serve."""
        for name in self.members:
            self.spawn(name)
        await self.serve()

    def spawn(self, name: str) -> None:
        """Start a member, or start it again with its data; don't wait until it serves."""
        address = self._network.address(name)
        client, peer = f"http://{address}:{CLIENT_PORT}", f"http://{address}:{PEER_PORT}"
        peers = ",".join(f"{each}=http://{self._network.address(each)}:{PEER_PORT}" for each in self.members)
        self.members[name].spawn(
            [
                *["etcd", "--name", name, "--data-dir", str(self._folder / f"{name}.etcd")],
                *["--listen-client-urls", client, "--advertise-client-urls", client],
                *["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer],
                *["--initial-cluster", peers, "--initial-cluster-token", "ha"],
                # The default since 3.5: a member that returns after a partition doesn't depose the leader.
                *["--pre-vote", "--logger", "zap"],
            ]
        )

    async def serve(self, *names: str, timeout: float = PATIENCE) -> None:
        """Wait until these members (by default all) answer linearizable reads.

        Raises:
            AssertionError: They don't in time.
        """
        for name in names or self.members:
            await until(f"{name} to serve", partial(self._silence, name), timeout)

    async def restart(self, name: str) -> None:
        """Start a member again with its data; return when it serves."""
        self.spawn(name)
        await self.serve(name)

    async def leader(self) -> str:
        """Return the name of the leader on which a majority agrees.

        Raises:
            AssertionError: There is none for too long.
        """
        found: list[str] = []

        async def look() -> str:
            names: dict[str, str] = {}
            votes: Counter[str] = Counter()
            for name, status in (await self._statuses()).items():
                names[status["header"]["member_id"]] = name
                votes[status.get("leader", "0")] += 1
            found.extend(
                names[id_] for id_, count in votes.items() if id_ in names and count >= self.majority
            )
            return "" if found else f"{dict(votes)} of {names}"

        await until("etcd to have a leader", look)
        return found[0]

    @property
    def majority(self) -> int:
        """The number of members that form a majority."""
        return len(self.members) // 2 + 1

    async def compact(self) -> int:
        """Compact all history before the present revision; return that revision."""
        answer = await self._ask_any_member("maintenance/status")
        revision = int(answer["header"]["revision"])
        await self._ask_any_member("kv/compaction", revision=revision, physical=True)
        return revision

    async def defragment(self) -> None:
        """Defragment one member after the other; each serves no requests meanwhile."""
        for name in self.members:
            await ask(self.endpoint(name), "maintenance/defragment", PATIENCE)

    async def read(self, prefix: str) -> dict[str, bytes]:
        """Return all keys with a prefix, and their values, by a linearizable read.

        Raises:
            EtcdSilent: No member answers.
        """
        silent = EtcdSilent("no member was asked")
        for name in self._reachable():
            try:
                return await read(self.endpoint(name), prefix, _REPLY_TIMEOUT)
            except EtcdSilent as error:
                silent = error
        raise silent

    def close(self) -> None:
        """Kill all members."""
        for member in self.members.values():
            member.close()

    def _reachable(self) -> list[str]:
        return [name for name, member in self.members.items() if member.running and not member.paused]

    async def _statuses(self) -> dict[str, dict[str, Any]]:
        async def status(name: str) -> dict[str, Any] | None:
            try:
                return await ask(self.endpoint(name), "maintenance/status", _REPLY_TIMEOUT)
            except EtcdSilent:
                return None

        names = self._reachable()
        answers = await asyncio.gather(*map(status, names))
        return {name: answer for name, answer in zip(names, answers, strict=True) if answer is not None}

    async def _ask_any_member(self, path: str, **fields: Any) -> dict[str, Any]:
        silent = EtcdSilent("no member was asked")
        for name in self._reachable():
            try:
                return await ask(self.endpoint(name), path, _REPLY_TIMEOUT, **fields)
            except EtcdSilent as error:
                silent = error
        raise silent

    async def _silence(self, name: str) -> str:
        """Return the reason for which a member does not answer; empty if it does."""
        self.members[name].check_alive()
        try:
            await read(self.endpoint(name), "/nothing", _REPLY_TIMEOUT)
        except EtcdSilent as error:
            return str(error)
        return ""
