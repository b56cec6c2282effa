"""`rallypoint status`: runs, or one run with its nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rallypoint.cli.nodes import Text
from rallypoint.serving.options import Seconds, Setting, client_options
from rallypoint.serving.settings import ClientTLS

if TYPE_CHECKING:
    from rich.console import Console

    from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb


# Characters; longer than any sentence of ours.
_LONGEST_LINE = 4096


@click.command()
@click.argument("run_id", type=Text(), required=False)
@click.option(
    "--rdzv-endpoint",
    cls=Setting,
    type=Text(),
    default="127.0.0.1:29400",
    metavar="HOST:PORT",
    help="Address of the rendezvous service.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@click.option(
    "--timeout",
    cls=Setting,
    type=Seconds(0.1),
    default=10.0,
    metavar="SECONDS",
    help="How long to try.",
)
@client_options
def status(
    run_id: str | None, rdzv_endpoint: str, as_json: bool, timeout: float, tls: ClientTLS | None
) -> None:
    """Show all runs, or RUN_ID with its nodes."""
    from google.protobuf.json_format import MessageToJson  # noqa: PLC0415 (slow, and not for --help)

    from rallypoint.cli.operator import ask  # noqa: PLC0415
    from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb  # noqa: PLC0415

    response: pb.GetRunResponse | pb.ListRunsResponse
    if run_id is None:
        response = ask(rdzv_endpoint, tls, timeout, lambda stub: stub.ListRuns(pb.ListRunsRequest()))
    else:
        request = pb.GetRunRequest(run_id=run_id)
        response = ask(rdzv_endpoint, tls, timeout, lambda stub: stub.GetRun(request))
    if as_json:
        click.echo(MessageToJson(response, always_print_fields_with_no_presence=True))
    elif isinstance(response, pb.GetRunResponse):
        _print_run(response.run)
    else:
        _print_runs(list(response.runs))


def _print_runs(runs: list[pb.Run]) -> None:
    from rich.table import Table  # noqa: PLC0415

    table = Table("run", "phase", "round", "nodes", "workers", "restarts", "last round ended", box=None)
    for run in runs:
        nodes = f"{run.node_count} of {_range(run.settings)}"
        ended = run.run_end.detail or run.last_round_end.detail
        restarts = f"{run.restart_count}/{run.settings.max_restarts}"
        table.add_row(
            run.run_id, _phase(run), str(run.round), nodes, str(run.world_size), restarts, ended or "-"
        )
    _console().print(table if runs else "no runs")


def _console() -> Console:
    """A console that shows names and sentences as they are: they come from users, and may look like markup.

    Lines of a table are as long as they need where no terminal limits them: `grep` is to find whole ones.
    """
    from rich.console import Console  # noqa: PLC0415

    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _LONGEST_LINE
    return console


def _print_run(run: pb.Run) -> None:
    from rich.table import Table  # noqa: PLC0415

    from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb  # noqa: PLC0415

    console = _console()
    seats = sum(node.HasField("assignment") for node in run.nodes)
    console.print(
        f"run {run.run_id}: {_phase(run)}, round {run.round}, {run.world_size} workers on {seats} nodes "
        f"({run.node_count} joined, {_range(run.settings)} wanted), "
        f"{run.restart_count} of {run.settings.max_restarts} restarts used, revision {run.revision}"
    )
    if run.HasField("last_round_end"):
        console.print(f"round {run.last_round_end.round} ended: {run.last_round_end.detail}")
    if run.HasField("run_end"):
        console.print(f"run ended: {run.run_end.detail}")
    table = Table("node", "state", "group rank", "ranks", "role", "address", "connected", box=None)
    for node in run.nodes:
        seat = node.assignment
        seated = node.HasField("assignment")
        ranks = f"{seat.base_rank}-{seat.base_rank + node.local_world_size - 1}" if seated else "-"
        state = pb.NodeState.Name(node.state).removeprefix("NODE_STATE_")
        table.add_row(
            node.node_id,
            state,
            str(seat.group_rank) if seated else "-",
            ranks,
            node.role,
            node.address,
            "yes" if node.connected else "no",
        )
    if run.nodes:
        console.print(table)


def _phase(run: pb.Run) -> str:
    from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb  # noqa: PLC0415

    phase = pb.Phase.Name(run.phase).removeprefix("PHASE_")
    outcome = pb.Outcome.Name(run.run_end.outcome).removeprefix("OUTCOME_")
    return f"{phase} {outcome}" if run.HasField("run_end") else phase


def _range(settings: pb.RunSettings) -> str:
    least, most = settings.min_nodes, settings.max_nodes
    return str(least) if least == most else f"{least}:{most}"
