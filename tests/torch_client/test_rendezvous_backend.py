"""torch's dynamic rendezvous on our backend survives an outage of the service; on a store of torch's it can't."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.ports import free_port
from support.waiting import PATIENCE
from torture.length import ordinarily
from torture.mortal_server import MortalServer

pytestmark = [pytest.mark.torch, pytest.mark.integration, pytest.mark.timeout(300)]

AWAY = ordinarily(4.0, in_full=30.0)


@pytest.fixture(scope="module")
def module() -> Any:
    """Our module."""
    pytest.importorskip("torch.distributed.elastic.rendezvous.api")
    from rallypoint.torch import backend

    return backend


def test_an_outage_ends_no_agent(module: Any, server: MortalServer) -> None:
    """Agents look for newcomers meanwhile; afterwards the same nodes are in the run, and admit a newcomer."""
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
        DynamicRendezvousHandler,
        RendezvousTimeout,
    )

    backends, store = [], dist.HashStore()

    def handler() -> Any:
        backend = module.RallypointRendezvousBackend(server.endpoint, "run", {"insecure": True})
        backends.append(backend)
        return DynamicRendezvousHandler.from_backend(
            *("run", store, backend, 2, 3),
            local_addr="127.0.0.1",
            timeout=RendezvousTimeout(last_call=timedelta(seconds=1)),
            keep_alive_interval=1,
            keep_alive_max_attempt=60,
        )

    try:
        with ThreadPoolExecutor(4) as agents, pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
            handlers = [handler(), handler()]
            joining = [agents.submit(each.next_rendezvous) for each in handlers]
            assert {joined.result(PATIENCE).world_size for joined in joining} == {2}
            server.kill()
            looks = [agents.submit(_look_for, each, AWAY) for each in handlers]
            time.sleep(AWAY)
            server.start()
            assert [look.result(2 * PATIENCE) for look in looks] == [0, 0]
            newcomer = handler()
            joining = [agents.submit(newcomer.next_rendezvous)]
            looks = [agents.submit(_look_for, each, PATIENCE) for each in handlers]
            assert [look.result(2 * PATIENCE) for look in looks] == [1, 1]
            joining += [agents.submit(each.next_rendezvous) for each in handlers]
            assert {joined.result(PATIENCE).world_size for joined in joining} == {3}
            for each in (*handlers, newcomer):
                each.shutdown()
    finally:
        for backend in backends:
            backend.close()


def _look_for(handler: Any, seconds: float) -> int:
    """Look for newcomers, as an agent does between two restarts, until there is one, or for so many seconds."""
    end = time.monotonic() + seconds
    while not (waiting := handler.num_nodes_waiting()) and time.monotonic() < end:
        time.sleep(0.1)
    return int(waiting)


def test_no_service(module: Any) -> None:
    """The error comes within `read_timeout`. The backend can be used afterwards."""
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

    endpoint = f"127.0.0.1:{free_port()}"
    backend = module.RallypointRendezvousBackend(endpoint, "run", {"insecure": True, "read_timeout": 0.5})
    for call in (backend.get_state, lambda: backend.set_state(b"state"), backend.get_state):
        with pytest.raises(RendezvousConnectionError, match=r"no answer for 0\.5 s"):
            call()
    backend.close()
    with pytest.raises(RendezvousConnectionError):
        backend.get_state()


def test_the_death_of_the_program_is_no_error(module: Any, server: MortalServer) -> None:
    """Its companion exits without output, also with a reply that the program has not read."""
    program = (
        "import os, select, sys; from rallypoint.torch.backend import RallypointRendezvousBackend as Backend\n"
        "companion = Backend(sys.argv[1], 'run', {'insecure': True})._companion\n"
        "companion.send('get_state')\n"
        "select.select([companion._socket], [], [])\n"
        "os._exit(0)\n"
    )
    # The companion has the pipe too: run() returns when both have exited.
    command = [sys.executable, "-c", program, server.endpoint]
    ended = subprocess.run(command, stderr=subprocess.PIPE, timeout=PATIENCE, check=True, text=True)
    assert ended.stderr == ""


@pytest.mark.parametrize(
    ("endpoint", "run_id", "conf", "text"),
    [
        ("", "run", {}, "where is the rendezvous service"),
        ("host", "", {"insecure": "1"}, "run_id"),
        ("host", "run", {"read_timeout": "soon"}, "is not a number of seconds"),
        ("host", "run", {"color": "red"}, "'color' is not a setting"),
        ("host", "run", {"run_secret_file": "/no/such/file"}, "No such file"),
    ],
)
def test_a_mistake(module: Any, endpoint: str, run_id: str, conf: dict[str, str], text: str) -> None:
    """The error is one line, before any call."""
    with pytest.raises(ValueError, match=text) as caught:
        module.RallypointRendezvousBackend(endpoint, run_id, conf)
    assert "\n" not in str(caught.value)


def test_a_large_state(module: Any, server: MortalServer) -> None:
    """It is the largest that the service accepts; a larger one is refused, and leaves the first."""
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

    backend = module.RallypointRendezvousBackend(server.endpoint, "run", {"insecure": True})
    state = bytes(4 * 1024 * 1024 - 16 * 1024)
    _, token, has_set = backend.set_state(state)
    assert has_set
    with pytest.raises(RendezvousConnectionError, match="at most"):
        backend.set_state(state + b"x", token)
    assert backend.get_state() == (state, token)
    backend.close()
