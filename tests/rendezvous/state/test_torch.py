"""torch's own rendezvous runs on the fenced state, which answers as torch's c10d backend does."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rendezvous.state.state_fakes import RUN, TestJournal, open_states, serving

pytestmark = pytest.mark.torch

T = TypeVar("T")


@pytest.fixture
def dynamic() -> Any:
    pytest.importorskip("torch.distributed")
    return pytest.importorskip("torch.distributed.elastic.rendezvous.dynamic_rendezvous")


class Loop:
    """The service on an event loop in a thread of its own: torch's handlers block theirs."""

    def __init__(self, folder: Path) -> None:
        self._path = f"{folder}/state.sock"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._stopping = asyncio.Event()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30.0)

    @contextmanager
    def backends(self) -> Iterator[Callable[[], Any]]:
        """A function that makes backends for torch, each as in a program of its own."""
        from rallypoint.torch.backend import RallypointRendezvousBackend

        self._thread.start()
        ready: asyncio.Queue[None] = asyncio.Queue()
        made: list[Any] = []

        async def serve() -> None:
            async with serving(open_states(TestJournal()), self._path):
                await ready.put(None)
                await self._stopping.wait()

        def make() -> Any:
            made.append(RallypointRendezvousBackend(f"unix:{self._path}", RUN))
            return made[-1]

        served = asyncio.run_coroutine_threadsafe(serve(), self._loop)
        try:
            self.run(ready.get())
            yield make
        finally:
            for backend in made:
                backend.close()
            self._loop.call_soon_threadsafe(self._stopping.set)
            served.result(30.0)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(30.0)
            self._loop.close()


@pytest.mark.parametrize("seed", range(5))
def test_the_c10d_backend_answers_the_same(dynamic: Any, tmp_path: Path, seed: int) -> None:
    """Random calls to both: with current, older, foreign and empty tokens, and others that are no bytes. No state
    comes twice, because the c10d backend can't distinguish equal states."""
    c10d = pytest.importorskip("torch.distributed.elastic.rendezvous.c10d_rendezvous_backend")
    dist = pytest.importorskip("torch.distributed")
    draw = random.Random(seed)
    loop = Loop(tmp_path)
    with loop.backends() as make:
        ours = make()
        theirs = c10d.C10dRendezvousBackend(dist.HashStore(), RUN)
        known: list[tuple[Any, Any]] = []  # our token, and the c10d token of the same state

        def compare(mine: Any, other: Any) -> None:
            assert (mine is None) == (other is None)
            if mine is None:
                return
            assert (mine[0], *mine[2:]) == (other[0], *other[2:])
            known.append((mine[1], other[1]))

        foreign = [None, b"", "", 0, "invalid", 42, b"invalid", b"x" * 5_000, object()]
        for number in range(60):
            if draw.random() < 0.3:
                compare(ours.get_state(), theirs.get_state())
                continue
            same = draw.choice(foreign)
            pair = draw.choice(known[-3:]) if known and draw.random() < 0.6 else (same, same)
            state = b"state %d" % number
            compare(ours.set_state(state, pair[0]), theirs.set_state(state, pair[1]))
        assert len({mine for mine, _ in known}) > 5
        assert len(set(known)) == len({mine for mine, _ in known})


def test_torchs_dynamic_rendezvous_runs_on_it(
    dynamic: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four nodes rendezvous, one goes, the others rendezvous again and close: all of it in torch's own code."""
    dist = pytest.importorskip("torch.distributed")
    api = pytest.importorskip("torch.distributed.elastic.rendezvous.api")
    # Its TCP store would look names up.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    loop, store = Loop(tmp_path), dist.HashStore()
    with loop.backends() as backend, ThreadPoolExecutor(4) as nodes:
        handlers = [
            dynamic.DynamicRendezvousHandler.from_backend(
                RUN,
                store,
                backend(),
                min_nodes=3,
                max_nodes=4,
                local_addr="127.0.0.1",
                timeout=dynamic.RendezvousTimeout(last_call=dynamic.timedelta(seconds=1)),
            )
            for _ in range(4)
        ]
        joining = [nodes.submit(handler.next_rendezvous) for handler in handlers]
        infos = [joined.result(50.0) for joined in joining]
        assert sorted(info.rank for info in infos) == [0, 1, 2, 3]
        assert {info.world_size for info in infos} == {4}

        # A handler that shuts down leaves the rendezvous and closes it; a lost one just sends nothing, so its
        # node is taken out of the state as torch's sanitizing does when its heartbeats stop.
        lost = handlers.pop()
        lost._stop_heartbeats()
        lost._state_holder.sync()
        del lost._state_holder.state.participants[lost._this_node]
        del lost._state_holder.state.last_heartbeats[lost._this_node]
        lost._state_holder.mark_dirty()
        assert lost._state_holder.sync()

        joining = [nodes.submit(handler.next_rendezvous) for handler in handlers]
        infos = [joined.result(50.0) for joined in joining]
        assert sorted(info.rank for info in infos) == [0, 1, 2]
        assert {info.world_size for info in infos} == {3}

        handlers[0].set_closed()
        joining = [nodes.submit(handler.next_rendezvous) for handler in (*handlers, lost)]
        for joined in joining:
            with pytest.raises(api.RendezvousClosedError):
                joined.result(50.0)
        for handler in handlers:
            handler._stop_heartbeats()


def test_a_state_that_is_none_of_torchs_is_corrupt_to_torch(dynamic: Any, tmp_path: Path) -> None:
    """The service accepts any bytes; torch detects them, and raises the same error as on its own backends."""
    api = pytest.importorskip("torch.distributed.elastic.rendezvous.api")
    loop = Loop(tmp_path)
    with loop.backends() as make:
        backend = make()
        backend.set_state(b"no pickle")
        settings = dynamic.RendezvousSettings(RUN, 1, 1, dynamic.RendezvousTimeout(), None, 3)
        with pytest.raises(api.RendezvousStateError):
            dynamic._BackendRendezvousStateHolder(backend, settings).sync()
