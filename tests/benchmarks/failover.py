"""`failover`: time from the kill of one node's process until the last survivor is notified, or has a new round."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

from benchmarks.clients.failover import FailoverOrder, FailoverResult
from benchmarks.clients.lost_node import LostNodeOrder
from benchmarks.figures import Figure
from benchmarks.processes import BenchmarkError, Server, client_command, raise_open_files, running, tail
from benchmarks.session import Session
from benchmarks.trials import FLOOR, JOURNALS, Start, floor, in_turns, measured, ours

SIZES = (1024,)

_GRACE = 2.0  # seconds: the default disconnect grace of a run
_TIMEOUT = 60.0  # seconds


def failover(session: Session) -> Iterator[Figure]:
    """Measure; see docs/benchmarks.md."""
    for nodes in session.sizes_or(SIZES):
        raise_open_files(nodes + 256)
        variants = {FLOOR: _failover(session, nodes, floor("tell-of-loss"), spare=False, grace=0.0)}
        for name in JOURNALS:
            variants[f"{name}.told"] = _failover(session, nodes, ours(name), spare=False, grace=_GRACE)
            variants[f"{name}.replaced"] = _failover(session, nodes, ours(name), spare=True, grace=_GRACE)
        results = in_turns(session, f"failover n={nodes}", variants, _show)
        least = results.get(FLOOR)
        for name, result in results.items():
            if name != FLOOR and least is not None:
                note = f"last of all, beyond the disconnect grace of {_GRACE:g} s"
                yield Figure(f"failover.{name}", nodes, result.last * 1e3, "ms", least.last * 1e3, note=note)


def _show(result: FailoverResult) -> str:
    return f"first {result.first * 1e3:.1f} ms, last {result.last * 1e3:.1f} ms beyond the grace"


def _failover(
    session: Session, nodes: int, start: Start, *, spare: bool, grace: float
) -> Callable[[], FailoverResult]:
    """Measure from the SIGKILL, less the grace."""

    def measure() -> FailoverResult:
        with start(session.folder) as server:
            log = session.folder / "client-lost-node.log"
            with running(_lost_node_command(server, nodes), log, subprocess.PIPE) as lost_node:
                assert lost_node.stdout is not None
                if lost_node.stdout.readline() != "joined\n":
                    raise BenchmarkError(
                        f"the node to be lost could not join: {tail(log)}; the server's log ends with: "
                        f"{server.log_tail()}"
                    )
                order = FailoverOrder(server.endpoint, lost_node.pid, nodes, spare, _TIMEOUT)
                result = measured(session, server, "failover", order, FailoverResult)
        return FailoverResult(result.first - grace, result.last - grace)

    return measure


def _lost_node_command(server: Server, nodes: int) -> list[str]:
    return client_command("lost_node", LostNodeOrder(server.endpoint, nodes, _TIMEOUT))
