"""Two nodes under one name: the second is refused, where the name can rightly be only one node's."""

from __future__ import annotations

import asyncio
from functools import partial

from rallypoint.agent.config.job import JobConfig
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.calls import ask_any
from rallypoint.rpc.endpoint import SettingError
from rallypoint.rpc.errors import ServiceError
from rallypoint.rpc.replicas import Switchboard


async def refuse_twin(config: JobConfig) -> None:
    """Refuse to join where a node of the same name is at work.

    Joining would replace that node, as it should where an agent was started again: the agent before is gone then, and
    its stream with it. Two that are alive would replace one another. (Those that come in the same moment don't see
    each other; then the rendezvous service ends one of them.)

    Raises:
        SettingError: There is one; one line.
    """
    async with Switchboard(config.rendezvous.endpoint, config.rendezvous.tls) as board:
        try:
            async with asyncio.timeout(config.connect_timeout):
                nodes = await ask_any(
                    board, pb_grpc.RendezvousServiceStub, partial(_nodes, run_id=config.run_id)
                )
        except (TimeoutError, ServiceError):
            return  # there is no such run, or no service: whoever joins finds out which
    for node in nodes:
        if node.node_id == config.node_id and node.connected:
            raise SettingError(
                f"the node {config.node_id} is in run {config.run_id!r} already, on {node.address}: give every node "
                "a --node-rank of its own, and every job a --rdzv-id of its own"
            )


async def _nodes(stub: pb_grpc.RendezvousServiceAsyncStub, run_id: str) -> list[pb.Node]:
    nodes: list[pb.Node] = []
    token = ""
    while True:
        request = pb.GetRunRequest(run_id=run_id, page_token=token)
        page = await stub.GetRun(request, wait_for_ready=True)
        nodes.extend(page.run.nodes)
        token = page.next_page_token
        if not token:
            return nodes
