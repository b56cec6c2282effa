"""The three services under attack: their methods, the life of their streams, their flags, and their limits."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from google.protobuf.descriptor import FileDescriptor, MethodDescriptor
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2  # type: ignore[import-untyped]

from hostile.harmless import HARMLESS_COMMANDS, harmless_job
from rallypoint.agent.v1 import supervisor_service_pb2
from rallypoint.rendezvous.v1 import rendezvous_service_pb2, state_service_pb2, store_service_pb2
from rallypoint.server.v1 import server_service_pb2
from rallypoint.timer.v1 import timer_service_pb2

MOST_RUNS = 40
MOST_NODES = 3
MOST_TIMERS = 100
MOST_JOBS = 8


@dataclass(frozen=True, slots=True)
class Life:
    """The messages of a client on a stream that has an order."""

    path: str
    words: tuple[str, ...]
    """Fields of the stream's messages, or of their actions, in the order of an honest client."""
    resume: str
    """The first word of a client that reconnects."""
    repeated: tuple[str, ...]
    """Words that a client sends far too often."""
    admit: Callable[[Any, Random], None]
    """Set values in the message of the first word with which the service accepts it."""
    actions: str = ""
    """The repeated field that holds the actions; empty: each message is one action."""


@dataclass(frozen=True, eq=False)
class Kind:
    """A service under attack."""

    name: str
    """The role in `rallypoint serve`."""
    files: tuple[FileDescriptor, ...]
    flags: Mapping[str, object]
    """Flags of the server: limits so small that they are reached long before an attack is half over."""
    seldom: tuple[str, ...]
    """Suffixes of the paths to which fewer requests are sent."""
    waiting: tuple[str, ...] = ()
    """Suffixes of the paths of unary methods that may wait longer than their callers."""
    life: Life | None = None
    admit: Callable[[Any, Random], None] = lambda _request, _draw: None
    """Set values in some unary requests with which the service accepts them."""
    harmless: Callable[[MethodDescriptor, bytes], bytes] = lambda _method, data: data
    """Return a harmless request in the place of a harmful one."""
    runs_jobs: bool = False
    """True if it runs jobs, which have their own errors; it logs them with a `run_id` or `rank`."""
    most_growth: int = 16
    """MiB that the second half of an attack may add to the server's memory: a request then leaks less than 330 bytes.
    The placement by the allocator makes a difference of some MiB either way."""
    by_luck: tuple[str, ...] = ()
    """Suffixes of the paths that 10,000 requests need not reach: few name a worker that runs just then."""
    worth: int = 25
    """Number of pairs of code and reason that 10,000 requests get at least."""

    @property
    def methods(self) -> Mapping[str, MethodDescriptor]:
        """Return every method of the server, by its path."""
        return _METHODS[self.name]

    @property
    def services(self) -> list[str]:
        """Return the full names of its own services."""
        return [service.full_name for file in self.files for service in file.services_by_name.values()]

    def __str__(self) -> str:
        return self.name


def _join(join: Any, draw: Random) -> None:
    """Set names and settings with which a node is accepted, into one of few runs."""
    junk = draw.random() < 0.3
    join.run_id = f"junk-{draw.randrange(10**9)}" if junk else f"run-{draw.randrange(12)}"
    join.node_id = draw.choice("abcd")
    join.address, join.local_world_size = "10.0.0.1", 2
    join.settings.Clear()
    join.settings.min_nodes = join.settings.max_nodes = 1


def _subscribe(subscribe: Any, draw: Random) -> None:
    """Set the names of a node, and a lease that is sometimes the latest."""
    junk = draw.random() < 0.1
    subscribe.Clear()
    subscribe.run_id = f"junk-{draw.randrange(10**9)}" if junk else f"run-{draw.randrange(4)}"
    subscribe.node_id = draw.choice("abcd")
    subscribe.lease = draw.choice((0, 1, 1, 1, 2))
    subscribe.token = draw.choice((b"", b"value"))
    subscribe.incarnation = draw.choice(("", "", "", "first", "second"))


def _admit_timer(request: Any, draw: Random) -> None:
    """Set the fields of a caller that is no agent; or of the next page of a list."""
    known = request.DESCRIPTOR.fields_by_name
    if draw.random() < 0.3:
        return
    for name in {"lease", "token"} & set(known):
        request.ClearField(name)
    if "page_token" in known:
        position = [draw.choice(("run-5", "\ud800", "x" * 2000, "\0")) for _ in range(draw.choice((2, 4)))]
        token = base64.urlsafe_b64encode(json.dumps(position).encode()).decode()
        request.page_token = token if draw.random() < 0.5 else ""
        request.page_size = draw.choice((0, 1, 2))


def _admit_job(request: Any, draw: Random) -> None:
    """Sometimes set a small job that ends soon; or make a request about such a job."""
    known = request.DESCRIPTOR.fields_by_name
    # More runs than for the other services: a closed run accepts no more jobs.
    run_id = f"run-{draw.randrange(40)}"
    if "run_id" in known and draw.random() < 0.5:
        request.run_id = run_id
    if "spec" in known and draw.random() < 0.5:
        request.ClearField("launch_id")
        for name in ("min_nodes", "max_nodes", "rendezvous_endpoint", "rendezvous_settings", "options"):
            if draw.random() < 0.9:
                request.spec.ClearField(name)
        request.spec.run_id = run_id
        request.spec.command[:] = draw.choice(HARMLESS_COMMANDS)
    for name in ("ranks", "cursors", "grace"):
        if name in known and draw.random() < 0.5:
            request.ClearField(name)


RENDEZVOUS = Kind(
    "rendezvous",
    (
        rendezvous_service_pb2.DESCRIPTOR,
        store_service_pb2.DESCRIPTOR,
        state_service_pb2.DESCRIPTOR,
        server_service_pb2.DESCRIPTOR,
    ),
    {
        "--journal": "sqlite:journal.db",
        "--max-runs": MOST_RUNS,
        "--max-nodes-per-run": MOST_NODES,
        "--max-subscribers-per-run": 3,
        "--max-events-per-run": 200,
        "--max-event-bytes-per-run": 256 * 1024,
        "--run-ttl": 1,
        "--message-rate": 100,
        "--message-burst": 40,
        "--max-store-bytes-per-run": 256 * 1024,
        "--max-store-keys-per-run": 100,
        "--max-store-waiters-per-run": 4,
        "--max-states": 20,
        "--max-states-per-client": 10,
        "--max-state-bytes": 1024 * 1024,
        "--max-state-watchers": 5,
    },
    # Closed runs can't be joined any more: with as many of these requests as of others, few others would have effect.
    seldom=("/CloseRun", "/EvictNode", "/List", "/Check"),
    waiting=("/Get", "/MultiGet", "/Wait"),
    # Methods on a node's stream, and those that need a few messages in their order to have an effect.
    life=Life(
        "/rallypoint.rendezvous.v1.RendezvousService/Join",
        (
            "join",
            "heartbeat",
            "confirm",
            "started",
            "worker_failed",
            "succeeded",
            "heartbeat",
            "depart",
            "leave",
        ),
        resume="resume",
        repeated=("heartbeat", "confirm", "join"),
        admit=_join,
    ),
)

TIMER = Kind(
    "timer",
    (timer_service_pb2.DESCRIPTOR, server_service_pb2.DESCRIPTOR),
    {
        "--learned": "learned.json",
        "--learn-warm-up": 2,
        "--learn-least": 0.01,
        "--learned-retention": 1,
        "--stall-after": 0.1,
        "--reoffer-interval": 0.1,
        "--expiry-retention": 1,
        "--max-timers": MOST_TIMERS,
        "--max-timers-per-node": 6,
        "--max-nodes": 40,
        "--max-scopes-per-run": 10,
        "--max-learned-runs": 10,
    },
    seldom=("/ForgetScopes", "/Check"),
    life=Life(
        "/rallypoint.timer.v1.TimerService/Supervise",
        (
            "subscribe",
            "learned",
            "acquire",
            "acquire",
            "progress",
            "registered",
            "acquire",
            "observe",
            "progress",
            "acknowledge",
            "release",
            "observe",
            "clear",
        ),
        resume="subscribe",
        repeated=("acquire", "progress", "observe", "acknowledge"),
        admit=_subscribe,
        actions="actions",
    ),
    admit=_admit_timer,
    worth=6,
)

AGENT = Kind(
    "agent",
    (supervisor_service_pb2.DESCRIPTOR, server_service_pb2.DESCRIPTOR),
    {"--max-jobs": MOST_JOBS},
    seldom=("/StopJob", "/Drain", "/Check"),
    admit=_admit_job,
    harmless=harmless_job,
    runs_jobs=True,
    # It keeps a hundred ended jobs, a number reached only after 12,000 requests, with environments of up to some MiB.
    most_growth=48,
    by_luck=("/ReapWorker", "/StreamLogs"),
    worth=7,
)

KINDS: Mapping[str, Kind] = {kind.name: kind for kind in (RENDEZVOUS, TIMER, AGENT)}

_METHODS: Mapping[str, Mapping[str, MethodDescriptor]] = {
    kind.name: {
        f"/{service.full_name}/{method.name}": method
        for file in (*kind.files, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
        for service in file.services_by_name.values()
        for method in service.methods
    }
    for kind in KINDS.values()
}
