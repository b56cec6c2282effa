"""The main program of every client process: an order as JSON in the only argument, the result as JSON on stdout."""

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
    """Do the work under the event loop of the product, print its result, which is a dataclass, and exit.

    Args:
        order: The dataclass to make of the argument.
        work: What to do with it.
    """
    # A pause of the client's garbage collector would be taken for the server's.
    gc.disable()
    run(_finish(work(order(**json.loads(sys.argv[1])))))


def obey(order: Callable[..., _Order], work: Callable[[_Order], Any]) -> None:
    """Do work that needs no event loop, and print its result; see `carry_out`."""
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
    os._exit(0)  # thousands of connections take longer to close in good order than to measure
