"""The agent of a launch from Python, after gRPC may be loaded."""

from __future__ import annotations

import logging

from rallypoint.agent.job.job import Job
from rallypoint.agent.job.report import render
from rallypoint.agent.spawner.client import Spawner
from rallypoint.launcher.launch import launch
from rallypoint.launcher.plan import LaunchOutcome, LaunchRequest
from rallypoint.rpc.logs import configure_logs
from rallypoint.rpc.loop import run as run_loop


def run_requested_job(request: LaunchRequest, spawner: Spawner) -> LaunchOutcome:
    """Run the job to its end, and close the spawner.

    Raises:
        SettingError: The job can't be started as requested; one line.
    """
    configure_logs(request.log_level, "auto")
    if request.log_level == "info":
        # Of the services embedded in this process, users need only warnings and errors.
        for service in ("rallypoint.rendezvous", "rallypoint.serving", "rallypoint.timer"):
            logging.getLogger(service).setLevel(logging.WARNING)
    jobs: list[Job] = []
    result = run_loop(launch(request.plan, spawner, jobs.append))
    return LaunchOutcome(
        exit_code=result.exit_code,
        detail=result.detail,
        failure=result.failure,
        report=render(result.failure, others=result.others) if result.failure is not None else "",
        ranks=tuple(worker.rank for job in jobs for worker in job.workers),
    )
