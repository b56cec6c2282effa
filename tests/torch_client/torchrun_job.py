"""A job of stock torchruns at one rendezvous service; each torchrun acts as one host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from google.protobuf.json_format import Parse

from cli.cli_process import clean_environment, rallypoint
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from support.processes import fresh_marker
from support.waiting import wait_until

TORCHRUN = Path(sys.executable).with_name("torchrun")
WORKER = Path(__file__).with_name("waiting_worker.py")
RUN = "job"
PATIENCE = 120.0
"""Seconds to wait for events that take some seconds on an idle machine: torchrun imports torch."""

CONF = {"last_call_timeout": "1", "insecure": "1"}


class TorchrunJob:
    """The agents, by name, and the records of their workers."""

    def __init__(self, folder: Path, endpoint: str, nodes: str, marker: str, flags: Sequence[str]) -> None:
        """Start nothing yet; `flags` are for every torchrun."""
        self._folder = folder
        self._endpoint = endpoint
        self._nodes = nodes
        self._marker = marker
        self._flags = tuple(flags)
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str, conf: dict[str, str] | None = None, worker: Path = WORKER) -> None:
        """Start agents."""
        pairs = ",".join(f"{key}={value}" for key, value in {**CONF, **(conf or {})}.items())
        for name in names:
            with (self._folder / f"{name}.log").open("wb") as log:
                self.agents[name] = subprocess.Popen(
                    [
                        *(str(TORCHRUN), "--rdzv-backend=rallypoint", f"--rdzv-endpoint={self._endpoint}"),
                        *(f"--rdzv-id={RUN}", f"--nnodes={self._nodes}", f"--rdzv-conf={pairs}"),
                        *("--nproc-per-node=1", "--log-dir", str(self._folder / "logs"), *self._flags),
                        *(str(worker), str(self._folder), name),
                    ],
                    env=clean_environment(
                        MARKER=self._marker,
                        LOGLEVEL="INFO",
                        RALLYPOINT_LOG_LEVEL="info",
                        PYTHONPATH=str(Path(__file__).parents[1]),
                    ),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )

    def started(self) -> list[dict[str, Any]]:
        """Return the records that all workers wrote at their start."""
        path = self._folder / "started"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def round_of(self, names: Collection[str], after: int = 0) -> dict[str, dict[str, Any]]:
        """Wait for a round with these agents and no others; return the records of their workers, by agent."""
        found: dict[str, dict[str, Any]] = {}

        def runs() -> bool:
            nonlocal found
            rounds: dict[int, dict[str, dict[str, Any]]] = {}
            for line in self.started():
                rounds.setdefault(int(line["RALLYPOINT_ROUND"]), {})[line["agent"]] = line
            found = rounds[max(rounds)] if rounds else {}
            self.check()
            return bool(found) and max(rounds) > after and found.keys() == set(names)

        wait_until(runs, f"a round of {', '.join(sorted(names))} after round {after}\n", PATIENCE)
        assert sorted(int(line["RANK"]) for line in found.values()) == list(range(len(found)))
        assert {int(line["WORLD_SIZE"]) for line in found.values()} == {len(found)}
        assert len({(line["MASTER_ADDR"], line["MASTER_PORT"]) for line in found.values()}) == 1
        return found

    def check(self) -> None:
        """Fail if an agent has ended with an error, other than those that the test has ended."""
        for name, agent in self.agents.items():
            assert agent.poll() in (None, 0), f"{name} ended with {agent.poll()}:\n{self.log(name)}"

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to an agent, and return its exit code; it is no longer part of the job."""
        agent = self.agents.pop(name)
        agent.send_signal(number)
        return agent.wait(PATIENCE)

    def touch(self, name: str) -> None:
        """Create a file for which the workers wait."""
        (self._folder / name).touch()

    def finish(self) -> None:
        """Let the workers succeed; every agent ends with 0."""
        self.touch("finish")
        assert self.codes() == dict.fromkeys(self.agents, 0), self.logs()

    def codes(self) -> dict[str, int]:
        """Wait for the agents; return their exit codes."""
        return {name: agent.wait(PATIENCE) for name, agent in self.agents.items()}

    def log(self, name: str) -> str:
        """Return the output of an agent."""
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def logs(self) -> str:
        """Return the output of all agents."""
        return "\n".join(f"--- {name}\n{self.log(name)}" for name in self.agents)

    def run(self) -> pb.Run:
        """Return the run from the service."""
        shown = rallypoint(*("status", RUN, "--rdzv-endpoint", self._endpoint, "--insecure", "--json"))
        assert shown.returncode == 0, shown.stderr
        return Parse(shown.stdout, pb.GetRunResponse()).run


@contextmanager
def torchrun_job(
    folder: Path, endpoint: str, nodes: str, *flags: str, max_restarts: int = 0
) -> Iterator[TorchrunJob]:
    """A job without agents yet; afterwards, no process of it is left."""
    folder.mkdir(exist_ok=True)
    with fresh_marker() as marker:
        job = TorchrunJob(folder, endpoint, nodes, marker, [f"--max-restarts={max_restarts}", *flags])
        try:
            yield job
        finally:
            for agent in job.agents.values():
                agent.kill()
                agent.wait(PATIENCE)


def is_alive(pid: int) -> bool:
    """Return True if a process runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
