"""`rallypoint close`: end a run on all its hosts."""

from __future__ import annotations

import click

from rallypoint.cli.nodes import Text
from rallypoint.cli.service_options import service_options
from rallypoint.rpc.endpoint import ClientTLS


@click.command()
@click.argument("run_id", type=Text())
@click.option("--reason", type=Text(), default="", help="Why; the run's hosts show it.")
@service_options
def close(run_id: str, rdzv_endpoint: str, reason: str, timeout: float, tls: ClientTLS | None) -> None:
    """End RUN_ID for good: all its hosts stop their workers and go."""
    from rallypoint.cli.operator import ask  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb  # noqa: PLC0415

    request = pb.CloseRunRequest(run_id=run_id, reason=reason)
    response = ask(rdzv_endpoint, tls, timeout, lambda stub: stub.CloseRun(request))
    outcome = pb.Outcome.Name(response.run_end.outcome).removeprefix("OUTCOME_")
    click.echo(f"run {run_id} is closed: {outcome}, {response.run_end.detail}")
