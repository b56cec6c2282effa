"""The messages at the end of a job."""

from __future__ import annotations

import click

from rallypoint.agent.job.report import render
from rallypoint.agent.job.result import FAILED, PERMANENT, SUCCEEDED, JobResult
from rallypoint.rpc.logs import get_logger

_log = get_logger("rallypoint.run")


def print_summary(result: JobResult) -> None:
    """Print the report of the failure that ended the run, if any, and log how the job ended."""
    if result.failure is not None:
        click.echo(
            f"The failure that ended the run:\n{render(result.failure, others=result.others)}", err=True
        )
    if result.exit_code == SUCCEEDED:
        _log.info("job succeeded", detail=result.detail)
    elif result.exit_code == FAILED:
        _log.error("job failed" if result.failure is not None else "job ended early", detail=result.detail)
    elif result.exit_code == PERMANENT:
        _log.error("job failed: unrecoverable error", detail=result.detail)
    else:
        click.echo(f"Error: {result.detail}", err=True)
