"""The leases of the accepted nodes: a write to a store needs one, and no seed can know its token."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from hostile.requests import Request
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import store_service_pb2 as store_pb

_JOIN = "/rallypoint.rendezvous.v1.RendezvousService/Join"


class Insider:
    """Keeps the last lease that was read of each run; it may be over."""

    def __init__(self) -> None:
        self._writers: dict[str, store_pb.StoreWriter] = {}

    def learn(self, request: Request, answer: bytes) -> None:
        """Keep the lease in an answer, if there is one."""
        if request.path != _JOIN or not (lease := pb.JoinResponse.FromString(answer).lease).token:
            return
        with suppress(DecodeError):
            join = pb.JoinRequest.FromString(request.messages[0]).join
            writer = store_pb.StoreWriter(node_id=join.node_id, lease=lease.number, token=lease.token)
            self._writers[join.run_id] = writer

    def armed(self, request: Request) -> Request:
        """Return the request with the lease of a node of its run, if it can have one; one in four stays unchanged."""
        method = request.method
        if method is None or "writer" not in method.input_type.fields_by_name or request.number % 4 == 0:
            return request
        asked: Any = GetMessageClass(method.input_type)()
        try:
            asked.ParseFromString(request.messages[0])
        except DecodeError:
            return request
        if asked.run_id not in self._writers:
            return request
        asked.writer.CopyFrom(self._writers[asked.run_id])
        return replace(request, messages=(asked.SerializeToString(),))
