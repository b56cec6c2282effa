"""The main program of every client process: the order is a JSON argument, the result is JSON on stdout."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any, NoReturn, TypeVar

from benchmarks.clients.swarm import SwarmError
from rallypoint.rpc.loop import run

_Order = TypeVar("_Order")


def carry_out(order: Callable[..., _Order], work: Callable[[_Order], Coroutine[Any, Any, Any]]) -> NoReturn:
    """Run `work` in the event loop of the product, print its result, which is a dataclass, and exit.

    Args:
        order: The dataclass of the argument.
        work: Carries out the order.
    """
    # A pause of the client's garbage collector would count as time of the server.
    gc.disable()
    run(_finish(work(order(**json.loads(sys.argv[1])))))


def obey(order: Callable[..., _Order], work: Callable[[_Order], Any]) -> None:
    """Run `work`, which needs no event loop, and print its result; see `carry_out`."""
    result = work(order(**json.loads(sys.argv[1])))
    sys.stdout.write(json.dumps(asdict(result)) + "\n")


async def _finish(work: Coroutine[Any, Any, Any]) -> NoReturn:
    try:
        result = await work
    except SwarmError as error:
        sys.stderr.write(f"{error}\n")
        os._exit(1)
    sys.stdout.write(json.dumps(asdict(result)) + "\n")
    sys.stdout.flush()
    os._exit(0)  # closing thousands of connections properly takes longer than the measurement
