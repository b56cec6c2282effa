"""Members of a run that are the example clients: their processes, and the records of their workers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from cli.cli_process import RALLYPOINT, clean_environment
from ha.waiting import PATIENCE, until
from programs import Line, Program
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from support.ports import free_port

EXAMPLES = Path(__file__).parents[2] / "examples" / "clients"
WORKER = Path(__file__).with_name("meeting_recorder.py")
MAX_RESTARTS = 1
LAST_CALL = 0.5  # seconds

_COMMANDS = {
    "go": (str(EXAMPLES / "build" / "go" / "member"),),
    "cpp": (str(EXAMPLES / "build" / "cpp" / "member"),),
    "node": ("node", str(EXAMPLES / "build" / "node" / "member.js")),
    "shell": (str(EXAMPLES / "shell" / "member"),),
}
_CHOSEN = os.environ.get("RALLYPOINT_TEST_CLIENTS", "").split()
CLIENTS = {name: command for name, command in _COMMANDS.items() if name in _CHOSEN}
"""Commands of the clients that are tested, by language."""
SEARCH_PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
"""PATH of the clients: the shell's finds `buf` beside Python."""
PYTHON = "python"
"""The node of an agent, `rallypoint run`."""

BUILT = pytest.mark.skipif(not CLIENTS, reason="needs the built example clients: make test-clients")


class Members:
    """The members of one run, and the records of their workers.

    Attributes:
        programs: the members by name of their node, which is the language; and watchers.
    """

    def __init__(
        self, folder: Path, endpoints: str, run_id: str, nodes: str, tls: Sequence[str] = ()
    ) -> None:
        """Start nothing yet.

        Args:
            folder: for logs and records.
            endpoints: of the rendezvous service, or of its replicas.
            run_id: name of the run.
            nodes: in the form of `--nnodes`.
            tls: flags of the connection; without them it is plaintext.
        """
        self.programs: dict[str, Program] = {}
        self._folder = folder
        self._endpoints = endpoints
        self._run_id = run_id
        self._nodes = nodes
        self._tls = tuple(tls)

    def start(self, *nodes: str) -> None:
        """Start clients, or an agent, each as the node named after its language."""
        worker = (str(WORKER), str(self._folder))
        for node in nodes:
            if node == PYTHON:
                self._start(
                    node, str(RALLYPOINT), "run", *(self._tls or ["--insecure"]),
                    "--rdzv-endpoint", self._endpoints, "--rdzv-id", self._run_id, "--node-id", node,
                    "--local-addr", "127.0.0.1", "--nnodes", self._nodes, "--max-restarts", str(MAX_RESTARTS),
                    "--rdzv-conf", f"last_call_timeout={LAST_CALL}", *worker,
                )  # fmt: skip
            else:
                self._start(
                    node, *CLIENTS[node], "member", *self._tls, "--rendezvous", self._endpoints,
                    "--run", self._run_id, "--node", node, "--address", "127.0.0.1",
                    "--nnodes", self._nodes, "--max-restarts", str(MAX_RESTARTS),
                    "--last-call-timeout", str(LAST_CALL), "--", sys.executable, *worker,
                )  # fmt: skip

    def watch(self, language: str) -> Program:
        """Start a client that watches the run."""
        run = (*self._tls, "--rendezvous", self._endpoints, "--run", self._run_id)
        return self._start(f"{language}-watch", *CLIENTS[language], "watch", *run)

    def _start(self, name: str, *command: str) -> Program:
        self.programs[name] = Program(name, command, self._folder, clean_environment(PATH=SEARCH_PATH))
        return self.programs[name]

    def records(self, node: str) -> list[dict[str, Any]]:
        """Return the records of a node's workers, one record for each worker that met the others."""
        path = self._folder / f"{node}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    async def meet(self, nodes: Collection[str], *, after: int = 0) -> dict[str, dict[str, Any]]:
        """Wait until workers of exactly these nodes have met in a round later than `after`; return their records."""

        async def met() -> str:
            for name, program in self.programs.items():
                if name in nodes and not program.running:
                    raise AssertionError(f"{name} ended: {program.report[-2000:]}")
            last = {node: self.records(node)[-1] for node in nodes if self.records(node)}
            rounds = {record["round"] for record in last.values()}
            ranks = [record["ranks"] for record in last.values()]
            met = len(rounds) == 1 and min(rounds) > after and ranks == [[*range(len(nodes))]] * len(nodes)
            return "" if met else f"they have met as {last}"

        await until(f"a round of {sorted(nodes)} after round {after}", met, PATIENCE)
        return {node: self.records(node)[-1] for node in nodes}

    def finish(self) -> None:
        """Let all workers end with exit code 0."""
        (self._folder / "finish").touch()

    async def ended(self) -> dict[str, int]:
        """Wait for the end of all programs; return their exit codes."""
        return {name: await program.ended(PATIENCE) for name, program in self.programs.items()}

    async def close(self) -> None:
        """Kill all processes that are left."""
        for program in self.programs.values():
            await program.kill()


class Service:
    """The rendezvous service over SQLite, at one port over all its processes."""

    def __init__(self, folder: Path, *tls: str) -> None:
        """Start nothing yet; `tls`: its flags for TLS; without them it is plaintext."""
        self.endpoint = f"127.0.0.1:{free_port()}"
        self._folder = folder
        self._security = tls or ("--insecure",)
        self._program: Program | None = None

    async def start(self, program: Path = RALLYPOINT) -> None:
        """Start it, or start it again; returns once it serves. `program`: the `rallypoint` of a version."""
        journal = f"sqlite:{self._folder / 'journal.db'}"
        port = self.endpoint.rpartition(":")[2]
        command = [str(program), "serve", "rendezvous", *self._security, "--port", port, "--journal", journal]
        self._program = Program(
            "service", [*command, "--log-format", "json"], self._folder, clean_environment()
        )
        await self._program.log.first("the service to be ready", lambda line: line.event == "ready")

    async def kill(self) -> None:
        """SIGKILL it."""
        if self._program is not None:
            await self._program.kill()

    async def stop(self) -> None:
        """Let it drain, and end."""
        assert self._program is not None
        assert await self._program.stop(PATIENCE) == 0

    def log(self) -> Sequence[Line]:
        """Return the records of its last process."""
        assert self._program is not None
        return self._program.log.items

    async def run(self, run_id: str) -> pb.Run:
        """Return a run from the service."""
        return await get_run(self.endpoint, run_id)


async def get_run(endpoint: str, run_id: str) -> pb.Run:
    """Return a run from the server at an address."""
    async with grpc.aio.insecure_channel(endpoint) as channel:
        stub = pb_grpc.RendezvousServiceStub(channel)
        request = pb.GetRunRequest(run_id=run_id)
        return (await stub.GetRun(request, timeout=PATIENCE, wait_for_ready=True)).run


@asynccontextmanager
async def members_of_a_service(folder: Path, nodes: str) -> AsyncIterator[tuple[Members, Service]]:
    """A service, and members of a run in it to be started; all processes have ended afterwards."""
    service = Service(folder)
    members = Members(folder, service.endpoint, "polyglot", nodes)
    try:
        await service.start()
        yield members, service
    finally:
        await members.close()
        await service.kill()
