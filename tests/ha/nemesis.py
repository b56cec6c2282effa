"""Random faults for a cluster under load, and a check of all replies and reports that clients received meanwhile.

    PYTHONPATH=tests python -m ha.nemesis --minutes 30 --seed 7 --folder /tmp/nemesis

plays a seed: it determines the faults, their order and their durations. All other timing depends on the machine, so the
same seed gives the same faults, but not the same run. Afterwards the folder has all operations of clients and reports
to them (`history.jsonl`, which `python -m ha.check` can check again), and the logs of all processes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import grpc

from ha.check import check
from ha.clocks import BootClock, WallClock, library
from ha.cluster import ETCD, PATIENCE, REPLICAS, Cluster, running_cluster
from ha.doors import Doors, open_doors
from ha.etcd_gateway import EtcdSilent
from ha.faults import (
    ETCD_FAULTS,
    LINK_FAULTS,
    REPLICA_FAULTS,
    Fault,
    Stage,
    leader_parted_from_members,
    wall_clock_set,
)
from ha.history import History
from ha.last_words import read_facts
from ha.members import Members, at_work
from ha.report import Report
from ha.writers import Writers
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from torture.crowd import calm

RUNS = ("crew-0", "crew-1", "crew-2")
# Clients of each kind and run, and how long each waits between two operations on average, seconds.
_CLIENTS = 3
_PAUSE = 0.3
# Longest pause between two faults of one sequence, seconds.
_CALM = 8.0
_LOOK = 0.5


class Nemesis:
    """Breaks a cluster with two parallel sequences of faults: one of replicas, one of etcd and the network."""

    def __init__(self, stage: Stage, seed: int, history: History, say: Callable[[str], None]) -> None:
        self.faults: Counter[str] = Counter()
        self.takeovers = 0
        self._stage = stage
        self._seed = seed
        self._history = history
        self._log = say
        self._began = history.clock()

    async def rage(self, seconds: float) -> None:
        """Inject faults for some seconds; return when everything is repaired."""
        until = self._history.clock() + seconds
        replicas = [each for each in REPLICA_FAULTS if each is not wall_clock_set or self._stage.wall_clock]
        others = [*ETCD_FAULTS, *LINK_FAULTS]
        if self._stage.cluster.network.why_inseparable(*ETCD[:2]):
            others.remove(leader_parted_from_members)
        async with asyncio.TaskGroup() as hands:
            hands.create_task(self._hand("replicas", replicas, until))
            hands.create_task(self._hand("etcd", others, until))
        await self._stage.cluster.heal()

    async def _hand(self, hand: str, faults: Sequence[Fault], until: float) -> None:
        schedule = random.Random(f"{self._seed}/{hand}")
        table = {**REPLICA_FAULTS, **ETCD_FAULTS, **LINK_FAULTS}
        number = 0
        while self._history.clock() < until:
            number += 1
            (fault,) = schedule.choices(faults, [table[each][0] for each in faults])
            held, calm = schedule.uniform(*table[fault][1]), schedule.uniform(0.0, _CALM)
            draw = random.Random(f"{self._seed}/{hand}/{number}")
            async with fault(replace(self._stage, draw=draw)) as what:
                self.faults[fault.__name__] += 1
                self._note(f"{what} ({fault.__name__}, {held:.1f} s)")
                await asyncio.sleep(held)
            self._note(f"{fault.__name__} is over")
            await asyncio.sleep(calm)

    def _note(self, what: str) -> None:
        self._history.trouble(what)
        self._log(f"{self._history.clock() - self._began:7.1f} {what}")

    async def count_takeovers(self, stopping: asyncio.Event) -> None:
        """Poll the owners of the runs, and count their changes."""
        last: dict[str, str] = {}
        while not stopping.is_set():
            try:
                owners = await self._stage.cluster.owners()
                for run_id in RUNS:
                    owner = owners.get(await self._stage.cluster.shard(run_id))
                    if owner is not None and last.setdefault(run_id, owner) != owner:
                        self.takeovers += 1
                        last[run_id] = owner
            except (EtcdSilent, KeyError):
                pass  # etcd does not reply, or has no layout yet
            await asyncio.sleep(_LOOK)


async def play(folder: Path, seed: int, seconds: float, say: Callable[[str], None] = print) -> Report:
    """Play a seed for some seconds on a fresh cluster, in an existing folder, and check its history.

    Raises:
        AssertionError: The cluster did not come up, did not recover, or a process ended by itself.
    """
    report = Report(seconds)
    async with AsyncExitStack() as stack:
        history = stack.enter_context(History(folder / "history.jsonl"))
        history.trouble(f"seed {seed}, {seconds:.0f} s")
        cluster = await stack.enter_async_context(running_cluster(folder / "cluster", replicas=False))
        stage = _stage(cluster, folder)
        await cluster.replicas.open()
        endpoints = {name: cluster.replicas.endpoint(name) for name in REPLICAS}
        doors = await stack.enter_async_context(open_doors(endpoints))
        draw = random.Random(f"{seed}/clients")
        members = [Members(run, cluster.endpoints, doors, history, draw) for run in RUNS]
        writers = [Writers(each.crowd.nodes, doors, history, draw, _PAUSE) for each in members]
        nemesis = Nemesis(stage, seed, history, say)
        stopping = asyncio.Event()
        nodes = [each.tasks(stopping) for each in members]
        stack.push_async_callback(_end_nodes, members)
        working = await stack.enter_async_context(at_work(*nodes))
        for each in members:
            await each.agree(PATIENCE)
        working += [task for each in writers for task in each.tasks(_CLIENTS, stopping)]
        working.append(asyncio.create_task(nemesis.count_takeovers(stopping)))
        await _beside(nemesis.rage(seconds), working)
        say("all is repaired")
        repaired = history.clock()
        stopping.set()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*working)
        await _read_back(members, writers, cluster, doors)
        report.recovered = history.clock() - repaired
        report.events = await read_facts(cluster, history, RUNS)
        history.end()
        report.complaints = cluster.replicas.complaints()
    report.faults, report.takeovers = nemesis.faults, nemesis.takeovers
    report.count(history)
    report.findings = await asyncio.to_thread(check, history)
    return report


def _stage(cluster: Cluster, folder: Path) -> Stage:
    """Set up clocks: one replica's machine can be suspended, another's wall clock be set; the third's stay right."""
    first, second, _ = REPLICAS
    boot_clock = BootClock(folder / f"{first}.clock")
    cluster.replicas.wrappers[first] = boot_clock.wrapper
    wall_clock = WallClock(folder / f"{second}.clock") if library() is not None else None
    if wall_clock is not None:
        cluster.replicas.wrappers[second] = wall_clock.wrapper
    return Stage(
        cluster,
        RUNS,
        random.Random(),
        (first, boot_clock),
        None if wall_clock is None else (second, wall_clock),
    )


async def _beside(raging: object, working: Sequence[asyncio.Task[None]]) -> None:
    """Wait for the end of `raging`; if one of the tasks `working` fails first, raise its error."""
    rage = asyncio.ensure_future(raging)  # type: ignore[call-overload]
    try:
        pending = {rage, *working}
        while not rage.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        await rage
    finally:
        rage.cancel()
        await asyncio.wait({rage})


async def _read_back(
    members: Sequence[Members], writers: Sequence[Writers], cluster: Cluster, doors: Doors
) -> None:
    """Wait until the service answers, and read everything back."""
    for each in members:
        await calm(each.agree, partial(_restart, each.run_id, cluster, doors), PATIENCE)
    for some in writers:
        await some.read_back(PATIENCE)
    for each in members:
        await each.read_log(doors.by_name[REPLICAS[0]], PATIENCE)


async def _restart(run_id: str, cluster: Cluster, doors: Doors) -> None:
    owner = doors.by_name[await cluster.owner(run_id)]
    with suppress(grpc.aio.AioRpcError):  # the caller retries
        await owner.rendezvous.RestartRun(pb.RestartRunRequest(run_id=run_id), timeout=PATIENCE)


async def _end_nodes(members: Sequence[Members]) -> None:
    for each in members:
        await each.crowd.die()


@click.command()
@click.option("--minutes", type=float, default=30.0, show_default=True, help="How long the trouble lasts.")
@click.option("--seed", type=int, help="Which trouble; by default drawn, and said.")
@click.option(
    "--folder", type=click.Path(path_type=Path), help="For the history and logs; by default a new one."
)
def main(minutes: float, seed: int | None, folder: Path | None) -> None:
    """Play random faults; exit code 1 if there are violations or errors of replicas, or hardly anything happened."""
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    folder = folder or Path(tempfile.mkdtemp(prefix="nemesis-"))
    click.echo(f"seed {seed}, history and logs in {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    # Dozens of clients lose their streams over and over; a log message for each would hide the rest.
    logging.getLogger("rallypoint.rendezvous.client").disabled = True
    began = time.monotonic()
    report = asyncio.run(play(folder, seed, 60 * minutes, click.echo))
    for (what, outcome), count in sorted(report.kinds.items()):
        click.echo(f"{count:9} {what} {outcome}")
    for finding in report.findings:
        click.echo(str(finding))
    for complaint in report.complaints:
        click.echo(f"a replica complained: {complaint}")
    for idle in report.idle():
        click.echo(f"hardly anything happened: {idle}")
    click.echo(f"{report}; {time.monotonic() - began:.0f} s in all")
    sys.exit(1 if report.findings or report.complaints or report.idle() else 0)


if __name__ == "__main__":
    main()
