"""The peer, run by a Python that has torch: torch's timers, file and queue, as torchrun sets them up.

    python -m benchmarks.clients.torch_timers blocks '{"kind": "file", …}'
    python -m benchmarks.clients.torch_timers reap '{"kind": "queue", …}'

torch's server is a thread of a process that does nothing else. Workers are forked from a process that has imported
torch, so that they need not import it again.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import get_context
from typing import Any

import torch.distributed.elastic.timer as torch_timer

from benchmarks.clients.block_costs import BlocksOrder, costs_of, write_costs
from benchmarks.clients.hanging import DEATH, TorchReapOrder, TorchReapResult, drawn

_MAX_INTERVAL = 0.1  # torchrun's own
_AFTER = 60
_SCOPE = "step"
_SETTLE = 0.3  # seconds for a server to start

_FORKING = get_context("fork")


def _default() -> None:
    with torch_timer.expires(after=_AFTER):
        pass


def _explicit() -> None:
    with torch_timer.expires(after=_AFTER, scope=_SCOPE):
        pass


@contextmanager
def _served(kind: str, folder: str) -> Iterator[Callable[[], Any]]:
    """Run torch's server in its own process; yield a function that makes a client in a fork of this process."""
    place = os.path.join(folder, "timers")
    queue: Any = _FORKING.Queue()

    def serve() -> None:
        if kind == "file":
            torch_timer.FileTimerServer(place, run_id="benchmark", max_interval=_MAX_INTERVAL).start()
        else:
            torch_timer.LocalTimerServer(queue, max_interval=_MAX_INTERVAL).start()
        signal.pause()

    server = _FORKING.Process(target=serve, daemon=True)
    server.start()
    time.sleep(_SETTLE)
    try:
        yield (
            lambda: (
                torch_timer.FileTimerClient(place) if kind == "file" else torch_timer.LocalTimerClient(queue)
            )
        )
    finally:
        server.kill()
        server.join()


def blocks(order: BlocksOrder) -> None:
    """Measure the cost of a guarded block to a worker."""

    def work(client_of: Callable[[], Any]) -> None:
        torch_timer.configure(client_of())
        write_costs(order.answer, costs_of({"default": _default, "explicit": _explicit}, order))
        os._exit(0)  # a queue's thread may still wait to send data that is no longer read

    with tempfile.TemporaryDirectory() as folder, _served(order.kind, folder) as client_of:
        worker = _FORKING.Process(target=work, args=(client_of,), daemon=True)
        worker.start()
        worker.join()
    if worker.exitcode:
        raise SystemExit(f"the worker ended with exit code {worker.exitcode}")
    sys.stdout.write("{}\n")


def reap(order: TorchReapOrder) -> None:
    """Measure how late workers die. torch's file server ends with its worker, so each has its own server."""
    late = [_reap_once(order) for _ in range(order.count)]
    sys.stdout.write(json.dumps(asdict(TorchReapResult(late))) + "\n")


def _reap_once(order: TorchReapOrder) -> float:
    receiving, sending = os.pipe()

    def hang(client_of: Callable[[], Any] | None) -> None:
        after = drawn(order.after)
        due = time.monotonic() + after
        if client_of is None:
            os.write(sending, f"{due}\n".encode())
            signal.pause()
            return
        torch_timer.configure(client_of())
        with torch_timer.expires(after=after, scope=_SCOPE):
            os.write(sending, f"{due}\n".encode())
            time.sleep(3600)

    with tempfile.TemporaryDirectory() as folder:
        if order.kind == "sigkill":
            return _death(order, _FORKING.Process(target=hang, args=(None,), daemon=True), receiving)
        with _served(order.kind, folder) as client_of:
            return _death(order, _FORKING.Process(target=hang, args=(client_of,), daemon=True), receiving)


def _death(order: TorchReapOrder, worker: Any, receiving: int) -> float:
    """Return the seconds from the worker's deadline until it is dead."""
    worker.start()
    pidfd = os.pidfd_open(worker.pid)
    due = float(os.read(receiving, 100))
    if order.kind == "sigkill":
        time.sleep(max(0.0, due - time.monotonic()))
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    dead, _, _ = select.select([pidfd], [], [], 2 * order.after + DEATH)
    now = time.monotonic()
    os.close(pidfd)
    if not dead:
        raise SystemExit(f"the worker was not dead {DEATH:g} s after its deadline")
    worker.join()
    return now - due


def main() -> None:
    """Carry out the command in the first argument."""
    logging.disable(logging.CRITICAL)
    order = json.loads(sys.argv[2])
    if sys.argv[1] == "blocks":
        blocks(BlocksOrder(**order))
    else:
        reap(TorchReapOrder(**order))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
