"""`rallypoint agent restart`, `reap`, `drain` and `stop`: what is done to a job of one host."""

from __future__ import annotations

import click

from rallypoint.agent.config.settings import MOST_SECONDS
from rallypoint.cli.agent_service import agent_options, reason_option, run_argument
from rallypoint.rpc.endpoint import ClientTLS
from rallypoint.serving.options import Seconds


@click.command()
@run_argument
@reason_option
@agent_options
def restart(run_id: str, agent: str, reason: str, timeout: float, tls: ClientTLS | None) -> None:
    """Start all workers of RUN_ID anew, on all its hosts. It uses up none of the run's restarts."""
    from rallypoint.agent.v1 import supervisor_service_pb2 as pb  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.cli.operator import ask_agent  # noqa: PLC0415

    request = pb.RestartWorkersRequest(run_id=run_id, reason=reason)
    response = ask_agent(agent, tls, timeout, lambda stub: stub.RestartWorkers(request))
    click.echo(f"round {response.ended_round} ended, all workers are started anew")


@click.command()
@run_argument
@click.option("--rank", type=click.IntRange(0, 2**31 - 1), required=True, help="Which, by its global rank.")
@reason_option
@agent_options
def reap(*, run_id: str, rank: int, agent: str, reason: str, timeout: float, tls: ClientTLS | None) -> None:
    """Kill a worker of RUN_ID with all it has started; it counts as failed. What it was doing is written down first."""
    from rallypoint.agent.v1 import supervisor_service_pb2 as pb  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.cli.operator import ask_agent  # noqa: PLC0415

    request = pb.ReapWorkerRequest(run_id=run_id, rank=rank, reason=reason)
    response = ask_agent(agent, tls, timeout, lambda stub: stub.ReapWorker(request))
    where = f"; what it was doing is in {response.evidence_file}" if response.evidence_file else ""
    click.echo(f"rank {rank}, process {response.pid}, is killed{where}")


@click.command()
@run_argument
@click.option(
    "--grace",
    type=Seconds(0, MOST_SECONDS),
    metavar="SECONDS",
    help="How long workers may take; without it, as the job was told (--drain-timeout).",
)
@reason_option
@agent_options
def drain(
    *, run_id: str, grace: float | None, agent: str, reason: str, timeout: float, tls: ClientTLS | None
) -> None:
    """Have the agent's host leave RUN_ID, or all its jobs, gently: workers are warned, get their time, then go."""
    from rallypoint.agent.v1 import supervisor_service_pb2 as pb  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.cli.operator import ask_agent  # noqa: PLC0415

    request = pb.DrainRequest(run_id=run_id, reason=reason)
    if grace is not None:
        request.grace.FromNanoseconds(round(grace * 1e9))
    response = ask_agent(agent, tls, timeout, lambda stub: stub.Drain(request))
    if response.run_ids:
        click.echo(f"the host is going to leave {', '.join(response.run_ids)}; its workers are warned")
    else:
        click.echo("the host has no job that it could leave")


@click.command()
@run_argument
@click.option("--now", is_flag=True, help="Kill the workers, without asking them first.")
@reason_option
@agent_options
def stop(*, run_id: str, now: bool, agent: str, reason: str, timeout: float, tls: ClientTLS | None) -> None:
    """Have the agent's host leave RUN_ID; the other hosts go on. (`rallypoint close` ends a run on all hosts.)"""
    from rallypoint.agent.v1 import supervisor_service_pb2 as pb  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.cli.operator import ask_agent  # noqa: PLC0415

    which = pb.GetJobRequest(run_id=run_id)
    job = ask_agent(agent, tls, timeout, lambda stub: stub.GetJob(which)).job
    if job.state == pb.JOB_STATE_ENDED:
        click.echo(f"the job of run {job.run_id} has ended here already, with exit code {job.exit_code}")
        return
    request = pb.StopJobRequest(run_id=job.run_id, reason=reason, now=now)
    ask_agent(agent, tls, timeout, lambda stub: stub.StopJob(request))
    click.echo("the host is leaving the run" + (", and its workers are killed" if now else ""))
