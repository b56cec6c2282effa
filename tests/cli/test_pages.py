"""Paged replies are shown as one, with any number of pages."""

from __future__ import annotations

from typing import Any

from rallypoint.cli.operator import all_runs, whole_run
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb


class Service:
    """Returns two runs, and two nodes, per page; between two pages the state changes."""

    def __init__(self, nodes: list[list[str]]) -> None:
        self.runs = [f"run-{number}" for number in range(5)]
        self.nodes = nodes

    def stub(self) -> Any:
        """Return itself, as the stub that it replaces."""
        return self

    async def ListRuns(self, request: pb.ListRunsRequest) -> pb.ListRunsResponse:
        page = [name for name in self.runs if name > request.page_token][:2]
        more = page[-1] != self.runs[-1]
        return pb.ListRunsResponse(
            runs=[pb.Run(run_id=name) for name in page], next_page_token=page[-1] if more else ""
        )

    async def GetRun(self, request: pb.GetRunRequest) -> pb.GetRunResponse:
        nodes = [pb.Node(node_id=name) for name in self.nodes[0]]
        count = sum(map(len, self.nodes))
        return pb.GetRunResponse(
            run=pb.Run(run_id=request.run_id, revision=10, nodes=nodes, node_count=count)
        )

    async def ListNodes(self, request: pb.ListNodesRequest) -> pb.ListNodesResponse:
        assert request.owner_only
        page = int(request.page_token or 0)
        more = str(page + 1) if page + 1 < len(self.nodes) else ""
        return pb.ListNodesResponse(
            nodes=[pb.Node(node_id=name) for name in self.nodes[page]], next_page_token=more
        )


async def test_all_runs_are_there() -> None:
    """Each run appears once, in order."""
    service = Service([])
    whole = await all_runs(service.stub())
    assert [run.run_id for run in whole.runs] == service.runs
    assert whole.next_page_token == ""


async def test_all_nodes_are_there() -> None:
    """The run is that of the first page; a node that moved between pages meanwhile appears once."""
    whole = await whole_run("digits", Service([["a", "b"], ["b", "c"], ["d"]]).stub(), owner_only=True)
    assert (whole.run.run_id, whole.run.revision) == ("digits", 10)
    assert [node.node_id for node in whole.run.nodes] == ["a", "b", "c", "d"]
