"""A timer service on a real socket with scripted replies."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from rallypoint.rpc.durations import to_duration
from rallypoint.rpc.runtime_folder import new_run_socket
from rallypoint.timer.v1 import timer_service_pb2 as pb
from rallypoint.timer.v1 import timer_service_pb2_grpc as pb_grpc


def timer(scope: str, state: pb.TimerState.ValueType, remaining: float, **more: Any) -> pb.Timer:
    """A timer of a minute that worker w0 of node a holds."""
    fields: dict[str, Any] = {
        "run_id": "digits",
        "node_id": "a",
        "worker_id": "w0",
        "after": to_duration(60.0),
    } | more
    return pb.Timer(scope=scope, state=state, remaining=to_duration(remaining), **fields)


class ScriptedTimers(pb_grpc.TimerServiceServicer):
    """Replies from its fields, a page at a time, and records the requests."""

    def __init__(self) -> None:
        self.address = ""
        self.page = 1_000
        self.timers: list[pb.Timer] = []
        # Timers that expire after the timers that count down were listed.
        self.runs_out: list[pb.Timer] = []
        self.scopes = pb.ListScopesResponse(warm_up=20, factor=5.0, least=to_duration(60.0))
        self.progress = pb.GetProgressResponse()
        self.asked: list[Any] = []

    def ListTimers(self, request: pb.ListTimersRequest, context: Any) -> pb.ListTimersResponse:
        """Return the matching timers, in the order of `timers`."""
        self.asked.append(request)
        wanted = [
            each
            for each in self.timers
            if request.run_id in ("", each.run_id)
            and request.node_id in ("", each.node_id)
            and (not request.states or each.state in request.states)
        ]
        first = int(request.page_token or 0)
        size = min(request.page_size, self.page)
        for each in self.runs_out:
            each.state, each.remaining.seconds = pb.TIMER_STATE_OFFERED, -1
        more = str(first + size) if len(wanted) > first + size else ""
        return pb.ListTimersResponse(timers=wanted[first : first + size], next_page_token=more)

    def ListScopes(self, request: pb.ListScopesRequest, context: Any) -> pb.ListScopesResponse:
        """Return two scopes per page."""
        self.asked.append(request)
        wanted = [each for each in self.scopes.scopes if request.run_id in ("", each.run_id)]
        first = int(request.page_token or 0)
        answer = pb.ListScopesResponse(scopes=wanted[first : first + 2])
        answer.warm_up, answer.factor = self.scopes.warm_up, self.scopes.factor
        answer.least.CopyFrom(self.scopes.least)
        answer.next_page_token = str(first + 2) if len(wanted) > first + 2 else ""
        return answer

    def ForgetScopes(self, request: pb.ForgetScopesRequest, context: Any) -> pb.ForgetScopesResponse:
        self.asked.append(request)
        gone = [
            each
            for each in self.scopes.scopes
            if each.run_id == request.run_id and request.scope in ("", each.scope)
        ]
        for each in gone:
            self.scopes.scopes.remove(each)
        return pb.ForgetScopesResponse(forgotten=len(gone))

    def GetProgress(self, request: pb.GetProgressRequest, context: Any) -> pb.GetProgressResponse:
        """Return the same progress for every run."""
        self.asked.append(request)
        answer = pb.GetProgressResponse()
        answer.CopyFrom(self.progress)
        del answer.slowest[request.page_size or 10 :]
        return answer


@contextmanager
def scripted_timers() -> Iterator[ScriptedTimers]:
    """Run the service for as long as the context lasts."""
    servicer = ScriptedTimers()  # type: ignore[abstract]  # the rest is never asked
    with ThreadPoolExecutor(2) as threads, new_run_socket("timer", "scripted") as endpoint:
        server = grpc.server(threads, options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_TimerServiceServicer_to_server(servicer, server)
        server.add_insecure_port(endpoint)
        servicer.address = endpoint
        server.start()
        try:
            yield servicer
        finally:
            server.stop(None).wait()
