"""`idle`: the cost of an agent whose workers do nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.c10d import with_local_names
from benchmarks.clients.idling import IdleOrder, IdleResult
from benchmarks.figures import Figure
from benchmarks.launch import compiled
from benchmarks.processes import RALLYPOINT, client_command, driven
from benchmarks.session import Session
from benchmarks.trials import in_turns

SIZES = (8,)
_SECONDS = 30.0
_TIMEOUT = 180.0  # seconds, of a trial
_MB = 1e6


def idle(session: Session) -> Iterator[Figure]:
    """Measure; see docs/benchmarks.md."""
    for workers in session.sizes_or(SIZES):
        run = ["--standalone", "--nproc-per-node", str(workers)]
        variants = {"ours": partial(_watched, session, [str(RALLYPOINT), "run", *run], workers)}
        if session.torch is not None:
            torchrun = [str(session.torch), "-m", "torch.distributed.run", *run]
            variants["torch"] = partial(_watched, session, torchrun, workers)
        found = in_turns(session, f"idle n={workers}", variants, _show)
        if "ours" not in found:
            continue
        ours, peer = found["ours"], found.get("torch")
        yield Figure("idle.cpu", workers, ours.cpu, "% of a core", None, peer.cpu if peer else None)
        for what, quantity in (("memory", "memory"), ("resident", "resident")):
            theirs = getattr(peer, quantity) / _MB if peer else None
            yield Figure(f"idle.{what}", workers, getattr(ours, quantity) / _MB, "MB", None, theirs)


def _show(result: IdleResult) -> str:
    return f"{result.cpu:.2f} % of a core, {result.memory / _MB:.0f} MB"


def _watched(session: Session, agent: Sequence[str], workers: int) -> IdleResult:
    order = IdleOrder([*agent], workers, _SECONDS, compiled(session))
    client = [*with_local_names(session.folder), *client_command("idling", order)]
    return IdleResult(**driven(client, session.folder / "client-idling.log", _TIMEOUT))
