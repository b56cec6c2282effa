"""torch's timers without an agent: the documented behaviour of its RequestQueue and TimerServer, in real processes."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess
from typing import Any

import pytest

pytestmark = pytest.mark.torch
timer = pytest.importorskip("torch.distributed.elastic.timer")

CONTEXT = multiprocessing.get_context("fork")
# Seconds: practically never, and the longest that a test waits for an expected event.
LONG = 3600.0
LIMIT = 60.0


@pytest.fixture(autouse=True)
def _without_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RALLYPOINT_TIMER_SOCKET", raising=False)


@pytest.fixture
def queue() -> Iterator[Any]:
    queue = CONTEXT.Queue()
    yield queue
    queue.close()
    queue.join_thread()


@pytest.fixture
def server(queue: Any) -> Iterator[Any]:
    """A server that checks often, and is not started."""
    from rallypoint.torch.timer import RallypointTimerServer

    server = RallypointTimerServer(queue, max_interval=0.02)
    yield server
    thread = server._watchdog_thread
    server.stop()
    if thread is not None:
        thread.join(LIMIT)


@pytest.fixture
def processes() -> Iterator[Callable[..., ForkProcess]]:
    """Start processes, which end with the test."""
    started: list[ForkProcess] = []

    def start(function: Callable[..., None], *arguments: Any) -> ForkProcess:
        process = CONTEXT.Process(target=function, args=arguments)
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record signals instead of sending them."""
    kills: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: kills.append((pid, number)))
    return kills


def request(pid: int, scope: str, after: float) -> Any:
    return timer.TimerRequest(pid, scope, time.time() + after)


def release(pid: int, scope: str) -> Any:
    return timer.TimerRequest(pid, scope, -1)


def scopes(server: Any) -> list[str]:
    """Return the names of all timers of a server."""
    return [each.scope_id for timers in server.get_expired_timers(math.inf).values() for each in timers]


def client_of(name: str, queue: Any) -> Any:
    from rallypoint.torch.timer import RallypointTimerClient

    return {"ours": RallypointTimerClient, "torch's": timer.LocalTimerClient}[name](queue)


def wait_for_ever() -> None:
    threading.Event().wait()


# ---- The queue.


def put_all(queue: Any, number: int) -> None:
    """Put more than a pipe holds, if it is a thousand."""
    for each in range(number):
        queue.put(timer.TimerRequest(each, "scope", 0))


def test_a_queue_returns_at_once_as_many_requests_as_its_size_promised(
    queue: Any, processes: Callable[..., ForkProcess]
) -> None:
    """They come in their order, also while more are on their way."""
    from rallypoint.torch.timer import RallypointRequestQueue

    requests = RallypointRequestQueue(queue)
    assert (requests.size(), requests.get(3, timeout=0)) == (0, [])
    processes(put_all, queue, 1000)
    read: list[int] = []
    while len(read) < 1000:
        size = requests.size()
        taken = requests.get(size, timeout=0)
        assert len(taken) == size
        read += [each.worker_id for each in taken]
    assert read == list(range(1000))


def put_and_die(queue: Any) -> None:
    put_all(queue, 1000)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_queue_goes_on_without_the_requests_that_were_lost_with_their_process(
    queue: Any, processes: Callable[..., ForkProcess]
) -> None:
    """The queue counts them for ever, but waiting for them would delay each check of the timers."""
    from rallypoint.torch.timer import RallypointRequestQueue

    requests = RallypointRequestQueue(queue)
    processes(put_and_die, queue).join()
    while requests.get(requests.size(), timeout=0):
        pass
    assert queue.qsize() > 0
    begun = time.monotonic()
    assert [requests.size() for _ in range(1000)] == [0] * 1000
    assert time.monotonic() - begun < LIMIT


def test_a_queue_waits_for_requests_and_returns_no_more_than_wanted(queue: Any) -> None:
    """It returns when it has enough, not after the timeout."""
    from rallypoint.torch.timer import RallypointRequestQueue

    requests = RallypointRequestQueue(queue)
    later = threading.Timer(0.2, put_all, (queue, 3))
    later.start()
    assert [each.worker_id for each in requests.get(2, timeout=LIMIT)] == [0, 1]
    later.join()
    begun = time.monotonic()
    assert [each.worker_id for each in requests.get(9, timeout=0.3)] == [2]
    assert time.monotonic() - begun >= 0.3


# ---- The server: the effect of requests.


def test_each_process_has_one_timer_for_each_scope(server: Any, kills: list[Any]) -> None:
    """A second request replaces the first, a negative time ends a timer, and to end a missing one is no error."""
    mine = os.getpid()
    server.register_timers(
        [
            *[request(mine, "step", -1), request(mine, "step", LONG), request(mine, "save", LONG)],
            *[release(mine, "save"), release(mine, "never"), release(-5, "step")],
        ]
    )
    assert server.get_expired_timers(time.time()) == {}
    assert scopes(server) == ["step"]
    server._run_watchdog()
    assert kills == []


def test_a_timer_expires_at_its_time_and_not_before(server: Any) -> None:
    """This holds for all processes, with all of their timers that are due."""
    server.register_timers(
        [timer.TimerRequest(*each) for each in ((-5, "a", 100), (-5, "b", 90), (-7, "a", 101))]
    )
    assert server.get_expired_timers(89) == {}
    assert [each.scope_id for each in server.get_expired_timers(100)[-5]] == ["a", "b"]
    assert list(server.get_expired_timers(101)) == [-5, -7]
    server.clear_timers({-5})
    assert list(server.get_expired_timers(101)) == [-7]


def test_a_process_is_killed_once_and_loses_all_its_timers(server: Any, queue: Any, kills: list[Any]) -> None:
    """The requests in the queue decide, in one check."""
    for each in (request(-5, "step", -1), request(-5, "save", LONG), request(-7, "step", LONG)):
        queue.put(each)
    while len(scopes(server)) != 1:
        server._run_watchdog()
    server._run_watchdog()
    assert (kills, scopes(server)) == ([(-5, signal.SIGKILL)], ["step"])


def test_a_process_that_can_not_be_killed_is_tried_again(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is gone counts as killed."""
    outcomes: list[Exception | None] = [PermissionError("not yours"), ProcessLookupError("gone"), None]
    monkeypatch.setattr(os, "kill", lambda *_: _raise(outcomes.pop(0)))
    server.register_timers([request(-5, "step", -1)])
    server._run_watchdog()
    assert list(server.get_expired_timers(time.time())) == [-5]
    server._run_watchdog()
    assert (server.get_expired_timers(time.time()), outcomes) == ({}, [None])


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def test_a_process_that_has_ended_is_not_killed_under_its_number(
    server: Any, processes: Callable[..., ForkProcess], kills: list[Any]
) -> None:
    """The number may be another process's by then; a request of that process ends the timers of the former."""
    process = processes(wait_for_ever)
    pid = process.pid
    assert pid is not None
    server.register_timers([request(pid, "step", -1), request(pid, "save", LONG)])
    signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGKILL)
    process.join()
    server.register_timers([request(pid, "load", LONG)])
    assert scopes(server) == ["load"]
    server.clear_timers({pid})

    process = processes(wait_for_ever)
    pid = process.pid
    assert pid is not None
    server.register_timers([request(pid, "step", -1)])
    signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGKILL)
    process.join()
    server._run_watchdog()
    assert (scopes(server), kills) == ([], [])


@pytest.mark.parametrize("jump", [-LONG, LONG])
def test_a_correction_of_the_wall_clock_moves_no_deadline(
    server: Any, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """Forward it would kill processes that are in time; backward it would let hung ones live."""
    wall = time.time
    server.register_timers([request(-5, "step", 1.0), request(-7, "step", LONG / 2)])
    monkeypatch.setattr(time, "time", lambda: wall() + jump)
    assert list(server.get_expired_timers(time.time() + 2)) == [-5]


# ---- Server, clients and processes together.


def hang(client: str, queue: Any, after: float) -> None:
    timer.configure(client_of(client, queue))
    with timer.expires(after=LONG), timer.expires(after=after, scope="step"):
        wait_for_ever()


def work(client: str, queue: Any, after: float) -> None:
    """Work as long as `after`, in blocks that are all shorter."""
    timer.configure(client_of(client, queue))
    for _ in range(4):
        with timer.expires(after=after, scope="step"):
            time.sleep(after / 4)
    # The last timer would still be held here if its end were missed.
    with timer.expires(after=LONG, scope="save"):
        time.sleep(after)


@pytest.mark.parametrize("client", ["ours", "torch's"])
def test_a_process_that_hangs_is_killed_and_others_work_on(
    server: Any, queue: Any, processes: Callable[..., ForkProcess], client: str
) -> None:
    """torch's own client may be in the processes, and the server may have been stopped and started again."""
    server.start()
    server.stop()
    working = processes(work, client, queue, 2.0)
    hung = processes(hang, client, queue, 0.2)
    server.start()
    hung.join(LIMIT)
    working.join(LIMIT)
    assert (hung.exitcode, working.exitcode) == (-signal.SIGKILL, 0)


def test_torchs_own_server_takes_the_requests_of_our_client(
    queue: Any, processes: Callable[..., ForkProcess]
) -> None:
    """A program may change either end first."""
    server = timer.LocalTimerServer(queue, max_interval=0.02)
    server.start()
    working, hung = processes(work, "ours", queue, 2.0), processes(hang, "ours", queue, 0.2)
    hung.join(LIMIT)
    working.join(LIMIT)
    server.stop()
    assert (hung.exitcode, working.exitcode) == (-signal.SIGKILL, 0)


def test_a_forked_child_sends_its_own_requests(queue: Any, processes: Callable[..., ForkProcess]) -> None:
    """It may use the client of its parent."""
    from rallypoint.torch.timer import RallypointRequestQueue

    client = client_of("ours", queue)
    client.acquire("step", time.time() + LONG)
    child = processes(client.release, "step")
    # In either order: a thread of each process fills the queue.
    ends = {each.worker_id: each.expiration_time for each in RallypointRequestQueue(queue).get(2, LIMIT)}
    assert set(ends) == {os.getpid(), child.pid}
    assert ends[os.getpid()] > 0 > ends[child.pid]


def test_threads_of_a_server_that_was_started_twice_keep_the_order(
    server: Any, queue: Any, kills: list[Any]
) -> None:
    """torch's own test starts one twice; a release that overtakes its acquire would kill a process later."""
    server.start()
    server.start()
    for _ in range(2000):
        queue.put(request(-5, "step", LONG))
        queue.put(release(-5, "step"))
    queue.put(request(-7, "end", -1))
    deadline = time.monotonic() + LIMIT
    while not kills and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (kills, scopes(server)) == ([(-7, signal.SIGKILL)], [])


def test_a_client_refuses_values_that_a_queue_can_not_carry(queue: Any) -> None:
    """The error comes before a block is entered that would lack its timer."""
    from rallypoint.torch.timer import RallypointTimerClient

    with pytest.raises(ValueError, match="signal is 10: only an agent sends it"):
        RallypointTimerClient(queue, signal=10)
    with pytest.raises(ValueError, match="expiration_time is nan; expected seconds"):
        RallypointTimerClient(queue).acquire("step", math.nan)
    assert queue.empty()
