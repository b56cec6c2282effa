"""`elastic_launch(config, entrypoint)(*args)`: launch a job from Python, for programs and for functions."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rallypoint.agent.failures.failure import write_reply_file
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

__all__ = [
    "CallError",
    "ChildFailedError",
    "LaunchConfig",
    "WorkersFailedError",
    "elastic_launch",
    "launch_agent",
]


class WorkersFailedError(Exception):
    """A job that did not succeed.

    Attributes:
        name: Name of the function or program.
        exit_code: Exit code that `rallypoint run` would have had: see docs/failures.md.
        detail: How the job ended, in one sentence.
        failure: The failure that ended the run, on any of its hosts; None if it was not a worker's.
        report: The failure as text for people, several lines.
        others: Other failures of that round on this host, in order of time.
    """

    def __init__(self, name: str, outcome: LaunchOutcome) -> None:
        """Store the outcome of a launch."""
        # Not super(): a subclass is torch's too, whose arguments are different.
        Exception.__init__(self, name, outcome)
        self.name = name
        self.exit_code = outcome.exit_code
        self.detail = outcome.detail
        self.failure = outcome.failure
        self.report = outcome.report
        self.others = outcome.others

    def __str__(self) -> str:
        """Return the sentence, and the report if there is one."""
        return "\n".join(filter(None, (f"{self.name}: {self.detail}", self.report)))

    @property
    def failures(self) -> dict[int, Any]:
        """Return the failures by the global rank of their workers, the run's first failure first.

        In a program that has imported torch these are torch's ProcessFailure, else WorkerFailure.
        """
        known = (self.failure, *self.others) if self.failure is not None else ()
        return {failure.rank: failure for failure in known}

    def get_first_failure(self) -> tuple[int, Any]:
        """Return the run's first failure, with its global rank, as torch's ChildFailedError does.

        Raises:
            LookupError: No worker failed.
        """
        for found in self.failures.items():
            return found
        raise LookupError(f"{self.name}: no worker failed ({self.detail})")

    def write_reply_file(self, path: str) -> None:
        """Write the first failure to an error file: `record`, around a launch, calls this."""
        write_reply_file(path, self.failure, self.detail)


ChildFailedError = WorkersFailedError
"""Torch's name of `WorkersFailedError`."""


def _error_type() -> type[WorkersFailedError]:
    """Return the type to raise for a failed worker: torch's too, in a program that has imported torch."""
    if "torch" in sys.modules:
        with contextlib.suppress(ImportError):  # another module of that name, or a broken installation
            # By name: the launcher is below rallypoint.torch, and works without torch.
            torch_failures = importlib.import_module("rallypoint.torch.failures")
            error: type[WorkersFailedError] = torch_failures.torch_error(WorkersFailedError)
            return error
    return WorkersFailedError


class elastic_launch:
    """Run a job on this host, as part of a job on several hosts if the configuration names more.

        results = elastic_launch(LaunchConfig(1, 1, nproc_per_node=2), train)(dataset, 10)
        elastic_launch(LaunchConfig(1, 1, nproc_per_node=2), "python")("-u", "train.py")

    See docs/python.md for the start methods, and for the types that can be passed and returned.
    """

    def __init__(self, config: Any, entrypoint: Callable[..., Any] | str) -> None:
        """Store the settings; nothing is started.

        Args:
            config: How the job runs: a LaunchConfig, ours or torch's.
            entrypoint: A function, or the name of a program.
        """
        self._config = config if isinstance(config, LaunchConfig) else LaunchConfig.from_torch(config)
        self._entrypoint = entrypoint

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Run the job to its end. All processes that it started are gone afterwards, also after an error.

        Args:
            args: Arguments of the function or the program; `${local_rank}` in text is replaced.

        Returns:
            The return values of the function by the global rank of this host's workers; None for a program.

        Raises:
            WorkersFailedError: The job did not succeed, or left its run after a signal that this program handles.
            KeyboardInterrupt: Ctrl-C; the workers are stopped.
            SystemExit: Another signal of `signals_to_handle`; the workers are stopped. Not if this program handles it.
            CallError: The function or its arguments can't be sent to the workers, or a return value can't be sent back.
            ValueError: The configuration is wrong, or the job could not be started as requested; one line.
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


def launch_agent(config: Any, entrypoint: Callable[..., Any] | str, args: Sequence[Any]) -> dict[int, Any]:
    """Do the same as `elastic_launch(config, entrypoint)(*args)`, under torch's name."""
    return elastic_launch(config, entrypoint)(*args)


def _check_forkable() -> None:
    if "grpc" in sys.modules:
        raise ValueError(
            "start_method='fork': this process has loaded gRPC, which does not work in a fork; import gRPC later, "
            "or use 'spawn' or 'forkserver'"
        )
    if threading.active_count() > 1:
        warnings.warn(
            "start_method='fork' while other threads run: workers don't have these threads, but may inherit locks that "
            "they hold, which are then never released; use 'spawn' or 'forkserver' to avoid this",
            RuntimeWarning,
            stacklevel=4,
        )


def _check(name: str, outcome: LaunchOutcome) -> None:
    if outcome.refused:
        raise ValueError(in_our_names(outcome.detail))
    if outcome.exit_code != 0:
        # Torch's error always has a failure.
        raise (_error_type() if outcome.failure is not None else WorkersFailedError)(name, outcome)


def _run(start: Callable[[], AgentProcess], signals: Sequence[int]) -> LaunchOutcome:
    """Run an agent to its end; no process of it is left when this returns or raises."""
    with PassedSignals(signals) as passed:
        agent = start()
        passed.send_by(agent.send_signal)
        try:
            outcome = agent.wait()
        except BaseException:  # raised by a user's signal handler
            agent.send_signal(signal.SIGINT)
            agent.wait()
            raise
    passed.take_effect()
    return outcome
