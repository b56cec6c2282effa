"""A job on several hosts, whose workers are always connected to one another, and ways to lose one of its hosts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from cli.cli_process import RALLYPOINT
from ha.namespaces import Namespaces
from ha.network import AGENTS, Network, network_of
from ha.process import HostProcess
from ha.replicas import records
from ha.waiting import until
from local_cluster import RunWatch
from rallypoint.cli.rounds import Round, rounds_of
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import Plaintext
from support.processes import fresh_marker, living

WORKER = Path(__file__).with_name("ring_worker.py")
RUN = "run-1"
PATIENCE = 90.0
"""Seconds to wait for steps that take a few on an idle machine, besides the scene's own time."""

_SERVICE = "service"
_PORT = 29400


class Way(Enum):
    """A way to lose a host."""

    AGENT_KILLED = "its agent is SIGKILLed"
    TREE_KILLED = "agent, spawner and workers are SIGKILLed at once"
    CUT = "iptables drops all that it sends and receives"
    POWER_OFF = "its cable is gone, then all its processes, then its network namespace"

    @property
    def is_silent(self) -> bool:
        """True if its connections stay open, as far as the others can see."""
        return self in (Way.CUT, Way.POWER_OFF)


@dataclass(frozen=True, slots=True)
class Plan:
    """The job on the hosts.

    Attributes:
        hosts: Their names; each is the name of its node, too.
        later: Hosts whose agents are started later.
        nodes: As for `--nnodes`.
        kind: Kind of the workers, see `ring_worker.py`.
        timeout: Seconds after which a worker with a silent peer fails.
        workers: Workers of each host.
        max_restarts: Over the whole run.
        conf: As for `--rdzv-conf`.
    """

    hosts: Sequence[str]
    nodes: str
    kind: str
    timeout: float
    workers: int
    max_restarts: int
    conf: Mapping[str, str]
    later: Sequence[str] = ()


class HostedJob:
    """The rendezvous service on a host of its own, and an agent on each of the other hosts."""

    def __init__(self, plan: Plan, network: Network, folder: Path, marker: str) -> None:
        self.plan = plan
        self.lost: list[str] = []
        self._network = network
        self._folder = folder
        self._marker = marker
        self._agents = {
            host: HostProcess(f"agent-{host}", network, folder, host) for host in (*plan.hosts, *plan.later)
        }
        self._service = HostProcess(_SERVICE, network, folder)
        self._endpoint = ""

    @property
    def endpoint(self) -> str:
        """The address at which this process reaches the rendezvous service."""
        return self._endpoint

    async def start(self) -> RunWatch:
        """Start everything; return when the workers of a full round are connected."""
        self._spawn_service()
        self._endpoint = await self._network.reach(AGENTS, _SERVICE, _PORT)
        await until("the service to be ready", self._service_missing, PATIENCE)
        for host in self.plan.hosts:
            await self.start_agent(host)
        await until("the run to begin", self._joined_missing, PATIENCE)
        self._channel = open_channel(self._endpoint, Plaintext())
        self.watch = RunWatch(self._channel, RUN)
        most = int(self.plan.nodes.rpartition(":")[2])
        await self.full_round(min(most, len(self.plan.hosts)), 0)
        return self.watch

    async def full_round(self, nodes: int, after: int) -> pb.Run:
        """Wait until a round after `after` runs on `nodes` hosts, and its workers are connected."""

        def runs(run: pb.Run) -> bool:
            seated = nodes * self.plan.workers
            return run.phase == pb.PHASE_CLOSED or (
                run.phase == pb.PHASE_FINAL and run.round > after and run.world_size == seated
            )

        run = (await self.watch.until(f"a round of {nodes} hosts", runs, 2 * PATIENCE)).run
        assert run.phase == pb.PHASE_FINAL, f"the run is closed: {run.run_end}\n{self.logs()}"
        await self.in_touch(run.round, nodes)
        return run

    async def in_touch(self, round_: int, nodes: int) -> list[dict[str, Any]]:
        """Wait until all workers of a round are connected; return their lines, by rank."""

        async def look() -> str:
            self.check_survivors()
            missing = nodes * self.plan.workers - len(self.met(round_))
            return f"{missing} workers of round {round_} are not" if missing else ""

        await until("all workers to be in touch", look, PATIENCE)
        return sorted(self.met(round_), key=lambda line: int(line["rank"]))

    def met(self, round_: int) -> list[dict[str, Any]]:
        """Return the lines that the workers of a round wrote when they were connected."""
        path = self._folder / "met"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in map(json.loads, lines) if line["round"] == round_]

    async def kill_agent(self, host: str) -> None:
        """SIGKILL the agent of a host, which will get another one; return when it is gone."""
        await self._agents[host].kill()

    async def lose(self, host: str, way: Way) -> float:
        """Lose a host; return the time, in Unix seconds."""
        self.lost.append(host)
        began = time.time()
        if way is Way.AGENT_KILLED:
            os.kill(self._agents[host].pid, signal.SIGKILL)
        elif way is Way.TREE_KILLED:
            # The agent first: it is the oldest, and a host that dies reports nothing about its workers.
            for pid in sorted(living(self._mark(host))):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            assert isinstance(self._network, Namespaces)
            await (self._network.cut(host) if way is Way.CUT else self._network.power_off(host))
        return began

    def pause_service(self) -> None:
        """SIGSTOP the rendezvous service."""
        self._service.pause()

    def resume_service(self) -> None:
        """SIGCONT the rendezvous service."""
        self._service.resume()

    async def kill_service(self) -> None:
        """SIGKILL the rendezvous service; return when it is gone."""
        await self._service.kill()

    async def restart_service(self) -> None:
        """Start the rendezvous service again, with its journal; return when it serves."""
        self._spawn_service()
        await until("the service to be ready", self._service_missing, PATIENCE)

    async def wait_for_spares(self, count: int) -> None:
        """Wait until `count` nodes are spares."""

        async def look() -> str:
            run = await self.get_run()
            found = sum(node.state == pb.NODE_STATE_SPARE for node in run.nodes)
            return "" if found == count else f"{found} of {count}"

        await until("spares", look, PATIENCE)

    async def finish(self) -> dict[str, int]:
        """Let the workers succeed; return the exit codes of the agents that were not lost."""
        (self._folder / "finish").touch()
        survivors = [host for host in self.plan.hosts if host not in self.lost]
        codes = await asyncio.gather(*(self._agents[host].ended(PATIENCE) for host in survivors))
        return dict(zip(survivors, codes, strict=True))

    async def get_run(self) -> pb.Run:
        """Return the run from the service."""
        stub = pb_grpc.RendezvousServiceStub(self._channel)
        return (await stub.GetRun(pb.GetRunRequest(run_id=RUN), timeout=PATIENCE)).run

    async def events(self) -> list[pb.Event]:
        """Return all events of the run."""
        stub = pb_grpc.RendezvousServiceStub(self._channel)
        request = pb.ListEventsRequest(run_id=RUN, page_size=10_000)
        return list((await stub.ListEvents(request, timeout=PATIENCE)).events)

    async def rounds(self) -> list[Round]:
        """Return the rounds that `rallypoint rounds` shows."""
        return rounds_of(await self.events()).rounds

    async def story(self) -> str:
        """Return the events of the run, one per line, and the last log lines of each agent."""
        lines = [f"{event.time.ToJsonString()} {event.detail}" for event in await self.events()]
        return "\n".join([*lines, self.logs()])

    def logs(self) -> str:
        """Return the last log lines of each agent."""
        return "\n".join(
            f"--- {host}\n" + "".join(agent.log().splitlines(keepends=True)[-15:])
            for host, agent in self._agents.items()
            if agent.starts
        )

    async def close(self) -> None:
        """Leave no process behind."""
        if hasattr(self, "watch"):
            await self.watch.close()
            await self._channel.close()
        for agent in self._agents.values():
            agent.close()
        self._service.close()

    def _mark(self, host: str) -> str:
        """Return the marker in the environment of all processes of a host, and of no others."""
        return f"{self._marker}-{host}."

    def check_survivors(self) -> None:
        """Check that no agent has ended that was not lost.

        Raises:
            ProcessError: One has ended.
        """
        for host in self.plan.hosts:
            if host not in self.lost:
                self._agents[host].check_alive()

    def _spawn_service(self) -> None:
        self._service.spawn(
            [
                *[str(RALLYPOINT), "serve", "rendezvous", "--log-format", "json", "--insecure"],
                *["--host", self._network.address(_SERVICE), "--port", str(_PORT)],
                *["--journal", f"sqlite:{self._folder / 'rendezvous.db'}"],
            ]
        )

    async def _service_missing(self) -> str:
        self._service.check_alive()
        log = self._service.log()
        return "" if any(record.get("event") == "ready" for record in records(log)) else log or "no word"

    async def _joined_missing(self) -> str:
        self.check_survivors()
        return "" if any(map(self.has_joined, self.plan.hosts)) else "no node has joined"

    def has_joined(self, host: str) -> bool:
        """Return True if the present agent of a host has logged that it joined."""
        agent = self._agents[host]
        return agent.starts > 0 and any(record.get("event") == "joined" for record in records(agent.log()))

    def started_round(self, host: str) -> int:
        """Return the last round in which the host's present agent has started workers; 0: none."""
        started = [
            line for line in records(self._agents[host].log()) if line.get("event") == "starting workers"
        ]
        return int(started[-1]["round"]) if started else 0

    async def start_agent(self, host: str) -> None:
        """Start the agent of a host, or start it again; don't wait until it has joined."""
        plan, address = self.plan, self._network.address(host)
        conf = ",".join(f"{key}={value}" for key, value in plan.conf.items())
        endpoint = await self._network.reach(host, _SERVICE, _PORT)
        self._agents[host].spawn(
            [
                *[str(RALLYPOINT), "run", "--nnodes", plan.nodes, "--nproc-per-node", str(plan.workers)],
                *["--insecure", "--rdzv-endpoint", endpoint, "--rdzv-id", RUN, "--rdzv-conf", conf],
                *["--node-id", host, "--local-addr", address, "--max-restarts", str(plan.max_restarts)],
                *["--log-format", "json", "--log-dir", str(self._folder / f"logs-{host}")],
                *[str(WORKER), str(self._folder), plan.kind, f"{plan.timeout:g}"],
            ],
            SCENE_MARKER=self._mark(host),
            HOST_ADDRESS=address,
            GLOO_SOCKET_IFNAME="eth0" if self._network.parts else "lo",
        )


@asynccontextmanager
async def hosted_job(plan: Plan, folder: Path, *, parts: bool = False) -> AsyncIterator[HostedJob]:
    """Start a job whose workers are connected; remove all its processes and networks afterwards.

    Args:
        plan: The job.
        folder: A new folder for logs and the files of workers.
        parts: True if hosts will be cut off: the test is skipped on a machine where that is impossible.
    """
    folder.mkdir(parents=True)  # noqa: ASYNC240 (before anything runs)
    async with network_of((_SERVICE, *plan.hosts, *plan.later)) as network:
        if parts and not network.parts:
            pytest.skip(network.why_not)
        with fresh_marker() as marker:
            job = HostedJob(plan, network, folder, marker)
            try:
                await job.start()
                yield job
            finally:
                await job.close()
