"""Clients of `torch-store`, run by a Python that has torch: torch's own store clients, one per process.

This process imports torch once and forks the clients, which then connect. They are spread over the ports, as the
workers of several hosts are over their agents.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import torch.distributed as dist

from benchmarks.clients.command import obey
from benchmarks.clients.torch_store_order import TorchStoreOrder, TorchStoreResult

_HOST = "127.0.0.1"
_VALUE = "v" * 100
_ONE_HOST = 8  # clients per port of ours


def torch_store(order: TorchStoreOrder) -> TorchStoreResult:
    """Carry out the order."""
    timeout = timedelta(seconds=order.timeout)
    with ExitStack() as stack:
        ports, own = _ports(order, timeout)
        clients = [_fork(order, ports[i % len(ports)], i, stack) for i in range(order.clients)]
        seconds = {kind: _step(clients) for kind in ("set", "get", "add", "barrier")}
        del own
    calls = order.clients * order.each
    return TorchStoreResult(
        set=calls / seconds["set"],
        get=calls / seconds["get"],
        add=calls / seconds["add"],
        barrier=seconds["barrier"],
    )


def _ports(order: TorchStoreOrder, timeout: timedelta) -> tuple[list[int], object]:
    """Return the ports of the servers, and the objects that keep them open."""
    if not order.endpoint:
        server = dist.TCPStore(_HOST, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        return [server.port], server
    from rallypoint.torch.store import RallypointStore

    hosts = range(-(-order.clients // _ONE_HOST))
    stores = [RallypointStore(order.endpoint, "benchmark", {"insecure": "1"}, timeout) for _ in hosts]
    return [store.port for store in stores], stores


def _step(clients: Sequence[Connection]) -> float:
    """Return the seconds from the start of a step until the last client has done it."""
    for client in clients:
        client.recv()  # it is ready
    began = time.monotonic()
    for client in clients:
        client.send("go")
    ends: list[float] = [client.recv() for client in clients]
    return max(ends) - began


def _fork(order: TorchStoreOrder, port: int, number: int, stack: ExitStack) -> Connection:
    ours, theirs = Pipe()
    if os.fork():
        theirs.close()
        return stack.enter_context(ours)
    try:
        _client(order, port, number, theirs)
    finally:
        os._exit(0)  # the end of its pipe shows the parent that a client failed


def _client(order: TorchStoreOrder, port: int, number: int, parent: Connection) -> None:
    timeout = timedelta(seconds=order.timeout)
    store = dist.TCPStore(_HOST, port, is_master=False, timeout=timeout, wait_for_workers=False)
    key = f"client/{number}"

    def set_values() -> None:
        for _ in range(order.each):
            store.set(key, _VALUE)
        store.get(key)  # a set has no reply

    def get_values() -> None:
        for _ in range(order.each):
            store.get(key)

    def add_numbers() -> None:
        for _ in range(order.each):
            store.add("sum", 1)

    steps: list[Callable[[], object]] = [
        set_values,
        get_values,
        add_numbers,
        lambda: store.barrier("all", order.clients, timeout),
    ]
    for step in steps:
        parent.send("ready")
        parent.recv()
        step()
        parent.send(time.monotonic())


if __name__ == "__main__":
    obey(TorchStoreOrder, torch_store)
