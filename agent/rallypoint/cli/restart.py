"""`rallypoint restart`: start all workers of a run anew."""

from __future__ import annotations

import click

from rallypoint.cli.nodes import Text
from rallypoint.cli.service_options import service_options
from rallypoint.rpc.endpoint import ClientTLS


@click.command()
@click.argument("run_id", type=Text())
@click.option("--reason", type=Text(), default="", help="Why; the run's hosts and its events show it.")
@service_options
def restart(run_id: str, rdzv_endpoint: str, reason: str, timeout: float, tls: ClientTLS | None) -> None:
    """Start all workers of RUN_ID anew, on the same nodes. It uses up none of the run's restarts."""
    from rallypoint.cli.operator import ask  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb  # noqa: PLC0415

    request = pb.RestartRunRequest(run_id=run_id, reason=reason)
    response = ask(rdzv_endpoint, tls, timeout, lambda stub: stub.RestartRun(request), repeatable=False)
    if response.ended_round:
        click.echo(f"run {run_id}: round {response.ended_round} ended, all workers are started anew")
    elif response.hurried:
        click.echo(f"run {run_id}: the restart that was held back comes at once")
    else:
        click.echo(f"run {run_id} has no round at present, so there was nothing to restart")
