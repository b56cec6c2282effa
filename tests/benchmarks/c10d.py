"""The peer: torch's c10d, measured where an interpreter has torch."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.clients.c10d_order import C10dOrder, C10dResult
from benchmarks.figures import Figure
from benchmarks.processes import BenchmarkError, DidNotFinish, client_command, driven
from benchmarks.session import Session
from benchmarks.trials import in_turns, median, ours
from support.mortal import MORTAL_ONCE_MORE

# Seconds. At 256 nodes some rendezvous take 11, and some never end.
PATIENCE = 120.0
_MOST_UNFINISHED = 2  # more trials would show nothing new
# With more nodes no rendezvous has been seen to end.
MOST_NODES = 256
HANDLERS = (64, 128)

# c10d looks up a name for the address of every connection. With a name server, that look-up would dominate the
# measurement; so c10d sees a machine that resolves names from local files only.
_LOCAL_NAMES = "hosts: files\n"
_SCRIPT = 'mount --bind "$0" /etc/nsswitch.conf && exec "$@"'


def find_torch(root: Path) -> Path | None:
    """Return an interpreter that has torch: this one, or that of `make test-torch`."""
    candidates = (Path(sys.executable), root / ".venv" / "torch" / "bin" / "python")
    return next((each for each in candidates if each.exists() and _has_torch(each)), None)


def _has_torch(python: Path) -> bool:
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return subprocess.run([str(python), "-c", probe], check=False).returncode == 0


def c10d_rendezvous(session: Session, nodes: int) -> tuple[float | None, str]:
    """Return the seconds until the last node knows its rank, the median of the finished runs; and a note.

    If no run finished, the seconds are `PATIENCE`, a lower bound; the note gives the count.
    """
    if session.torch is None or nodes > MOST_NODES:
        return None, ""
    seconds: list[float] = []
    unfinished, order = 0, C10dOrder("rendezvous", nodes)
    for trial in range(1, session.trials + 1):
        doing = f"c10d rendezvous n={nodes} {trial}/{session.trials}"
        try:
            seconds.append(_run(session, session.torch, order).last)
            session.say(f"{doing}: ranks {seconds[-1]:.3f} s")
        except DidNotFinish:
            unfinished += 1
            session.say(f"{doing}: not finished in {PATIENCE:g} s")
            if unfinished == _MOST_UNFINISHED:
                break
        except BenchmarkError as error:
            session.say(f"{doing}: {error}")
            return None, "c10d: failed"
    note = (
        f"c10d: {unfinished} of {unfinished + len(seconds)} not finished in {PATIENCE:g} s"
        if unfinished
        else ""
    )
    return statistics.median(seconds or [PATIENCE]), note


def c10d_calls(session: Session, kind: str, members: int, each: int = 1) -> C10dResult | None:
    """Return the seconds until the first and last member completed their calls, medians; None after a failure."""
    if session.torch is None:
        return None
    order = C10dOrder(kind, members, each)
    try:
        result = median(_run(session, session.torch, order) for _ in range(session.trials))
    except BenchmarkError as error:
        session.say(f"c10d store {kind} members={members}: {error}")
        return None
    session.say(f"c10d store {kind} members={members}: first {result.first:.3f} s, last {result.last:.3f} s")
    return result


def torch_handlers(session: Session) -> Iterator[Figure]:
    """Measure; see docs/benchmarks.md."""
    if session.torch is None:
        session.say("torch-handlers: no Python with torch; `make test-torch` makes one")
        return
    for nodes in session.sizes_or(HANDLERS):
        variants = {
            "c10d": partial(_handlers, session, session.torch, C10dOrder("dynamic", nodes)),
            "plugin": partial(_handlers, session, session.torch, C10dOrder("plugin", nodes), "memory"),
            "backend": partial(_handlers, session, session.torch, C10dOrder("dynamic", nodes), "memory"),
        }
        what = f"torch-handlers n={nodes}"
        results = in_turns(
            session, what, variants, lambda it: f"first {it.first:.3f} s, last {it.last:.3f} s"
        )
        for name in filter(results.__contains__, ("plugin", "backend")):
            peer = results["c10d"].last if "c10d" in results else None
            yield Figure(f"torch-handlers.{name}", nodes, results[name].last, "s", None, peer)


def _handlers(session: Session, python: Path, order: C10dOrder, journal: str = "") -> C10dResult:
    with ours(journal)(session.folder) if journal else nullcontext() as server:
        # Each handler of ours has a companion process, which starts before the measurement.
        patience = PATIENCE + order.members if journal else PATIENCE
        return _run(session, python, replace(order, endpoint=server.endpoint if server else ""), patience)


def _run(session: Session, python: Path, order: C10dOrder, patience: float = 0.0) -> C10dResult:
    command = [*with_local_names(session.folder), *client_command("c10d", order, python)]
    return C10dResult(**driven(command, session.folder / "client-c10d.log", patience or PATIENCE))


def with_local_names(folder: Path) -> list[str]:
    """Return the prefix of a command that makes it resolve names from local files only.

    It is empty where user namespaces are not allowed. `folder`: for a file that must exist while the command runs.
    """
    names = folder / "nsswitch.conf"
    names.write_text(_LOCAL_NAMES)
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    prefix = [*unshare, "sh", "-c", _SCRIPT, str(names), *MORTAL_ONCE_MORE]
    allowed = subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode == 0
    return prefix if allowed else []
