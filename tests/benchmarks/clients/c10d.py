"""The peer, run by a Python that has torch: the same work done by torch's c10d.

    python -m benchmarks.clients.c10d '{"kind": "rendezvous", "members": 64}'

This process holds the store, which is torch's server. Each member is a thread with its own store connection, in one
of a few further processes, since Python threads share a core.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from benchmarks.clients.c10d_order import C10dOrder, C10dResult
from rallypoint.torch.backend import RallypointRendezvousBackend
from rallypoint.torch.handler import RallypointRendezvousHandler
from support.mortal import mortal

_RUN_ID = "benchmark"
_HOST = "127.0.0.1"
_VALUE = "v" * 100
_GO, _READY, _AWAITED, _ENDED, _OVER = "go", "ready", "awaited", "ended", "over"
# On two cores 4 processes were fastest; with all threads in one, the interpreter's lock limits the result.
_PROCESSES = 4
_making = threading.Lock()  # companions that all start at once would exceed their start timeout
_TO_WAIT = 1.0  # seconds until all members wait for the key


def _connect(port: int) -> dist.TCPStore:
    return dist.TCPStore(_HOST, port, is_master=False, wait_for_workers=False)


def _dynamic(order: C10dOrder) -> DynamicRendezvousHandler:
    """torch's own handler, over its own backend or ours."""
    store, most, backend = _connect(order.port), order.members, None
    if order.endpoint:
        backend = RallypointRendezvousBackend(order.endpoint, _RUN_ID, {"insecure": "1"})
        backend.get_state()  # connects, as the constructor of torch's backend does
    return DynamicRendezvousHandler.from_backend(
        _RUN_ID, store, backend or C10dRendezvousBackend(store, _RUN_ID), most, most, local_addr=_HOST
    )


def _plugin(order: C10dOrder) -> RendezvousHandler:
    most = order.members
    return RallypointRendezvousHandler(
        RendezvousParameters("rallypoint", order.endpoint, _RUN_ID, most, most, _HOST, insecure="1")
    )


def _rejoin(make: Callable[[C10dOrder], RendezvousHandler]) -> Callable[[C10dOrder, int], Callable[[], None]]:
    """Measure an existing handler from its call until the rank is known."""

    def prepare(order: C10dOrder, number: int) -> Callable[[], None]:
        with _making:
            handler = make(order)
        return lambda: handler.next_rendezvous() and None

    return prepare


def _call(call: Callable[[dist.TCPStore, str], object]) -> Callable[[C10dOrder, int], Callable[[], None]]:
    """Measure calls one after another, on an open connection."""

    def prepare(order: C10dOrder, number: int) -> Callable[[], None]:
        store, key = _connect(order.port), f"{order.port}/{os.getpid()}/{number}"
        store.set(key, _VALUE)

        def call_on() -> None:
            for _ in range(order.each):
                call(store, key)
            # A set has no reply; the reply to this get means that all sets before it are done.
            store.get(key)

        return call_on

    return prepare


KINDS: dict[str, Callable[[C10dOrder, int], Callable[[], None]]] = {
    # From the first connect until the rank is known, as for ours.
    "rendezvous": lambda order, number: lambda: _dynamic(order).next_rendezvous() and None,
    "dynamic": _rejoin(_dynamic),
    "plugin": _rejoin(_plugin),
    "set": _call(lambda store, key: store.set(key, _VALUE)),
    "get": _call(lambda store, key: store.get(key)),
    "add": _call(lambda store, key: store.add("sum/" + key, 1)),
    "wait": _call(lambda store, key: store.get(_AWAITED)),
}
"""By kind, a function that prepares a member before the measurement, and returns the measured work."""


def hold(order: C10dOrder) -> C10dResult:
    """Hold the store, and start all members at once."""
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    shares = [len(range(first, order.members, _PROCESSES)) for first in range(min(_PROCESSES, order.members))]
    children = []
    for share in shares:
        part = json.dumps(asdict(replace(order, port=store.port, share=share)))
        command = mortal(sys.executable, "-m", "benchmarks.clients.c10d", part)
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    store.wait([f"{_READY}/{number}" for number in range(1, len(shares) + 1)])
    began = time.perf_counter()
    store.set(_GO, "")
    if order.kind == "wait":
        time.sleep(_TO_WAIT)
        began = time.perf_counter()
        store.set(_AWAITED, _VALUE)
    # All processes of a machine share this clock.
    results = [C10dResult(**json.loads(child.communicate()[0])) for child in children]
    return C10dResult(
        min(result.first for result in results) - began, max(result.last for result in results) - began
    )


def take_part(order: C10dOrder) -> C10dResult:
    """Run one process's share of the members; return the times at which the first and the last were done."""
    ends: list[float] = []
    go = threading.Event()
    prepared = threading.Barrier(order.share + 1)
    works: list[Callable[[], None]] = []  # keeps the handlers

    def member(number: int) -> None:
        works.append(work := KINDS[order.kind](order, number))
        prepared.wait()
        go.wait()
        work()
        ends.append(time.perf_counter())

    threads = [threading.Thread(target=member, args=(number,), daemon=True) for number in range(order.share)]
    for thread in threads:
        thread.start()
    prepared.wait()
    store = _connect(order.port)
    store.set(f"{_READY}/{store.add(_READY, 1)}", "")
    store.wait([_GO])
    go.set()
    for thread in threads:
        thread.join()
    if len(ends) != order.share:
        raise SystemExit(f"{len(ends)} of {order.share} members came to an end")
    # A handler ends its companion when it is dropped or its process ends: wait until no member is measured.
    if store.add(_ENDED, 1) == min(_PROCESSES, order.members):
        store.set(_OVER, "")
    store.wait([_OVER])
    return C10dResult(min(ends), max(ends))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    _order = C10dOrder(**json.loads(sys.argv[1]))
    sys.stdout.write(json.dumps(asdict(take_part(_order) if _order.share else hold(_order))) + "\n")
    sys.stdout.flush()
    os._exit(0)  # keep-alive threads would keep the process alive
