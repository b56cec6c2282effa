"""`restart` and `newcomer`: time until all workers run again, after a failure and after one more host joined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from uuid import uuid4

from benchmarks.c10d import with_local_names
from benchmarks.clients.regrouping import RegroupOrder, RegroupResult
from benchmarks.figures import Figure
from benchmarks.launch import compiled
from benchmarks.processes import RALLYPOINT, client_command, driven, free_port, our_server
from benchmarks.session import Session
from benchmarks.trials import in_turns

_TIMEOUT = 60.0  # seconds until a world is complete
_RESTARTS = "1000"


def restart(session: Session) -> Iterator[Figure]:
    """Measure; see docs/benchmarks.md."""
    # One failure per job: a run whose rounds fail repeatedly restarts with a back-off.
    for size in session.sizes_or((4,)):
        flags = ["--nnodes", "2", "--nproc-per-node", str(size // 2), "--max-restarts", _RESTARTS]
        variants = {"ours": partial(_ours, session, "restart", flags, 2, size // 2)}
        if session.torch is not None:
            variants["torch"] = partial(_torch, session, flags, size // 2)
        found = in_turns(session, f"restart n={size}", variants, lambda it: f"{it.seconds:.3f} s")
        if "ours" in found:
            peer = found.get("torch")
            theirs = peer.seconds if peer is not None else None
            yield Figure("restart.running", size, found["ours"].seconds, "s", None, theirs)


def newcomer(session: Session) -> Iterator[Figure]:
    """Measure; see docs/benchmarks.md."""
    # The last call matters for the first world alone: with three nodes, the maximum, a round does not wait.
    flags = ["--nnodes", "1:3", "--nproc-per-node", "1", "--rdzv-conf", "last_call_timeout=1"]
    variants = {"ours": partial(_ours, session, "newcomer", flags, 2, 1)}
    found = in_turns(session, "newcomer n=3", variants, lambda it: f"{it.seconds:.3f} s")
    if "ours" in found:
        note = "torch: the job dies"
        yield Figure("newcomer.running", 3, found["ours"].seconds, "s", note=note)


def _ours(session: Session, kind: str, flags: Sequence[str], agents: int, workers: int) -> RegroupResult:
    with our_server(session.folder, "memory") as rendezvous:
        where = ["--insecure", "--rdzv-endpoint", rendezvous.endpoint, "--rdzv-id", uuid4().hex]
        return _regrouped(session, kind, [str(RALLYPOINT), "run", *where, *flags], agents, workers)


def _torch(session: Session, flags: Sequence[str], workers: int) -> RegroupResult:
    with free_port() as port:
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", uuid4().hex]
        agent = [str(session.torch), "-m", "torch.distributed.run", *where, *flags]
        return _regrouped(session, "restart", agent, 2, workers)


def _regrouped(session: Session, kind: str, agent: Sequence[str], agents: int, workers: int) -> RegroupResult:
    log = session.folder / f"agents-{kind}.log"
    log.unlink(missing_ok=True)
    order = RegroupOrder(kind, [*agent], agents, workers, compiled(session), str(log), _TIMEOUT)
    client = [*with_local_names(session.folder), *client_command("regrouping", order)]
    return RegroupResult(**driven(client, session.folder / "client-regrouping.log", 3 * _TIMEOUT))
