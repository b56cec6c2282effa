"""`rallypoint status`: runs, or one run with its nodes."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import click
from google.protobuf.duration_pb2 import Duration

from rallypoint.cli.output import json_fields, plain_console, print_table, show_moment, show_span
from rallypoint.cli.values import RunId, Text, service_options
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import to_seconds
from rallypoint.rpc.endpoint import CallTarget, SettingError
from rallypoint.rpc.runtime_folder import found_socket, is_served, run_socket, secret_beside
from rallypoint.rpc.text import printable
from rallypoint.serving.options import Setting
from rallypoint.timer.v1 import timer_service_pb2 as timer_pb

# Names of nodes in one line of output; a run may have a thousand evicted ones.
_MOST_NAMES = 20


@click.command()
@click.argument("run_id", type=RunId(), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@click.option(
    "--timer-endpoint",
    cls=Setting,
    type=Text(),
    default="",
    metavar="HOST:PORT",
    help="With RUN_ID: the timer service to read the progress of the workers from. Default: the one in the run's agent "
    "on this host, if there is one.",
)
@partial(service_options, each=True)
def status(*, run_id: str | None, service: CallTarget, timer_endpoint: str, as_json: bool) -> None:
    """Show all runs, or RUN_ID with its nodes, and with its slowest worker if its timer service is known."""
    from rallypoint.cli.operator import RENDEZVOUS, all_runs, call, other_version, whole_run  # noqa: PLC0415

    if run_id is not None and not timer_endpoint:
        timer_endpoint = run_socket("timer", run_id) or run_socket("timer", "") or ""
    timer = replace(service, endpoint=timer_endpoint)
    response: pb.GetRunResponse | pb.ListRunsResponse
    if run_id is None:
        response = call(RENDEZVOUS, service, all_runs)
    else:
        response = call(
            RENDEZVOUS,
            service,
            partial(whole_run, run_id),
            preferred=partial(whole_run, run_id, owner_only=True),
        )
    if as_json:
        fields = json_fields(response)
        fields.pop("nextPageToken", None)  # all pages are included
        if run_id is not None and timer_endpoint:
            fields |= _progress_fields(run_id, timer)
        click.echo(json.dumps(fields, indent=2))
    elif isinstance(response, pb.GetRunResponse):
        _print_run(response.run, connections_known=not response.durable_only)
        _print_times(response.run, service)
        _print_log_folder(response.run.run_id, service.timeout)
        if response.durable_only:
            _print_owner_away(response.owner_address)
        if timer_endpoint:
            _print_progress(response.run.run_id, timer)
    else:
        _print_runs(list(response.runs))
    if line := other_version(service):
        click.echo(printable(line), err=True)


def _progress_fields(run_id: str, timer: CallTarget) -> dict[str, Any]:
    try:
        answer = _request_progress(run_id, timer)
    except SettingError as error:
        return {"progress": None, "progressError": str(error)}
    return {"progress": json_fields(answer)}


def _print_progress(run_id: str, timer: CallTarget) -> None:
    console = plain_console()
    try:
        answer = _request_progress(run_id, timer)
    except SettingError as error:
        # The run is worth showing without its progress.
        console.print(f"progress of the workers is unknown: {error}")
        return
    if not answer.workers:
        console.print("no worker reports progress")
        return
    console.print(slowest_line(answer))
    if answer.HasField("stalled"):
        console.print(stall_line(answer.stalled))


def _request_progress(run_id: str, timer: CallTarget) -> timer_pb.GetProgressResponse:
    from rallypoint.cli.operator import TIMER, call  # noqa: PLC0415

    request = timer_pb.GetProgressRequest(run_id=run_id, page_size=1)
    return call(TIMER, timer, lambda stub: stub.GetProgress(request))


def _print_runs(runs: list[pb.Run]) -> None:
    if not runs:
        plain_console().print("no runs")
        return
    columns = ("run", "phase", "round", "nodes", "workers", "restarts", "last round ended")
    print_table(columns, map(_run_row, runs), own_line=("last round ended",))


def _run_row(run: pb.Run) -> tuple[str, ...]:
    nodes = f"{run.node_count} of {_range(run.settings)}"
    ended = run.run_end.detail or run.last_round_end.detail
    restarts = f"{_counted(run)}/{run.settings.max_restarts}"
    return run.run_id, _phase(run), str(run.round), nodes, str(run.world_size), restarts, ended or "-"


def _print_owner_away(owner: str) -> None:
    why = (
        f"the replica at {owner}, which owns the run, did not reply"
        if owner
        else "the run has no owner at present"
    )
    plain_console().print(f"connections are unknown: {why}")


def _print_run(run: pb.Run, *, connections_known: bool) -> None:
    from rallypoint.agent.job.waiting import describe_waiting  # noqa: PLC0415

    console = plain_console()
    assigned = sum(node.HasField("assignment") for node in run.nodes)
    spares = sum(node.state == pb.NODE_STATE_SPARE for node in run.nodes)
    joined = f"{run.node_count} joined, " + (f"{spares} of them spare, " if spares else "")
    console.print(
        f"run {run.run_id}: {_phase(run)}, round {run.round}, {run.world_size} workers on {assigned} nodes "
        f"({joined}{_range(run.settings)} wanted), "
        f"{_budget(run)}, revision {run.revision}"
    )
    if run.HasField("last_round_end"):
        console.print(f"round {run.last_round_end.round} ended: {run.last_round_end.detail}")
    if run.HasField("run_end"):
        console.print(f"run ended: {run.run_end.detail}")
    elif run.HasField("held_back"):
        console.print(
            f"restart delayed by {to_seconds(run.held_back):g} s (back-off after repeated failures)"
        )
    elif run.succeeded_count:
        console.print(_exit_barrier(run, assigned))
    elif run.HasField("join_time_left") or run.HasField("last_call_left"):
        console.print(describe_waiting(run, datetime.now(UTC).astimezone()))
    if run.evicted_node_ids:
        console.print(_evicted(run))
    if run.nodes:
        _print_nodes(run, connections_known=connections_known)
    unguarded = [node for node in run.nodes if node.watchdog_trouble]
    for node in unguarded[:_MOST_NAMES]:
        console.print(f"no watchdog guards the workers of {node.node_id}: {node.watchdog_trouble}")
    if len(unguarded) > _MOST_NAMES:
        console.print(f"nor those of {len(unguarded) - _MOST_NAMES} other nodes")


def _print_times(run: pb.Run, service: CallTarget) -> None:
    """Print since when the run is in its phase, and since when it exists; nothing if its events are gone."""
    from rallypoint.cli.event_stream import last_events  # noqa: PLC0415
    from rallypoint.cli.operator import RENDEZVOUS, call  # noqa: PLC0415

    def last(*kinds: pb.EventKind.ValueType) -> str:
        wanted = pb.EventFilter(kinds=kinds)
        events, _ = call(RENDEZVOUS, service, lambda stub: last_events(stub, run.run_id, wanted, 1))
        if not events:
            return ""
        begun = to_seconds(events[0].time)
        return f"{show_moment(begun)[:19]} ({show_span(max(0, round(time.time() - begun))).replace('.000s', 's')})"

    phases = (pb.EVENT_KIND_ROUND_FROZEN, pb.EVENT_KIND_ROUND_FINALIZED, pb.EVENT_KIND_ROUND_ENDED)
    with suppress(SettingError):  # the run is worth showing without
        created = last(pb.EVENT_KIND_RUN_CREATED)
        since = last(pb.EVENT_KIND_RUN_CREATED, *phases, pb.EVENT_KIND_RUN_CLOSED)
        times = [f"{_phase(run)} since {since}"] if since else []
        times += [f"created {created}"] if created else []
        if times:
            plain_console().print(", ".join(times))


def _print_log_folder(run_id: str, timeout: float) -> None:
    """Print the folder of the run's logs on this host, if an agent of the run is here."""
    from rallypoint.agent.v1 import supervisor_service_pb2 as pb  # noqa: PLC0415
    from rallypoint.cli.operator import SUPERVISOR, call  # noqa: PLC0415

    request = pb.GetJobRequest(run_id=run_id)
    with suppress(SettingError):  # it has no such job, or no agent is here
        agent = found_socket("agent", run_id)
        if is_served(agent):
            target = CallTarget(agent, secret_beside(agent), timeout)
            job = call(SUPERVISOR, target, lambda stub: stub.GetJob(request)).job
            plain_console().print(
                f"logs of this host: {job.log_dir} (`rallypoint logs {run_id}` prints them)"
            )


def _budget(run: pb.Run) -> str:
    """Describe the used restarts: of the run's budget, and of each node that has used any."""
    settings = run.settings
    window = to_seconds(settings.restart_window)
    used = f"{_counted(run)} of {settings.max_restarts} restarts used"
    if window:
        used += f" in the last {window:g} s ({run.restart_count} in all)"
    charged = [node for node in run.nodes if node.counted_restarts]
    charged.sort(key=lambda node: node.counted_restarts, reverse=True)
    of_nodes = [
        f"{node.counted_restarts} of {settings.max_restarts_per_node} by node {node.node_id}"
        for node in charged[:_MOST_NAMES]
    ]
    return ", ".join([used, *of_nodes])


def _counted(run: pb.Run) -> int:
    """Return the restarts that count against the run's budget: all, unless it has a window (older services: none)."""
    return run.counted_restarts if to_seconds(run.settings.restart_window) else run.restart_count


def _exit_barrier(run: pb.Run, assigned: int) -> str:
    succeeded = f"{run.succeeded_count} of {assigned} nodes succeeded"
    if run.exit_barrier_passed:
        return f"{succeeded}; the exit barrier is over: they no longer wait for the others"
    most = to_seconds(run.settings.exit_barrier_timeout)
    return f"{succeeded}; they wait for the others, {most:g} s at most"


def _evicted(run: pb.Run) -> str:
    names = ", ".join(run.evicted_node_ids[:_MOST_NAMES])
    more = len(run.evicted_node_ids) - _MOST_NAMES
    others = f" and {more} others" if more > 0 else ""
    return f"evicted, and refused (`rallypoint events` shows why): {names}{others}"


def _print_nodes(run: pb.Run, *, connections_known: bool) -> None:
    places = any(node.topology for node in run.nodes)
    columns = ["node", "state", "group rank", "ranks", "role", "address", "connected", *["topology"] * places]
    rows = []
    for node in run.nodes:
        ranked = node.assignment
        assigned = node.HasField("assignment")
        ranks = f"{ranked.base_rank}-{ranked.base_rank + node.local_world_size - 1}" if assigned else "-"
        connected = _yes_or_no(node.connected) if connections_known else "-"
        rows.append(
            [
                node.node_id,
                pb.NodeState.Name(node.state).removeprefix("NODE_STATE_"),
                str(ranked.group_rank) if assigned else "-",
                ranks,
                node.role,
                node.address,
                connected,
                *[node.topology or "-"] * places,
            ]
        )
    print_table(columns, rows, own_line=["address", *["topology"] * places, "role"])


def _yes_or_no(fact: bool) -> str:
    return "yes" if fact else "no"


def _phase(run: pb.Run) -> str:
    if run.broken:
        return f"STOPPED by {run.broken}"
    phase = pb.Phase.Name(run.phase).removeprefix("PHASE_")
    outcome = pb.Outcome.Name(run.run_end.outcome).removeprefix("OUTCOME_")
    return f"{phase} {outcome}" if run.HasField("run_end") else phase


def _range(settings: pb.RunSettings) -> str:
    least, most = settings.min_nodes, settings.max_nodes
    return str(least) if least == most else f"{least}:{most}"


# ---- A run's progress in sentences.


def progress_lines(run_id: str, answer: timer_pb.GetProgressResponse) -> list[str]:
    """Describe the progress of a run with reporting workers, and whether it stalls."""
    lines = [
        f"run {run_id}: {_workers(answer.workers)} at {_steps(answer)}, "
        f"the last one advanced {_span(answer.idle)} ago"
    ]
    if answer.HasField("stalled"):
        lines.append(stall_line(answer.stalled))
    elif answer.HasField("stall_after"):
        lines.append(f"it stalls if none advances for {_span(answer.stall_after)}")
    else:
        lines.append("it is not watched for stalls (--stall-after 0)")
    return lines


def slowest_line(answer: timer_pb.GetProgressResponse) -> str:
    """Describe the slowest worker of a run with reporting workers."""
    if not answer.slowest:
        return f"{_workers(answer.workers)} at {_steps(answer)}"
    slowest = answer.slowest[0]
    behind = answer.highest_step - slowest.step
    where = f"{behind} behind the fastest" if behind else "no other is further"
    return f"slowest worker: {_worker(slowest)}, at step {slowest.step} for {_span(slowest.idle)} ({where})"


def stall_line(stalled: timer_pb.Stalled) -> str:
    """Report that no worker advances, and which one stopped first."""
    stalls = f"the run STALLS: no worker has advanced for {_span(stalled.idle)}"
    if not stalled.HasField("first"):
        return stalls
    first = stalled.first
    return (
        f"{stalls}; {_worker(first)} stopped first, {_span(first.idle)} ago at step {first.step} "
        f"({stalled.at_same_step} of {_workers(stalled.workers)} are at that step)"
    )


def _worker(worker: timer_pb.WorkerProgress) -> str:
    return printable(f"rank {worker.rank} on node {worker.node_id} (worker {worker.worker_id})")


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _steps(answer: timer_pb.GetProgressResponse) -> str:
    if answer.lowest_step == answer.highest_step:
        return f"step {answer.lowest_step}"
    return f"steps {answer.lowest_step} to {answer.highest_step}"


def _span(duration: Duration) -> str:
    return show_span(to_seconds(duration))
