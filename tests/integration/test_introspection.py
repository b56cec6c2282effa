"""Standard gRPC tools can inspect a server: reflection, health, and calls from a command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]

from cli.cli_process import clean_environment, rallypoint, service
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.integration

BUF = Path(sys.executable).with_name("buf")
OF_ALL = {
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
    "rallypoint.server.v1.ServerService",
}
RENDEZVOUS = {f"rallypoint.rendezvous.v1.{name}Service" for name in ("Rendezvous", "Store", "State")}
SERVICES = {
    "rendezvous": RENDEZVOUS,
    "timer": {"rallypoint.timer.v1.TimerService"},
    "agent": {"rallypoint.agent.v1.SupervisorService"} | RENDEZVOUS,
}


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    """The address of each role, which runs in its own process."""
    with ExitStack() as stack:
        yield {
            role: stack.enter_context(
                service(role, *(["--journal", "memory"] if role == "rendezvous" else []))
            )
            for role in SERVICES
        }


def buf(address: str, *arguments: str) -> str:
    """Run `buf curl` at a Unix socket, with schemas from reflection only; return its output."""
    if not BUF.exists():
        pytest.skip("needs buf (buf-bin)")
    socket = ("--unix-socket", address.removeprefix("unix:"))
    command = [str(BUF), "curl", "--http2-prior-knowledge", "--protocol", "grpc", *socket, *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, env=clean_environment(), timeout=PATIENCE, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def call(address: str, method: str, **request: Any) -> dict[str, Any]:
    """Call a method with `buf curl`."""
    answer: dict[str, Any] = json.loads(
        buf(address, "--data", json.dumps(request), f"http://localhost/{method}")
    )
    return answer


def reflected(address: str, **request: str) -> Any:
    """Return the response of the reflection service to a request."""
    with grpc.insecure_channel(address) as channel:
        requests = iter([reflection_pb2.ServerReflectionRequest(**request)])
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = stub.ServerReflectionInfo(requests, timeout=PATIENCE)
    return answer


@pytest.mark.parametrize("role", SERVICES)
def test_reflection_describes_all_that_it_lists(addresses: dict[str, str], role: str) -> None:
    """docs/operating.md has the command, which fails if a listed service has no description."""
    methods = buf(addresses[role], "--list-methods", "http://localhost").split()
    assert {method.rpartition("/")[0] for method in methods} == SERVICES[role] | OF_ALL


@pytest.mark.parametrize("role", SERVICES)
def test_reflection_lists_the_services(addresses: dict[str, str], role: str) -> None:
    """The list has the services of the role, health, and reflection itself."""
    assert set(buf(addresses[role], "--list-services", "http://localhost").split()) == SERVICES[role] | OF_ALL


@pytest.mark.parametrize(
    ("request_", "described"),
    [
        ({"file_containing_symbol": "rallypoint.rendezvous.v1.WorkerFailure"}, True),
        ({"file_containing_symbol": "google.rpc.ErrorInfo"}, True),
        ({"file_containing_symbol": "rallypoint.journal.v1.JournalRecord"}, False),
        ({"file_containing_symbol": "rallypoint.etcd.v1.RangeRequest"}, False),
        ({"file_by_filename": "rallypoint/journal/v1/journal.proto"}, False),
    ],
    ids=str,
)
def test_reflection_describes_the_api_and_not_the_storage(
    addresses: dict[str, str], request_: dict[str, str], described: bool
) -> None:
    """A server has the descriptions of both, but clients can read only those of the API and of its errors."""
    answer = reflected(addresses["rendezvous"], **request_)
    assert answer.HasField("file_descriptor_response") == described
    assert answer.error_response.error_code == (0 if described else grpc.StatusCode.NOT_FOUND.value[0])


@pytest.mark.parametrize("role", SERVICES)
def test_reflection_has_the_json_names_of_all_fields(addresses: dict[str, str], role: str) -> None:
    """grpcurl prints JSON names; if they are missing, it prints the names of the .proto files, unlike buf."""
    for service_name in SERVICES[role]:
        answer = reflected(addresses[role], file_containing_symbol=service_name)
        for content in answer.file_descriptor_response.file_descriptor_proto:
            messages = [*FileDescriptorProto.FromString(content).message_type]
            for message in messages:
                messages += message.nested_type
                assert [field.name for field in message.field if not field.json_name] == []


@pytest.mark.parametrize("role", SERVICES)
def test_every_service_is_serving(addresses: dict[str, str], role: str) -> None:
    """The health check succeeds by full name, as orchestrators send it, and for the server as a whole."""
    with grpc.insecure_channel(addresses[role]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ["", *SERVICES[role]]:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_run_can_be_inspected_and_controlled_by_hand(addresses: dict[str, str], tmp_path: Path) -> None:
    """buf curl alone launches it on a daemon, reads it, and closes it; `rallypoint status` agrees."""
    method = "rallypoint.agent.v1.SupervisorService"
    spec = {
        "runId": "by-hand",
        "nodeId": "here",
        "rendezvousEndpoint": addresses["rendezvous"],
        "timerEndpoint": addresses["timer"],
        "command": ["sleep", "300"],
        "logDir": str(tmp_path),
    }
    assert call(addresses["agent"], f"{method}/LaunchJob", spec=spec) == {
        "nodeId": "here",
        "rendezvousEndpoint": addresses["rendezvous"],
    }
    wait_until_final(addresses["rendezvous"], "by-hand")
    run = call(addresses["rendezvous"], "rallypoint.rendezvous.v1.RendezvousService/GetRun", runId="by-hand")[
        "run"
    ]
    assert (run["phase"], run["round"], run["worldSize"], run["nodes"][0]["nodeId"]) == (
        "PHASE_FINAL",
        1,
        1,
        "here",
    )
    job = call(addresses["agent"], f"{method}/GetJob")["job"]
    assert (job["state"], job["round"]) == ("JOB_STATE_RUNNING", 1)
    shown = rallypoint("status", "by-hand", "--rdzv-endpoint", addresses["rendezvous"]).stdout
    assert shown.startswith("run by-hand: FINAL, round 1, 1 workers on 1 nodes")
    end = call(
        addresses["rendezvous"],
        "rallypoint.rendezvous.v1.RendezvousService/CloseRun",
        runId="by-hand",
        reason="seen enough",
    )
    assert end == {"runEnd": {"outcome": "OUTCOME_CANCELLED", "detail": "closed by an operator: seen enough"}}


def wait_until_final(address: str, run_id: str) -> None:
    """Wait until a run exists, then watch it until its workers run."""
    with grpc.insecure_channel(address) as channel:
        stub = pb_grpc.RendezvousServiceStub(channel)
        wait_until(
            lambda: any(run.run_id == run_id for run in stub.ListRuns(pb.ListRunsRequest()).runs), run_id
        )
        states = stub.WatchRun(pb.WatchRunRequest(run_id=run_id), timeout=PATIENCE)
        assert any(response.run.phase == pb.PHASE_FINAL for response in states)
        states.cancel()
