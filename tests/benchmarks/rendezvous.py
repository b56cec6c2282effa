"""`rendezvous`: N nodes connect at once; time until the last receives its ranks, and until it receives FINAL.

`security`: the same over TLS, and with tokens, against plaintext; and a local command over a Unix socket, against TCP.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import grpc

from benchmarks.c10d import c10d_rendezvous
from benchmarks.clients.launching import LaunchResult
from benchmarks.clients.storm import StormOrder, StormResult
from benchmarks.figures import Figure
from benchmarks.launch import measured_launch
from benchmarks.processes import RALLYPOINT, BenchmarkError, our_server, raise_open_files
from benchmarks.session import Session
from benchmarks.trials import FLOOR, JOURNALS, Start, floor, in_turns, measured, ours

SIZES = (64, 256, 1024, 4096)
SECURITY_SIZES = (1024,)
_PLAINTEXT = "plaintext"

_SAME_MESSAGES = "floor, same messages"
_TIMEOUT = 120.0  # seconds; the slowest takes about five
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class _Storm:
    """The numbers of a StormResult."""

    ranks: float
    final: float
    memory: float
    cpu: float


def rendezvous(session: Session) -> Iterator[Figure]:
    """Measure; see docs/benchmarks.md."""
    for nodes in session.sizes_or(SIZES):
        raise_open_files(nodes + 256)
        storms = _Storms(session, nodes)
        variants = {FLOOR: partial(storms.measure, FLOOR, floor("one-message"), "FROZEN")}
        for name in JOURNALS:
            # The nodes of these do not confirm, so that the clients have as much work as with the floor.
            variants[_to_ranks(name)] = partial(storms.measure, name, ours(name), "FROZEN")
            variants[name] = partial(storms.measure, name, ours(name), "FINAL")
        variants[_SAME_MESSAGES] = partial(storms.measure, _SAME_MESSAGES, floor("same-messages"), "FINAL")
        results = in_turns(session, f"rendezvous n={nodes}", variants, _show)
        peer = c10d_rendezvous(session, nodes)
        for name in JOURNALS:
            note = f"in {2 * session.trials} storms"
            yield Figure(f"rendezvous.{name}.lost", nodes, storms.lost[name], "calls", note=note)
            if {name, _to_ranks(name), FLOOR, _SAME_MESSAGES} <= results.keys():
                yield from _figures(name, nodes, results, peer)


def security(session: Session) -> Iterator[Figure]:
    """Measure; see docs/benchmarks.md."""
    files = Path(tempfile.mkdtemp(dir=session.folder, prefix="credentials-"))
    _rallypoint("tls", "init", str(files), "127.0.0.1")
    _rallypoint("token", "key", str(files))
    token = _rallypoint("token", "issue", "nodes", "--key", f"{files}/token.key", "--role", "node")
    (files / "token").write_text(token)
    tls = ("--tls-cert", f"{files}/server.pem", "--tls-key", f"{files}/server.key")
    keys, ca = ("--token-keys", f"{files}/token.pub"), f"{files}/ca.pem"
    yield from _local_commands(session)
    for nodes in session.sizes_or(SECURITY_SIZES):
        raise_open_files(nodes + 256)
        measure = _Storms(session, nodes).measure
        variants = {
            _PLAINTEXT: partial(measure, _PLAINTEXT, ours("memory"), "FINAL"),
            "tls": partial(measure, "tls", partial(our_server, journal="memory", security=tls), "FINAL", ca),
            "tokens": partial(
                measure,
                "tokens",
                partial(our_server, journal="memory", security=(*tls, *keys)),
                "FINAL",
                ca,
                f"{files}/token",
            ),
        }
        results = in_turns(session, f"security n={nodes}", variants, _show)
        for name in ("tls", "tokens"):
            if {name, _PLAINTEXT} <= results.keys():
                storm, plain = results[name], results[_PLAINTEXT]
                yield Figure(
                    f"security.{name}", nodes, storm.final, "s", plain.final, note="floor: plaintext"
                )
                each = 1e6 / nodes
                yield Figure(f"security.{name}.cpu", nodes, storm.cpu * each, "µs/node", plain.cpu * each)


def _local_commands(session: Session) -> Iterator[Figure]:
    """Measure a command on the service's own host: over its Unix socket, which needs no secret, and plaintext TCP."""

    def measure(start: Start, *flags: str) -> LaunchResult:
        with start(session.folder) as server, grpc.insecure_channel(server.endpoint) as channel:
            grpc.channel_ready_future(channel).result(_TIMEOUT)
            return measured_launch(
                session, [str(RALLYPOINT), "status", "--rdzv-endpoint", server.endpoint, *flags]
            )

    variants = {
        "socket": partial(measure, partial(our_server, journal="memory", security=(), socket=True)),
        "tcp": partial(measure, ours("memory"), "--insecure"),
    }
    results = in_turns(session, "security rallypoint status", variants, lambda it: f"{it.seconds:.3f} s")
    if len(results) == len(variants):
        seconds = [results[name].seconds for name in variants]
        yield Figure("security.socket", 1, seconds[0], "s", seconds[1], note="floor: over TCP")


def _rallypoint(*arguments: str) -> str:
    return subprocess.run([RALLYPOINT, *arguments], check=True, capture_output=True, text=True).stdout


class _Storms:
    """Storms of one size; `lost`: by variant, the number of streams that ended unexpectedly."""

    def __init__(self, session: Session, nodes: int) -> None:
        self.lost: Counter[str] = Counter()
        self._session = session
        self._nodes = nodes

    def measure(self, variant: str, start: Start, until: str, ca: str = "", token: str = "") -> _Storm:
        """Measure one storm, on a server of its own."""
        with start(self._session.folder) as server:
            order = StormOrder(server.endpoint, server.pid, self._nodes, until, _TIMEOUT, ca, token)
            result = measured(self._session, server, "storm", order, StormResult)
        self.lost[variant] += sum(result.lost.values())
        if result.lost or result.failure:
            raise BenchmarkError(result.failure or f"streams lost: {result.lost}")
        return _Storm(result.ranks, result.final, result.memory, result.cpu)


def _to_ranks(name: str) -> str:
    return f"{name}, to its ranks"


def _show(storm: _Storm) -> str:
    return f"ranks {storm.ranks:.3f} s, last {storm.final:.3f} s, server {storm.cpu:.2f} s of CPU"


def _figures(
    name: str, nodes: int, results: Mapping[str, _Storm], peer: tuple[float | None, str]
) -> Iterator[Figure]:
    def figure(what: str, value: float, floor: float, unit: str, note: str) -> Figure:
        return Figure(f"rendezvous.{name}.{what}", nodes, value, unit, floor, note=note)

    storm, least, same = results[name], results[FLOOR], results[_SAME_MESSAGES]
    yield replace(figure("ranks", results[_to_ranks(name)].ranks, least.ranks, "s", peer[1]), peer=peer[0])
    yield figure("final", storm.final, least.ranks, "s", "")
    as_many = "floor with as many messages as ours"
    yield figure("ranks.same-messages", storm.ranks, same.ranks, "s", as_many)
    yield figure("final.same-messages", storm.final, same.final, "s", as_many)
    yield figure("memory", storm.memory / _MIB, least.memory / _MIB, "MiB", "growth of the server")
    each = 1e6 / nodes
    yield figure("cpu", storm.cpu * each, least.cpu * each, "µs/node", "server, to the last FINAL")
    yield figure("cpu.same-messages", storm.cpu * each, same.cpu * each, "µs/node", as_many)
