"""Answers that come a page at a time, put together."""

from __future__ import annotations

from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc


async def all_runs(stub: pb_grpc.RendezvousServiceAsyncStub) -> pb.ListRunsResponse:
    """Every run, without its nodes."""
    whole = await stub.ListRuns(pb.ListRunsRequest())
    while whole.next_page_token:
        page = await stub.ListRuns(pb.ListRunsRequest(page_token=whole.next_page_token))
        whole.next_page_token = ""  # of two values, the later one is kept, unless it is empty
        whole.MergeFrom(page)
    return whole


async def whole_run(
    run_id: str, stub: pb_grpc.RendezvousServiceAsyncStub, *, owner_only: bool = False
) -> pb.GetRunResponse:
    """A run with all its nodes. One that changes meanwhile is shown as it was first, each of its nodes once.

    Args:
        run_id: The run.
        stub: Whom to ask.
        owner_only: Have only the replica answer that owns the run, which knows who is connected.
    """
    page = whole = await stub.GetRun(pb.GetRunRequest(run_id=run_id, owner_only=owner_only))
    seen = {node.node_id for node in whole.run.nodes}
    while page.next_page_token:
        request = pb.GetRunRequest(run_id=run_id, page_token=page.next_page_token, owner_only=owner_only)
        page = await stub.GetRun(request)
        whole.run.nodes.extend(node for node in page.run.nodes if node.node_id not in seen)
        seen.update(node.node_id for node in page.run.nodes)
    whole.next_page_token = ""
    return whole
