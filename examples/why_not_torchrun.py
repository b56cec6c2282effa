"""Reported defects of torch's elastic, under stock torchrun and under `rallypoint run` with the same workers.

    python examples/why_not_torchrun.py                    # all: the table of docs/why-not-torchrun.md
    python examples/why_not_torchrun.py 111646 147064      # some, by the number of PyTorch's issue
    python examples/why_not_torchrun.py 111646 --keep var  # and the logs of all processes
    python examples/why_not_torchrun.py --under "rallypoint run"  # one launcher: a table of one column less

Needs torch, a C compiler (for a clock of its own) and root (for a host name of its own).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from local_cluster import RALLYPOINT, LocalCluster, reserve_port
from programs import PATIENCE, ClusterError, Feed, Line, Program

WORKER = Path(__file__).with_name("why_worker.py")
LAUNCHERS = ("torchrun", "rallypoint run")
_FOREIGN = ("RALLYPOINT_", "PET_", "GRPC_", "TORCHELASTIC_")
_START = 5 * PATIENCE  # seconds until all workers run or train: on a busy machine, torch takes long to import
_EXIT_BARRIER = 300  # seconds that torchrun waits for other agents at its end; no flag changes it


@dataclass(frozen=True, slots=True)
class Outcome:
    """The observed end of a scene.

    Attributes:
        text: a clause; the same in each run.
        seconds: from the fault to there; None if it did not come.
    """

    text: str
    seconds: float | None = None

    def __str__(self) -> str:
        """As in the table."""
        return self.text if self.seconds is None else f"{self.text} after {self.seconds:.0f} s"


class Job:
    """The agents of one job under one launcher; when its context ends, no process of it is left.

    Attributes:
        agents: by name; of one that was started again, the latest.
        output: the reports of all workers.
    """

    def __init__(self, launcher: str, folder: Path, *flags: str) -> None:
        """Start nothing yet; `flags` are those of every agent, and the same for both launchers."""
        self.launcher = launcher
        self.agents: dict[str, Program] = {}
        self.output: Feed[Line] = Feed()
        self.folder = folder
        self._flags = flags
        self._cluster = LocalCluster(folder)
        self._port = reserve_port()
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)
        } | {"OMP_NUM_THREADS": "1", "LOGLEVEL": "INFO"}

    async def __aenter__(self) -> Self:
        await self._cluster.__aenter__()
        if self.launcher == "rallypoint run":
            await self._cluster.start_rendezvous()
        return self

    async def __aexit__(self, *error: object) -> None:
        for agent in self.agents.values():
            with contextlib.suppress(ClusterError):
                await agent.kill(0)
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        self._port.close()
        await self._cluster.__aexit__(None, None, None)

    def start(self, name: str, *worker: str, wrapper: Sequence[str] = ()) -> None:
        """Start an agent; `a` also hosts the store of torchrun's rendezvous.

        Args:
            name: its name.
            worker: arguments of its workers.
            wrapper: a command in front of its own.
        """
        conf = "last_call_timeout=5"
        if self.launcher == "torchrun":
            endpoint = f"127.0.0.1:{self._port.getsockname()[1]}"
            command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
            conf += f",is_host={int(name == 'a')}"
        else:
            endpoint = self._cluster.rendezvous_endpoint
            command = [str(RALLYPOINT), "run"]
        command += ["--rdzv-endpoint", endpoint, "--rdzv-id", "job", "--rdzv-conf", conf, *self._flags]
        self.agents[name] = Program(
            name,
            [*wrapper, *command, str(WORKER), "--agent", name, *worker],
            self.folder,
            self._environment,
            self.output,
        )

    @property
    def now(self) -> int:
        """The number of lines so far."""
        return len(self.output.items)

    async def reports(self, event: str, world: int, since: int = 0, within: float = _START) -> list[Line]:
        """Wait until all workers of a world of that size have reported an event; return their reports.

        Args:
            event: running, trained or finished.
            world: the number of workers.
            since: the number of lines not to look at.
            within: seconds to wait; fewer reports are returned then.
        """
        seen: dict[int, Line] = {}

        def complete(line: Line) -> bool:
            if line.event == event and line.fields["world_size"] == world:
                seen[line.fields["rank"]] = line
            return len(seen) == world

        with contextlib.suppress(ClusterError):
            await self.output.first(event, complete, since=since, timeout=within)
        return [seen[rank] for rank in sorted(seen)]

    async def formed(self, world: int, event: str = "running") -> list[Line]:
        """Wait for the first round of a scene.

        Raises:
            ClusterError: it did not come.
        """
        reports = await self.reports(event, world)
        if len(reports) < world:
            raise ClusterError(f"{self.launcher}: {len(reports)} of {world} workers are {event}")
        return reports

    def alive(self, agent: str | None = None) -> list[int]:
        """Process ids of the workers that live, of one agent or of all."""
        pids = {
            line.fields["pid"]
            for line in self.output.items
            if line.event == "running" and agent in (None, line.fields["agent"])
        }
        return [pid for pid in pids if _is_worker(pid)]

    def error(self, name: str) -> str:
        """The last exception in an agent's log."""
        errors = re.findall(r"\b(\w+Error)\b", "\n".join(line.text for line in self.agents[name].log.items))
        return errors[-1] if errors else "no exception"


def _is_worker(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and str(WORKER) in process.cmdline()
    return False


async def next_round(
    job: Job, survivor: str | None, world: int, expected: str, within: float, *, event: str = "running"
) -> Outcome:
    """Wait for a round, for the end of an agent, or for some time.

    Args:
        job: the job, right after the fault.
        survivor: an agent that should be in the round; None: the end of an agent is no outcome of its own.
        world: the number of workers of the round.
        expected: the outcome if it comes.
        within: seconds to wait under torchrun; under Rallypoint, as long as a busy machine may take.
        event: the event that all its workers report: running, or trained.
    """
    within = within if job.launcher == "torchrun" else max(within, _START)
    began, since = time.monotonic(), job.now
    reports = asyncio.create_task(job.reports(event, world, since, within))
    ended = asyncio.create_task(job.agents[survivor].ended()) if survivor else reports
    try:
        await asyncio.wait({reports, ended}, return_when=asyncio.FIRST_COMPLETED)
        seconds = time.monotonic() - began
        if survivor and not reports.done():
            return Outcome(f"its agent ends with {job.error(survivor)}", seconds)
        if len(reports.result()) == world:
            return Outcome(expected, seconds)
        return Outcome(f"no worker {'trains' if event == 'trained' else 'is started'} within {within:.0f} s")
    finally:
        reports.cancel()
        ended.cancel()
        await asyncio.gather(reports, ended, return_exceptions=True)


# --- Scenes: agents a and b, each the part of a host; c10d's store is in a ------------------------------------


async def worker_killed(job: Job) -> str:
    """One of four workers that train is killed."""
    for name in "ab":
        job.start(name, "--train")
    first = await job.formed(4, "trained")
    since = job.now
    os.kill(first[3].fields["pid"], signal.SIGKILL)
    # Under torchrun, agents give up within that time or not, as the load has it: no worker trains in either case.
    outcome = await next_round(job, None, 4, "all train again", 90, event="trained")
    if outcome.seconds is None:
        return str(outcome)
    counts = {line.fields["restarts"] for line in job.output.items[since:] if line.event == "running"}
    return f"restart count {' and '.join(map(str, sorted(counts)))}: {outcome}"


async def store_host_stopped(job: Job) -> str:
    """The agent of the host with the store gets SIGTERM."""
    for name in "ab":
        job.start(name)
    await job.formed(2)
    job.agents["a"].signal(signal.SIGTERM)
    return f"the other host: {await next_round(job, 'b', 1, 'it goes on alone', 120)}"


async def agent_killed(job: Job) -> str:
    """An agent is killed."""
    for name in "ab":
        job.start(name)
    await job.formed(2)
    job.agents["b"].signal(signal.SIGKILL)
    outcome = await next_round(job, "a", 1, "it goes on alone", 45)
    orphans = "lives on" if job.alive("b") else "is gone"
    return f"the other host: {outcome}; the worker of the dead agent {orphans}"


async def agent_stopped(job: Job) -> str:
    """An agent gets SIGTERM, and is started again."""
    for name in "ab":
        job.start(name)
    await job.formed(2)
    job.agents["b"].signal(signal.SIGTERM)
    outcome = await next_round(job, "a", 1, "it goes on alone", 30)
    await job.agents["b"].ended(_START)
    job.start("b")
    back = await next_round(job, "a", 2, "both run", 240)
    return f"the other host: {outcome}; with the first one back: {back}"


async def agent_interrupted(job: Job) -> str:
    """Ctrl-C at one of three hosts that train."""
    for name in "abc":
        job.start(name, "--train")
    await job.formed(3, "trained")
    job.agents["c"].signal(signal.SIGINT)
    return str(await next_round(job, "a", 2, "the other two train again", 240, event="trained"))


async def store_host_finished(job: Job) -> str:
    """The host with the store has finished; the other one still works for longer than the exit barrier."""
    job.start("a", "--seconds", "5")
    job.start("b", "--seconds", str(_EXIT_BARRIER + 60))
    await job.formed(2)
    code = await job.agents["b"].ended(2 * _EXIT_BARRIER)
    finished = {line.fields["agent"] for line in job.output.items if line.event == "finished"}
    if "b" in finished and code == 0:
        return "the other host finishes as well"
    return f"the other host's agent ends with {job.error('b')}; its worker is stopped"


async def clocks_differ(job: Job) -> str:
    """Two hosts start, one with a clock that is five minutes slow."""
    clock = job.folder / "slow_clock.so"
    source = Path(__file__).with_name("slow_clock.c")
    compiler = await asyncio.create_subprocess_exec(
        *("cc", "-shared", "-fPIC", "-o", str(clock), str(source), "-ldl")
    )
    if await compiler.wait():
        raise ClusterError(f"cc could not compile {source}")
    job.start("a")
    job.start("b", wrapper=("env", f"LD_PRELOAD={clock}"))
    return str(await next_round(job, "a", 2, "both run", 60))


async def names_unknown(job: Job) -> str:
    """Two hosts start, neither of which can look up the other one's name: pods without a service."""
    for number, name in enumerate("ab", start=2):
        hosts = job.folder / f"hosts-{name}"
        hosts.write_text(f"127.0.0.{number} pod-{name}\n")
        script = f"mount --bind '{hosts}' /etc/hosts && hostname pod-{name} && exec \"$@\""
        job.start(name, "--train", wrapper=("unshare", "--uts", "--mount", "sh", "-c", script, "sh"))
    return str(await next_round(job, "a", 2, "both train", 90, event="trained"))


@dataclass(frozen=True, slots=True)
class Scene:
    """A defect.

    Attributes:
        fault: the event, for the table.
        play: brings it about, and returns the behaviour of the job.
        flags: of each agent.
    """

    fault: str
    play: Callable[[Job], Awaitable[str]]
    flags: str


SCENES = {
    "108158": Scene(
        "one of four workers is killed (SIGKILL)",
        worker_killed,
        "--nnodes 2 --nproc-per-node 2 --max-restarts 5",
    ),
    "111646": Scene("an agent is killed (SIGKILL)", agent_killed, "--nnodes 1:2 --max-restarts 5"),
    "67742": Scene(
        "the agent that hosts the store gets SIGTERM", store_host_stopped, "--nnodes 1:2 --max-restarts 5"
    ),
    "147064": Scene(
        "an agent gets SIGTERM, and is started again", agent_stopped, "--nnodes 1:2 --max-restarts 10"
    ),
    "76287": Scene("a host's clock is 5 minutes slow", clocks_differ, "--nnodes 2"),
    "74824": Scene("hosts cannot look up each other's names", names_unknown, "--nnodes 2"),
    "91943": Scene(
        "Ctrl-C at one of three hosts that train", agent_interrupted, "--nnodes 1:3 --max-restarts 100"
    ),
    "118891": Scene("the host with the store finishes 6 minutes early", store_host_finished, "--nnodes 2"),
}
"""By the number of PyTorch's issue."""
_IDLE = "118891"
"""That scene, which waits for six minutes and measures no time, disturbs no other."""


async def play(issue: str, folder: Path, launchers: Sequence[str]) -> list[str]:
    """Play a scene under some launchers; return a row of the table."""
    scene = SCENES[issue]

    async def under(launcher: str) -> str:
        async with Job(
            launcher, folder / f"{issue}-{launcher.partition(' ')[0]}", *scene.flags.split()
        ) as job:
            outcome = await scene.play(job)
        print(f"#{issue} {scene.fault}\n    {launcher}: {outcome}", file=sys.stderr, flush=True)
        return outcome

    if issue == _IDLE:
        outcomes: Sequence[str] = await asyncio.gather(*map(under, launchers))
    else:
        outcomes = [await under(launcher) for launcher in launchers]
    return [f"[{issue}](https://github.com/pytorch/pytorch/issues/{issue})", scene.fault, *outcomes]


async def play_all(issues: Sequence[str], folder: Path, launchers: Sequence[str]) -> list[list[str]]:
    """Play scenes one after the other, with the idle one beside them; return the rows of the table."""
    idle = asyncio.create_task(play(_IDLE, folder, launchers)) if _IDLE in issues else None
    try:
        rows = [await play(issue, folder, launchers) for issue in issues if issue != _IDLE]
        return [*rows, await idle] if idle else rows
    finally:
        if idle:
            idle.cancel()
            await asyncio.gather(idle, return_exceptions=True)


def table(rows: Sequence[Sequence[str]], launchers: Sequence[str]) -> str:
    """The rows in Markdown."""
    head = ("issue", "event", *(f"`{launcher}`" for launcher in launchers))
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Play the scenes that were named, or all, and print the table."""
    parser = argparse.ArgumentParser(description="Show defects of torchrun, and the same under Rallypoint.")
    parser.add_argument(
        "issues", nargs="*", metavar="ISSUE", help=f"of {', '.join(SCENES)}; all if none is given"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the logs of all processes there")
    parser.add_argument(
        "--under", choices=LAUNCHERS, help="play under this launcher only; under both by default"
    )
    options = parser.parse_args()
    launchers = (options.under,) if options.under else LAUNCHERS
    if unknown := set(options.issues) - SCENES.keys():
        parser.error(f"no scene has the number {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="why-not-torchrun-") as temporary:
        folder = (options.keep or Path(temporary)).absolute()
        try:
            rows = asyncio.run(play_all(options.issues or list(SCENES), folder, launchers))
        except ClusterError as error:
            sys.exit(f"Error: {error}")
    print(table(rows, launchers), end="")


if __name__ == "__main__":
    main()
