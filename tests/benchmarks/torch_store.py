"""`torch-store`: torch's store client at our ports and at torch's own server, alternately."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

from benchmarks.c10d import with_local_names
from benchmarks.clients.torch_store_order import TorchStoreOrder, TorchStoreResult
from benchmarks.figures import Figure
from benchmarks.processes import client_command, driven
from benchmarks.session import Session
from benchmarks.trials import JOURNALS, in_turns, ours

CLIENTS = (8, 32)

_PEER = "torch's server"
_EACH = 50  # calls of each kind, of each client
_TIMEOUT = 180.0  # seconds


def torch_store(session: Session) -> Iterator[Figure]:
    """Measure; see docs/benchmarks.md."""
    if session.torch is None:
        session.say("torch-store: no Python with torch; `make test-torch` makes one")
        return
    for clients in session.sizes_or(CLIENTS):
        variants = {_PEER: _measure(session, "", clients)}
        variants |= {name: _measure(session, name, clients) for name in JOURNALS}
        results = in_turns(session, f"torch-store clients={clients}", variants, _show)
        for name in JOURNALS:
            if not {name, _PEER} <= results.keys():
                continue
            for kind in ("set", "get", "add", "barrier"):
                value, theirs = getattr(results[name], kind), getattr(results[_PEER], kind)
                if kind == "barrier":
                    yield Figure(
                        f"torch-store.{name}.barrier", clients, value * 1e3, "ms", None, theirs * 1e3
                    )
                else:
                    note = "more is better"
                    yield Figure(f"torch-store.{name}.{kind}", clients, value, "calls/s", None, theirs, note)


def _show(result: TorchStoreResult) -> str:
    rates = ", ".join(f"{kind} {getattr(result, kind):,.0f}" for kind in ("set", "get", "add"))
    return f"{rates} a second; barrier {result.barrier * 1e3:.1f} ms"


def _measure(session: Session, journal: str, clients: int) -> Callable[[], TorchStoreResult]:
    def measure() -> TorchStoreResult:
        assert session.torch is not None, "looked up before"
        with ours(journal)(session.folder) if journal else nullcontext() as server:
            order = TorchStoreOrder(server.endpoint if server is not None else "", clients, _EACH, _TIMEOUT)
            command = [
                *with_local_names(session.folder),
                *client_command("torch_store", order, session.torch),
            ]
            log = session.folder / "client-torch_store.log"
            return TorchStoreResult(**driven(command, log, 4 * _TIMEOUT))

    return measure
