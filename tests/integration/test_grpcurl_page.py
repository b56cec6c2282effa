"""docs/grpcurl.md: each command of the page gets the reply that the page shows.

tests/house/test_grpcurl_page.py compares the two tools, and the requests with the contract.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from cli.cli_process import RALLYPOINT, clean_environment, rallypoint
from integration.daemons import Cluster
from rallypoint.agent.v1 import supervisor_service_pb2 as agent_pb
from rallypoint.agent.v1 import supervisor_service_pb2_grpc as agent_grpc
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.timer.v1 import timer_service_pb2 as timer_pb
from rallypoint.timer.v1 import timer_service_pb2_grpc as timer_grpc
from support.console_page import TOOLS, Example, examples
from support.ports import free_port
from support.processes import fresh_marker
from support.waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.slow]

WORKER = """
import os, time
from rallypoint.timer import expires, progress
from rallypoint.worker.store import Store

rank = int(os.environ["RANK"])
print(f"rank {rank} loads", flush=True)
for _ in range(30):
    with expires(after="auto", scope="step"):
        time.sleep(0.001)
progress(40 if rank == 1 else 50)
if rank == 0:
    Store.from_environment().set("checkpoint/latest", "/data/step-50.pt")
print(f"rank {rank} trains", flush=True)
time.sleep(3600)
"""
# A node whose connection broke stays in the run for longer than the test takes.
SETTINGS = {"disconnect_grace": "1800", "keep_alive_max_attempt": "360", "last_call_timeout": "600"}
WATCHES = 2
ROLES = {
    "rendezvous": ("--journal", "memory", "--max-watches-per-client", str(WATCHES)),
    "timer": ("--learned", "none"),
    "agent": (),
}


@dataclass(frozen=True)
class Scene:
    """The services of the page and its runs.

    Attributes:
        folder: For the sockets, and for the certificates and the token of the service with a TCP port.
        network: Address of that service.
    """

    folder: Path
    network: str

    def output(self, example: Example) -> str:
        """Run a command of the page; kill one that does not end when it has written the expected lines."""
        script = f"{example.before}{example.command}".replace("head:29400", self.network)
        environment = clean_environment(
            RALLYPOINT_RUNTIME_DIR=str(self.folder), PATH=f"{RALLYPOINT.parent}:{os.environ['PATH']}"
        )
        process = subprocess.Popen(
            ["bash", "-c", script],
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=environment,
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            if example.goes_on:
                return "".join(process.stdout.readline() for _ in example.lines)
            return process.communicate(timeout=PATIENCE)[0]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@contextmanager
def scene(folder: Path) -> Iterator[Scene]:
    """Start the services, and create the state that the page shows.

    job-16 has failed. job-17 runs on host-1 and host-2; the agent of host-2 was killed.
    """
    with fresh_marker() as marker, ExitStack() as stack:
        made = Cluster(folder, marker, stack)
        network = serve_network(made)
        addresses = {role: f"unix:{folder}/{role}.sock" for role in ROLES}
        for role, flags in ROLES.items():
            made.start("serve", role, "--host", addresses[role], *flags)
        channels = [stack.enter_context(grpc.insecure_channel(address)) for address in addresses.values()]
        for channel in channels:
            grpc.channel_ready_future(channel).result(PATIENCE)
        run_jobs(made, addresses, *channels)
        yield Scene(folder, network)


def serve_network(made: Cluster) -> str:
    """Start a service with certificates, a policy and tokens; return its address."""
    folder, port = made.folder, free_port()
    for command in (
        ("tls", "init", folder, "localhost", "--client", "me"),
        ("token", "key", folder),
        ("token", "issue", "alice", "--key", folder / "token.key", "--role", "operator"),
    ):
        result = rallypoint(*command)
        assert result.returncode == 0, result.stderr
    (folder / "alice.token").write_text(result.stdout)
    (folder / "policy").write_text('[[grant]]\nnames = ["bob"]\nroles = ["observer"]\nruns = ["*"]\n')
    files = {"cert": "server.pem", "key": "server.key", "client-ca": "ca.pem"}
    tls = [argument for flag, name in files.items() for argument in (f"--tls-{flag}", folder / name)]
    keys = ("--token-keys", folder / "token.pub", "--policy", folder / "policy")
    service = made.start("serve", "rendezvous", "--port", str(port), "--journal", "memory", *keys, *tls)
    wait_until(lambda: "ready" in service.said, "the service with certificates")
    return f"localhost:{port}"


def run_jobs(
    made: Cluster,
    addresses: Mapping[str, str],
    rendezvous: grpc.Channel,
    timer: grpc.Channel,
    host: grpc.Channel,
) -> None:
    """Run the jobs of the page; return when the services have the state that it shows."""
    runs = pb_grpc.RendezvousServiceStub(rendezvous)
    timers = timer_grpc.TimerServiceStub(timer)
    agent = agent_grpc.SupervisorServiceStub(host)
    script = made.folder / "train.py"
    script.write_text(WORKER)
    spec = agent_pb.JobSpec(
        run_id="job-16",
        node_id="host-1",
        rendezvous_endpoint=addresses["rendezvous"],
        timer_endpoint=addresses["timer"],
        command=["${python}", "-c", "raise ValueError('no data')"],
        log_dir=str(made.folder / "logs"),
    )
    agent.LaunchJob(agent_pb.LaunchJobRequest(spec=spec))
    for _ in agent.WatchJob(agent_pb.WatchJobRequest(run_id="job-16"), timeout=PATIENCE):
        pass  # to its end

    spec.run_id, spec.command[1:] = "job-17", [str(script)]
    spec.min_nodes, spec.max_nodes, spec.local_world_size = 1, 2, 2
    spec.rendezvous_settings.update(SETTINGS)
    agent.LaunchJob(agent_pb.LaunchJobRequest(spec=spec))
    wait_until(lambda: len(runs.ListRuns(pb.ListRunsRequest()).runs) == 2, "host-1 to join")
    second = made.start(
        *("run", "--rdzv-endpoint", addresses["rendezvous"], "--timer-endpoint", addresses["timer"]),
        *("--rdzv-id", "job-17", "--node-id", "host-2", "--nnodes", "1:2", "--log-dir", made.folder / "logs"),
        *("--rdzv-conf", ",".join(f"{name}={value}" for name, value in SETTINGS.items()), script),
    )
    timers.AcquireTimer(
        timer_pb.AcquireTimerRequest(
            run_id="job-15", node_id="host-9", worker_id="0@1", scope="checkpoint", after=Duration(nanos=1)
        )
    )

    def all_reported() -> bool:
        scopes = timers.ListScopes(timer_pb.ListScopesRequest(run_id="job-17")).scopes
        progress = timers.GetProgress(timer_pb.GetProgressRequest(run_id="job-17"))
        return [scope.count for scope in scopes] == [90] and len(progress.slowest) == 3

    wait_until(all_reported, "the progress of the workers")
    wait_until(lambda: "rank 2 trains" in second.printed, "the worker of host-2")
    second.process.kill()
    gone = pb.ListNodesRequest(run_id="job-17", filter=pb.NodeFilter(connected=False), owner_only=True)
    wait_until(lambda: len(runs.ListNodes(gone).nodes) == 1, "the end of host-2's connection")


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Open as many watches as the rendezvous service allows."""
    with grpc.insecure_channel(f"unix:{folder}/rendezvous.sock") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE) for _ in range(WATCHES)]
        for watch in watches:
            next(watch)
        yield


@pytest.mark.parametrize("tool", TOOLS)
def test_each_command_gets_the_reply_that_the_page_promises(tool: str) -> None:
    if not (RALLYPOINT.with_name(tool).exists() or shutil.which(tool)):
        pytest.skip(f"needs {tool} on the PATH")
    if not shutil.which("jq"):
        pytest.skip("needs jq (apt install jq)")
    wrong = []
    # A short path: a Unix socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="rally") as folder, scene(Path(folder)) as made:
        for example in examples(tool):
            with watched(made.folder) if "TOO_MANY_WATCHERS" in example.reply else nullcontext():
                output = made.output(example)
            if not example.is_answered_by(output):
                wrong.append(f"$ {example.command}{output}(the page has)\n{example.reply}")
    assert not wrong, "\n".join(wrong)
