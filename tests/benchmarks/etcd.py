"""`etcd`: fenced writes per second, and joining, with the journal on etcd; compared with etcd's own puts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.clients.etcd import EtcdOrder, EtcdResult
from benchmarks.clients.storm import StormOrder, StormResult
from benchmarks.clients.swarm import ServerCost
from benchmarks.figures import Figure
from benchmarks.processes import BenchmarkError, Server, client_command, driven, our_server, raise_open_files
from benchmarks.session import Session
from benchmarks.trials import FLOOR, in_turns, measured
from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.endpoint import parse_address
from rallypoint.etcd.values import prefix_end
from support.etcd_server import ETCD, EtcdCluster, etcd_cluster

CALLERS = (64, 256)
NODES = (256,)

_OURS = "ours"
_PROCESSES = 2  # of clients
_STARTING = 6.0  # seconds for clients to connect
_SECONDS = 4.0  # of the measurement
_TIMEOUT = 120.0  # seconds
_SHARDS = 64


@dataclass(frozen=True, slots=True)
class _Writes:
    rate: float  # per second
    slowest: float  # seconds
    server: float  # CPU seconds of the service for each
    etcd: float  # CPU seconds of etcd for each


@dataclass(frozen=True, slots=True)
class _Storm:
    ranks: float  # seconds
    final: float


def etcd(session: Session) -> Iterator[Figure]:
    """Measure; see docs/benchmarks.md."""
    if ETCD is None:
        raise BenchmarkError("needs the etcd command: .ci/install-etcd")
    with (
        TemporaryDirectory(dir=session.folder, prefix="etcd-") as folder,
        etcd_cluster(Path(folder)) as cluster,
    ):
        puts = 0.0
        for callers in session.sizes_or(CALLERS):
            raise_open_files(2 * callers + 256)
            variants = {FLOOR: _puts(session, cluster, callers), _OURS: _states(session, cluster, callers)}
            results = in_turns(session, f"etcd callers={callers}", variants, _show_writes)
            if len(results) == len(variants):
                rate, puts = results[_OURS].rate, results[FLOOR].rate
                note = f"floor: etcd's own puts; more is better; {_show_cpu(results[_OURS])}"
                yield Figure("etcd.states", callers, rate, "writes/s", puts, note=note)
        for nodes in session.sizes_or(NODES):
            raise_open_files(2 * nodes + 256)
            storms = in_turns(
                session, f"etcd nodes={nodes}", {_OURS: _storm(session, cluster, nodes)}, _show_storm
            )
            if storms and puts:
                note = "floor: as many of etcd's own puts"
                yield Figure("etcd.joined.ranks", nodes, storms[_OURS].ranks, "s", nodes / puts, note=note)
                yield Figure("etcd.joined.final", nodes, storms[_OURS].final, "s", nodes / puts, note=note)


def _show_writes(writes: _Writes) -> str:
    return f"{writes.rate:,.0f} writes/s, the slowest {writes.slowest * 1e3:.0f} ms; {_show_cpu(writes)}"


def _show_cpu(writes: _Writes) -> str:
    return f"CPU of a write: service {writes.server * 1e6:,.0f} us, etcd {writes.etcd * 1e6:,.0f} us"


def _show_storm(storm: _Storm) -> str:
    return f"ranks {storm.ranks:.3f} s, FINAL {storm.final:.3f} s"


def _puts(session: Session, cluster: EtcdCluster, callers: int) -> Callable[[], _Writes]:
    return lambda: _written(session, cluster, f"{cluster.url}/puts", callers)


def _states(session: Session, cluster: EtcdCluster, callers: int) -> Callable[[], _Writes]:
    def measure() -> _Writes:
        with _service(session, cluster) as server:
            return _written(session, cluster, server.endpoint, callers, server)

    return measure


def _storm(session: Session, cluster: EtcdCluster, nodes: int) -> Callable[[], _Storm]:
    def measure() -> _Storm:
        with _service(session, cluster) as server:
            order = StormOrder(server.endpoint, server.pid, nodes, "FINAL", _TIMEOUT)
            result = measured(session, server, "storm", order, StormResult)
        if result.failure:
            raise BenchmarkError(result.failure)
        return _Storm(result.ranks, result.final)

    return measure


def _written(
    session: Session, cluster: EtcdCluster, target: str, callers: int, server: Server | None = None
) -> _Writes:
    """Measure the writes of all client processes in the same seconds, and their cost to the service and etcd."""
    begin = time.monotonic() + _STARTING
    kind = "puts" if server is None else "states"
    shares = [len(range(index, callers, _PROCESSES)) for index in range(_PROCESSES)]
    (member,) = cluster.members
    assert member.process is not None
    measured_pids = [member.process.pid, *([] if server is None else [server.pid])]

    def drive(index: int) -> EtcdResult:
        order = EtcdOrder(kind, target, sum(shares[:index]), shares[index], begin, _SECONDS)
        log = session.folder / f"client-etcd-{index}.log"
        return EtcdResult(**driven(client_command("etcd", order), log, _TIMEOUT))

    def cpu_at(moment: float) -> list[float]:
        time.sleep(max(0.0, moment - time.monotonic()))
        return [ServerCost.of(pid).cpu for pid in measured_pids]

    with ThreadPoolExecutor(_PROCESSES) as pool:
        results = pool.map(drive, range(_PROCESSES))
        before, after = cpu_at(begin), cpu_at(begin + _SECONDS)
        answers = list(results)
    writes = sum(answer.writes for answer in answers)
    etcd_cpu, server_cpu = ([end - start for start, end in zip(before, after, strict=True)] + [0.0])[:2]
    slowest = max(answer.slowest for answer in answers)
    return _Writes(writes / _SECONDS, slowest, server_cpu / writes, etcd_cpu / writes)


@contextmanager
def _service(session: Session, cluster: EtcdCluster) -> Iterator[Server]:
    """Start the service on a prefix of its own; yield it when it owns all shards."""
    url = f"{cluster.url}/trial-{time.monotonic_ns()}"
    with our_server(session.folder, url) as server:
        try:
            asyncio.run(_all_owned(url))
        except TimeoutError:
            raise BenchmarkError(
                f"the service owns nothing; its log ends with: {server.log_tail()}"
            ) from None
        yield server


async def _all_owned(url: str) -> None:
    address = parse_address(url)
    owners = f"{address.prefix}/owners/".encode()
    end = prefix_end(owners)
    async with asyncio.timeout(_TIMEOUT), EtcdClient(address) as client:
        found = await client.get(owners, end, keys_only=True)
        owned = {pair.key for pair in found.pairs}
        async with aclosing(client.watch(owners, end, found.revision + 1)) as watch:
            while len(owned) < _SHARDS:
                owned |= {change.pair.key for change in await anext(watch)}
