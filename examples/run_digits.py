"""`make run`: train_digits.py on a local cluster, from the first process to the last.

A rendezvous service and a timer service, two agents with two workers each, all on this machine and on free
ports. Prints their addresses, the progress of the training, and its result.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from local_cluster import RALLYPOINT, Job, LocalCluster, RunWatch
from programs import ClusterError, Feed, Line
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

EXAMPLES = Path(__file__).parent
NODES = ("node-0", "node-1")
LEAST_ACCURACY = 0.92
"""Held-out accuracy that a finished training must have; it reaches 0.95 and more."""

TRAINING = 300.0
"""Seconds that a training may take; it takes about ten."""

EPOCH = re.compile(r"round (?P<round>\d+) · .*epoch (?P<epoch>\d+)/\d+ · ")
_RESULT = re.compile(r"held-out accuracy ([01]\.\d+)")


def new_run_id() -> str:
    """Return a name that no run had before."""
    return f"digits-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def digits_job(folder: Path, run_id: str, *arguments: str, **settings: Any) -> Job:
    """Return the job: train_digits.py from its beginning, with a checkpoint of its own.

    Args:
        folder: of the cluster; the run gets a folder in it.
        run_id: name of the run.
        arguments: for train_digits.py, besides the checkpoint.
        settings: of the `Job`.
    """
    own = (folder / "runs" / run_id).absolute()
    command = (str(EXAMPLES / "train_digits.py"), "--checkpoint", str(own / "digits.npz"), *arguments)
    return Job(run_id, command, log_dir=own, **settings)


class Progress:
    """Prints events with the seconds since the beginning."""

    def __init__(self) -> None:
        """Begin now."""
        self.began = time.time()

    def say(self, text: str, at: float | None = None) -> None:
        """Print a line with its time (Unix seconds; default: now)."""
        seconds = (time.time() if at is None else at) - self.began
        print(f"{seconds:7.2f} s  {text}", flush=True)

    @asynccontextmanager
    async def shown(self, watch: RunWatch, output: Feed[Line]) -> AsyncIterator[None]:
        """Print rounds and the output of workers while the context is open."""
        showing = [
            asyncio.create_task(self._follow_rounds(watch)),
            asyncio.create_task(self._follow_output(output)),
        ]
        try:
            yield
        finally:
            for task in showing:
                task.cancel()
            await asyncio.gather(*showing, return_exceptions=True)

    async def _follow_output(self, output: Feed[Line]) -> None:
        shown = 0
        while True:
            line = await output.first("output", lambda _: True, since=shown, timeout=None)
            shown += 1
            self.say(line.text, line.time)

    async def _follow_rounds(self, watch: RunWatch) -> None:
        ended = begun = states = 0
        while True:
            seen = await watch.states.first("a state", lambda _: True, since=states, timeout=None)
            states, run = states + 1, seen.run
            if run.last_round_end.round > ended:
                ended = run.last_round_end.round
                self.say(f"round {ended} ended: {run.last_round_end.detail}", seen.time)
            if run.phase == pb.PHASE_FINAL and run.round > begun:
                begun = run.round
                nodes = ", ".join(node.node_id for node in run.nodes if node.HasField("assignment"))
                self.say(f"round {begun}: {run.world_size} workers on {nodes}", seen.time)


async def start_cluster(cluster: LocalCluster, job: Job) -> RunWatch:
    """Start services and agents, and print their addresses; return a watch of the run."""
    await asyncio.gather(cluster.start_rendezvous(), cluster.start_timer())
    folder = _short(cluster.folder)
    print(f"rendezvous service  {cluster.rendezvous_endpoint}  (journal {folder}/rendezvous.db)")
    print(f"timer service       {cluster.timer_endpoint}")
    print(f"agents              {', '.join(NODES)}  ({job.workers} workers each)")
    print(f"logs                {folder}/{{rendezvous,timer,{','.join(NODES)}}}.log")
    print(f"run                 {job.run_id}")
    print(
        f"look at it with     {_short(RALLYPOINT)} status {job.run_id} "
        f"--rdzv-endpoint {cluster.rendezvous_endpoint}\n",
        flush=True,
    )
    await asyncio.gather(*(cluster.start_agent(name, job) for name in NODES))
    return cluster.watch(job.run_id)


async def finish(cluster: LocalCluster, watch: RunWatch) -> tuple[str, float]:
    """Wait for the end of the run and of its agents; return the reason of the end, and the accuracy.

    Raises:
        ClusterError: it did not end well.
    """
    seen = await watch.until("the end of the run", lambda run: run.phase == pb.PHASE_CLOSED, TRAINING)
    codes = await asyncio.gather(*(cluster.programs[name].ended(TRAINING) for name in NODES))
    end = seen.run.run_end
    if any(codes) or end.outcome != pb.OUTCOME_SUCCEEDED:
        reports = "\n".join(cluster.programs[name].report for name in NODES)
        raise ClusterError(f"the job failed: {end.detail}\n{reports}".rstrip())
    results = [match[1] for line in cluster.output.items if (match := _RESULT.fullmatch(line.text))]
    if not results or float(results[-1]) < LEAST_ACCURACY:
        raise ClusterError(
            f"held-out accuracy {results or 'unknown'}; at least {LEAST_ACCURACY} was expected"
        )
    return end.detail, float(results[-1])


async def run(folder: Path) -> None:
    """Train once, on a cluster of its own."""
    job = digits_job(
        folder, new_run_id(), "--epochs", "30", "--epoch-seconds", "0.3", nodes="2", max_restarts=3
    )
    async with LocalCluster(folder) as cluster:
        detail, accuracy = await cluster.unless_one_fails(train(cluster, job))
    print(f"\nHeld-out accuracy {accuracy:.2f}: {detail}. All processes are stopped.", flush=True)


async def train(cluster: LocalCluster, job: Job) -> tuple[str, float]:
    """Train, from the first process to the last; return the reason of the end, and the accuracy."""
    watch = await start_cluster(cluster, job)
    async with Progress().shown(watch, cluster.output):
        return await finish(cluster, watch)


def end_well(main: Callable[[Path], Coroutine[Any, Any, None]], description: str) -> int:
    """Run an example's `main` with its folder; return the exit code. Ctrl-C stops it gracefully.

    Args:
        main: the program.
        description: for --help.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--var", type=Path, default=Path("var"), help="folder for journal, logs, checkpoints")
    folder = parser.parse_args().var
    received: list[signal.Signals] = []
    try:
        asyncio.run(_until_signalled(main(folder), received))
    except asyncio.CancelledError:
        print(f"\nStopped by {received[0].name}; nothing that was started is left.", file=sys.stderr)
        return 128 + received[0]
    except (ClusterError, OSError) as error:
        print(
            f"\nFailed: {error}\nNothing that was started is left; logs are below {_short(folder)}.",
            file=sys.stderr,
        )
        return 1
    return 0


async def _until_signalled(work: Coroutine[Any, Any, None], received: list[signal.Signals]) -> None:
    """Do some work; a signal cancels it. A second signal cancels the graceful stop: then SIGKILL is sent."""
    task = asyncio.current_task()
    assert task is not None, "a coroutine that runs has a task"

    def stop(number: signal.Signals) -> None:
        received.append(number)
        print(f"\n{number.name}: stopping everything ...", file=sys.stderr, flush=True)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    await work


def _short(path: Path) -> str:
    """Return the path relative to the working directory, if that is shorter."""
    return min(os.path.relpath(path), str(path), key=len)


if __name__ == "__main__":
    sys.exit(end_well(run, "Trains on handwritten digits, on a cluster of processes on this machine."))
