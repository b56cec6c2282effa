"""Commands of operators for a run, one section each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from rallypoint.cli.output import json_fields, plain_console, print_table, show_moment
from rallypoint.cli.values import NodeId, RunId, Text, service_options
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import to_seconds
from rallypoint.rpc.endpoint import CallTarget, SettingError
from rallypoint.rpc.text import printable

if TYPE_CHECKING:
    from rallypoint.rendezvous.v1.rendezvous_service_pb2_grpc import RendezvousServiceAsyncStub


# ---- `rallypoint close`: end a run on all its hosts.


@click.command()
@click.argument("run_id", type=RunId())
@click.option("--reason", type=Text(), default="", help="Reason, shown on the run's hosts.")
@service_options
def close(run_id: str, service: CallTarget, reason: str) -> None:
    """End RUN_ID: all its hosts stop their workers and leave.

    A host that joins it afterwards opens it again, unless the run has --rdzv-conf reopen=never.
    """
    from rallypoint.cli.operator import RENDEZVOUS, call  # noqa: PLC0415 (gRPC is not for --help)

    wanted = pb.GetRunRequest(run_id=run_id)
    found = call(RENDEZVOUS, service, lambda stub: stub.GetRun(wanted))
    # A request that is repeated, or late, must not close the run again if it was reopened since.
    request = pb.CloseRunRequest(run_id=run_id, reason=reason, incarnation=found.run.incarnation)
    response = call(RENDEZVOUS, service, lambda stub: stub.CloseRun(request))
    outcome = pb.Outcome.Name(response.run_end.outcome).removeprefix("OUTCOME_")
    click.echo(f"run {run_id} is closed: {outcome}, {response.run_end.detail}")


# ---- `rallypoint delete`: forget a run, so that its name is free.


@click.command()
@click.argument("run_id", type=RunId())
@service_options
def delete(run_id: str, service: CallTarget) -> None:
    """Forget RUN_ID, which must have no nodes: its events and its store are deleted, and its name is free.

    Without this, the service forgets a run two hours after its last node.
    """
    from grpc import StatusCode  # noqa: PLC0415 (gRPC is not for --help)
    from grpc.aio import AioRpcError  # noqa: PLC0415

    from rallypoint.cli.operator import RENDEZVOUS, call  # noqa: PLC0415

    # With its incarnation, the request may be sent again if a replica does not reply.
    present = pb.GetRunRequest(run_id=run_id)
    found = call(RENDEZVOUS, service, lambda stub: stub.GetRun(present))
    request = pb.DeleteRunRequest(run_id=run_id, incarnation=found.run.incarnation)

    async def delete_once(stub: RendezvousServiceAsyncStub) -> None:
        try:
            await stub.DeleteRun(request)
        except AioRpcError as error:
            if error.code() is not StatusCode.NOT_FOUND:  # an earlier attempt has deleted it
                raise

    call(RENDEZVOUS, service, delete_once)
    click.echo(f"run {run_id} is deleted: its name is free")


# ---- `rallypoint restart`: restart all workers of a run.


@click.command()
@click.argument("run_id", type=RunId())
@click.option("--reason", type=Text(), default="", help="Reason, shown on the run's hosts and in its events.")
@service_options
def restart(run_id: str, service: CallTarget, reason: str) -> None:
    """Restart all workers of RUN_ID, and let in newcomers that were held back. --max-restarts is not used up."""
    from rallypoint.cli.operator import RENDEZVOUS, call  # noqa: PLC0415 (gRPC is not for --help)

    # With its round, the request may be sent again if a replica does not reply.
    present = pb.GetRunRequest(run_id=run_id)
    found = call(RENDEZVOUS, service, lambda stub: stub.GetRun(present))
    request = pb.RestartRunRequest(run_id=run_id, reason=reason, round=found.run.round)
    response = call(RENDEZVOUS, service, lambda stub: stub.RestartRun(request))
    if response.ended_round:
        click.echo(f"run {run_id}: round {response.ended_round} ended, all workers restart")
    elif response.hurried:
        click.echo(f"run {run_id}: the delayed restart happens now")
    else:
        click.echo(f"run {run_id} has no round at present, so there was nothing to restart")


# ---- `rallypoint evict`: remove a node from a run and refuse it, or readmit it.


@click.command()
@click.argument("run_id", type=RunId())
@click.argument("node", type=NodeId())
@click.option(
    "--host", is_flag=True, help="NODE is a host: all agents on it are meant, also those that come later."
)
@click.option("--reason", type=Text(), default="", help="Reason, shown on the node and in the run's events.")
@click.option("--force", is_flag=True, help="Refuse NODE also if it is not in the run.")
@click.option("--readmit", is_flag=True, help="Let an evicted node join again.")
@service_options
def evict(
    *, run_id: str, node: str, host: bool, service: CallTarget, reason: str, force: bool, readmit: bool
) -> None:
    """Remove NODE from RUN_ID and refuse it from now on; the other nodes continue without it.

    An agent that is started again has another name, unless it was started with --node-id: --host keeps the host out.
    `rallypoint status RUN_ID` shows the names of present and evicted nodes.
    """
    from rallypoint.cli.operator import RENDEZVOUS, all_nodes, call  # noqa: PLC0415 (gRPC is not for --help)

    # Names of a host's agents begin with the host's name, unless --node-id is given. The first name refuses newcomers.
    names = [f"{node}_*", node] if host else [node]

    async def change(stub: RendezvousServiceAsyncStub) -> list[str] | None:
        """Return the names of the nodes that were found, and changed; None: none was, and nothing was changed."""
        evicted = (await stub.GetRun(pb.GetRunRequest(run_id=run_id, most_nodes=0))).run.evicted_node_ids
        present = evicted if readmit else [each.node_id for each in await all_nodes(run_id, stub)]
        found = [name for name in present if name == node or (host and name.startswith(f"{node}_"))]
        if not (found or force or names[0] in evicted):
            return None
        for name in dict.fromkeys([*names, *found]):
            if readmit:
                await stub.ReadmitNode(pb.ReadmitNodeRequest(run_id=run_id, node_id=name, reason=reason))
            else:
                await stub.EvictNode(pb.EvictNodeRequest(run_id=run_id, node_id=name, reason=reason))
        return found

    found = call(RENDEZVOUS, service, change)
    what = f"{'host' if host else 'node'} {node}"
    if found is None:
        known = (
            f"not evicted from run {run_id}"
            if readmit
            else f"not in run {run_id}; --force refuses it all the same"
        )
        raise SettingError(f"{what} is {known} (`rallypoint status {run_id}` shows the names)")
    nodes = f": {', '.join(found)}" if host and found else ""
    if readmit:
        click.echo(f"{what} may join run {run_id}")
    elif found:
        click.echo(f"{what} was taken out of run {run_id} and is refused from now on{nodes}")
    else:
        click.echo(f"{what} is refused from now on; it is not in run {run_id}")


# ---- `rallypoint replicas`: the replicas of the rendezvous service, and the owner of a run.


@click.command()
@click.option(
    "--run",
    "run_id",
    type=RunId(),
    default="",
    metavar="RUN_ID",
    help="Also show which replica owns this run.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@service_options
def replicas(*, run_id: str, service: CallTarget, as_json: bool) -> None:
    """Show the replicas of the rendezvous service, and how many shards of the runs each of them owns.

    The table is the view of the replying replica (state "answers"). LEAVING: it hands its shards over, to stop.
    """
    from rallypoint.cli.operator import RENDEZVOUS, call  # noqa: PLC0415

    request = pb.ListReplicasRequest(run_id=run_id)
    answer = call(RENDEZVOUS, service, lambda stub: stub.ListReplicas(request))
    if as_json:
        click.echo(json.dumps(json_fields(answer), indent=2))
    else:
        _print(answer, run_id)


def _print(answer: pb.ListReplicasResponse, run_id: str) -> None:
    rows = []
    for replica in answer.replicas:
        state = ["LEAVING"] if replica.leaving else []
        state += ["answers"] if replica.name == answer.answered_by else []
        since = show_moment(to_seconds(replica.since)) if replica.HasField("since") else "-"
        rows.append(
            (replica.name, replica.address or "-", str(replica.shards), since, ", ".join(state) or "-")
        )
    print_table(("replica", "address", "shards", "since", "state"), rows, own_line=("address", "since"))
    console = plain_console()
    if answer.free_shards:
        console.print(
            f"{answer.free_shards} of {answer.shards} shards have no owner at present: their runs wait"
        )
    if answer.HasField("run"):
        console.print(_find_run(answer.run, run_id))


def _find_run(run: pb.RunPlace, run_id: str) -> str:
    shard = f"run {printable(run_id)} is in shard {run.shard}, "
    if not run.owner_name:
        return shard + "which has no owner at present: it waits for a replica to take it over"
    return shard + f"which {printable(run.owner_name)} owns, at {printable(run.owner_address)}"
