"""`rallypoint agent …`: the commands that look at, and steer, the jobs of one agent."""

from __future__ import annotations

import click

from rallypoint.cli.main import LazyGroup


@click.command(
    cls=LazyGroup,
    lazy={
        "jobs": ("rallypoint.cli.agent_jobs:jobs", "Show what runs on the host, and what ended."),
        "workers": ("rallypoint.cli.agent_jobs:workers", "Show a job's workers, and what they use."),
        "logs": ("rallypoint.cli.agent_logs:logs", "Print what workers wrote, and write."),
        "stacks": ("rallypoint.cli.agent_stacks:stacks", "Show what workers are doing right now."),
        "restart": ("rallypoint.cli.agent_steering:restart", "Start a job's workers anew, on all hosts."),
        "reap": ("rallypoint.cli.agent_steering:reap", "Kill a worker, with evidence of what it did."),
        "drain": ("rallypoint.cli.agent_steering:drain", "Warn workers, give them time, then leave."),
        "stop": ("rallypoint.cli.agent_steering:stop", "Have the host leave a job."),
    },
)
def agent() -> None:
    """Show and steer the jobs of the agent at --agent (RALLYPOINT_AGENT), by default the one of this host.

    RUN_ID may be left out where the agent runs one job. What concerns a run on all its hosts is done at the
    rendezvous service: `rallypoint status`, `restart`, `evict`, `close`.
    """
