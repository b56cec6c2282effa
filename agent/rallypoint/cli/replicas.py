"""`rallypoint replicas`: who serves rendezvous, and which of them owns a run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from rallypoint.cli.console import plain_console, printable
from rallypoint.cli.moments import show_moment
from rallypoint.cli.nodes import Text
from rallypoint.cli.service_options import service_options
from rallypoint.rpc.endpoint import ClientTLS

if TYPE_CHECKING:
    from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb


@click.command()
@click.option(
    "--run",
    "run_id",
    type=Text(),
    default="",
    metavar="RUN_ID",
    help="Also say which replica owns this run.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@service_options
def replicas(
    *, run_id: str, rdzv_endpoint: str, as_json: bool, timeout: float, tls: ClientTLS | None
) -> None:
    """Show the replicas of the rendezvous service, and how many shards of the runs each of them owns.

    It is what the replica that answers knows; LEAVING is one that hands its shards over since it was told to stop.
    """
    from google.protobuf.json_format import MessageToDict  # noqa: PLC0415 (slow, and not for --help)

    from rallypoint.cli.operator import ask  # noqa: PLC0415
    from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb  # noqa: PLC0415

    request = pb.ListReplicasRequest(run_id=run_id)
    answer = ask(rdzv_endpoint, tls, timeout, lambda stub: stub.ListReplicas(request))
    if as_json:
        click.echo(json.dumps(MessageToDict(answer, always_print_fields_with_no_presence=True), indent=2))
    else:
        _print(answer, run_id)


def _print(answer: pb.ListReplicasResponse, run_id: str) -> None:
    from rich.table import Table  # noqa: PLC0415

    table = Table("replica", "address", "shards", "since", "state", box=None)
    for replica in answer.replicas:
        state = ["LEAVING"] if replica.leaving else []
        state += ["answers"] if replica.name == answer.answered_by else []
        table.add_row(
            printable(replica.name),
            printable(replica.address) or "-",
            str(replica.shards),
            show_moment(replica.since.ToNanoseconds() / 1e9) if replica.HasField("since") else "-",
            ", ".join(state) or "-",
        )
    console = plain_console()
    console.print(table)
    if answer.free_shards:
        console.print(
            f"{answer.free_shards} of {answer.shards} shards have no owner just now: their runs wait"
        )
    if answer.HasField("run"):
        console.print(_place(answer.run, run_id))


def _place(run: pb.RunPlace, run_id: str) -> str:
    where = f"run {printable(run_id)} is in shard {run.shard}, which "
    if not run.owner:
        return where + "nobody owns just now: it waits for a replica to take it over"
    return where + f"{printable(run.owner)} owns, at {printable(run.address)}"
