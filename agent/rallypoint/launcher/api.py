"""`elastic_launch(config, entrypoint)(*args)`: a job from Python, for programs and for functions."""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rallypoint.agent.failures.failure import WorkerFailure
from rallypoint.launcher.agent_process import AgentProcess
from rallypoint.launcher.config import LaunchConfig, in_our_names, python_command
from rallypoint.launcher.passed_signals import PassedSignals
from rallypoint.launcher.plan import LaunchOutcome, LaunchRequest
from rallypoint.worker.call import (
    CallError,
    bound,
    describe,
    is_importing_main,
    load_results,
    run_forked,
    save_call,
)

__all__ = ["CallError", "ChildFailedError", "LaunchConfig", "WorkersFailedError", "elastic_launch"]


class WorkersFailedError(Exception):
    """A job that did not succeed.

    Attributes:
        name: Of what was launched.
        exit_code: What `rallypoint run` would have ended with: see docs/failures.md.
        detail: How the job ended, in one sentence.
        failure: The failure that ended the run, on whichever host it was; None if it was none of a worker.
        report: The same for people; lines.
    """

    def __init__(
        self, name: str, exit_code: int, detail: str, failure: WorkerFailure | None, report: str
    ) -> None:
        """Of an outcome."""
        super().__init__(name, exit_code, detail, failure, report)
        self.name = name
        self.exit_code = exit_code
        self.detail = detail
        self.failure = failure
        self.report = report

    def __str__(self) -> str:
        """The sentence, and the report if there is one."""
        return "\n".join(filter(None, (f"{self.name}: {self.detail}", self.report)))

    @property
    def failures(self) -> dict[int, WorkerFailure]:
        """The failure by the global rank of its worker, as torch's ChildFailedError has it."""
        return {self.failure.rank: self.failure} if self.failure is not None else {}


ChildFailedError = WorkersFailedError
"""Torch's name of it."""


class elastic_launch:
    """Runs a job on this host, as part of one on several if the configuration says so.

        results = elastic_launch(LaunchConfig(1, 1, nproc_per_node=2), train)(dataset, 10)
        elastic_launch(LaunchConfig(1, 1, nproc_per_node=2), "python")("-u", "train.py")

    See docs/python.md for the start methods, and for what may be passed and returned.
    """

    def __init__(self, config: LaunchConfig, entrypoint: Callable[..., Any] | str) -> None:
        """Nothing is started.

        Args:
            config: How.
            entrypoint: A function, or a program.
        """
        self._config = config
        self._entrypoint = entrypoint

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Runs the job to its end. What it started is gone then, in any case.

        Args:
            args: Of the function or the program; `${local_rank}` in text is replaced.

        Returns:
            By the global rank of each worker of this host, what the function returned; None for a program.

        Raises:
            WorkersFailedError: The job did not succeed, or has left because of a signal that this program handles.
            KeyboardInterrupt: Ctrl-C, once the workers are stopped.
            SystemExit: Likewise for another signal of `signals_to_handle`, unless this program handles it itself.
            CallError: The function or its arguments can't be brought to the workers, or what it returned back.
            ValueError: The configuration makes no sense, or the job could not be started as asked; one line.
        """
        if is_importing_main():
            raise RuntimeError(
                "a worker imports the main module, and that launches again: put the launch under "
                "`if __name__ == '__main__':`"
            )
        if not (isinstance(self._entrypoint, str) or callable(self._entrypoint)):
            raise ValueError(f"entrypoint: {self._entrypoint!r} is neither a function nor a program's name")
        if isinstance(self._entrypoint, str):
            plan = self._config.plan([self._entrypoint, *(str(each) for each in args)])
            outcome = _run(
                partial(AgentProcess.start, LaunchRequest(plan, log_level=self._config.log_level)),
                plan.signals,
            )
            _check(self._entrypoint, outcome)
            return dict.fromkeys(outcome.ranks)
        with tempfile.TemporaryDirectory(prefix="rallypoint_call_", ignore_cleanup_errors=True) as folder:
            return self._call(self._entrypoint, args, Path(folder))

    def _call(self, function: Callable[..., Any], args: Sequence[Any], folder: Path) -> dict[int, Any]:
        config, name = self._config, describe(function)
        if config.start_method == "fork":
            plan = config.plan([name], call=True)
            _check_forkable()
            call = partial(run_forked, bound(function, args), folder)
            start = partial(AgentProcess.fork, LaunchRequest(plan, folder, log_level=config.log_level), call)
        else:
            forkserver = config.start_method == "forkserver"
            command = [name] if forkserver else python_command("-m", "rallypoint.worker.call", str(folder))
            plan = config.plan(command, call=forkserver)
            save_call(folder, function, args)
            start = partial(AgentProcess.start, LaunchRequest(plan, folder, forkserver, config.log_level))
        outcome = _run(start, plan.signals)
        _check(name, outcome)
        return load_results(folder, outcome.ranks)


def _check_forkable() -> None:
    if "grpc" in sys.modules:
        raise ValueError(
            "start_method='fork': this process has loaded gRPC, which a fork does not survive; import it later, "
            "or take 'spawn' or 'forkserver'"
        )
    if threading.active_count() > 1:
        warnings.warn(
            "start_method='fork' while other threads run: workers don't have those, but may have the locks that they "
            "hold, for ever; 'spawn' and 'forkserver' have no such trouble",
            RuntimeWarning,
            stacklevel=4,
        )


def _check(name: str, outcome: LaunchOutcome) -> None:
    if outcome.refused:
        raise ValueError(in_our_names(outcome.detail))
    if outcome.exit_code != 0:
        raise WorkersFailedError(name, outcome.exit_code, outcome.detail, outcome.failure, outcome.report)


def _run(start: Callable[[], AgentProcess], signals: Sequence[int]) -> LaunchOutcome:
    """Has an agent do its work; when this returns, or raises, nothing of it is left."""
    with PassedSignals(signals) as passed:
        agent = start()
        passed.send_by(agent.send_signal)
        try:
            outcome = agent.wait()
        except BaseException:  # of a signal handler that is not ours
            agent.send_signal(signal.SIGINT)
            agent.wait()
            raise
    passed.take_effect()
    return outcome
