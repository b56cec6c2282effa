"""`rallypoint evict`: take a node out of a run and keep it out, or let it in again."""

from __future__ import annotations

import click

from rallypoint.cli.nodes import Text
from rallypoint.cli.service_options import service_options
from rallypoint.rpc.endpoint import ClientTLS


@click.command()
@click.argument("run_id", type=Text())
@click.argument("node", type=Text())
@click.option("--reason", type=Text(), default="", help="Why; the node and the run's events show it.")
@click.option("--readmit", is_flag=True, help="Let a node that was taken out join again, instead.")
@service_options
def evict(
    *,
    run_id: str,
    node: str,
    rdzv_endpoint: str,
    reason: str,
    readmit: bool,
    timeout: float,
    tls: ClientTLS | None,
) -> None:
    """Take NODE out of RUN_ID and refuse it from now on: the others go on without it.

    `rallypoint status RUN_ID` has the names of its nodes, and of those that were taken out.
    """
    from rallypoint.cli.operator import ask  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb  # noqa: PLC0415

    request = pb.EvictNodeRequest(run_id=run_id, node_id=node, reason=reason, readmit=readmit)
    response = ask(rdzv_endpoint, tls, timeout, lambda stub: stub.EvictNode(request))
    if readmit:
        click.echo(f"node {node} may join run {run_id}")
    elif response.was_in:
        click.echo(f"node {node} was taken out of run {run_id} and is refused from now on")
    else:
        click.echo(
            f"node {node} was not in run {run_id}; it is refused from now on: check the spelling "
            f"(`rallypoint evict {run_id} {node} --readmit` takes it back)"
        )
