"""The port that the agent serves is a TCPStore: every method does the same with torch's own server and with ours."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

dist = pytest.importorskip("torch.distributed")

from rallypoint.torch.store import RallypointStore  # noqa: E402
from support.waiting import PATIENCE  # noqa: E402
from torture.mortal_server import MortalServer  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

CONF = {"insecure": "1"}
SHORT = timedelta(milliseconds=200)
LONG = timedelta(seconds=PATIENCE)


@pytest.fixture(scope="module", params=["torch's server", "our port"])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Any]]:
    """Two clients of one store, each with its own connection."""
    if request.param == "torch's server":
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=LONG, wait_for_workers=False)
        yield server, server.clone()
        return
    service = MortalServer(tmp_path_factory.mktemp("server"))
    service.start()
    store = RallypointStore(service.endpoint, "store", CONF, timeout=LONG)
    yield store, store.clone()
    service.close()


@pytest.fixture
def store(both: tuple[Any, Any]) -> Any:
    both[0].set_timeout(LONG)
    return both[0]


@pytest.fixture
def other(both: tuple[Any, Any]) -> Any:
    both[1].set_timeout(LONG)
    return both[1]


@pytest.fixture
def key() -> str:
    """A key of this test alone."""
    return uuid.uuid4().hex


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run a call in a thread; its result is put into the list."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    return thread, results


@pytest.mark.parametrize("value", [b"", b"v", b"\x00\xff" * 1_500_000])
def test_a_value_is_read_as_it_was_set(store: Any, other: Any, key: str, value: bytes) -> None:
    store.set(key, "before")
    store.set(key, value)
    assert store.get(key) == value
    assert other.get(key) == value


def test_add(store: Any, other: Any, key: str) -> None:
    assert [store.add(key, 3), other.add(key, -5), store.add(key, 2**40)] == [3, -2, 2**40 - 2]
    assert store.get(key) == b"%d" % (2**40 - 2)
    store.set(key, "41")
    assert store.add(key, 1) == 42


def test_compare_set(store: Any, key: str) -> None:
    """An absent key counts as empty; a comparison that fails with one returns the expected value."""
    assert store.compare_set(key, "expected", "new") == b"expected"
    assert not store.check([key])
    assert store.compare_set(key, "", "first") == b"first"
    assert store.compare_set(key, "wrong", "second") == b"first"
    assert store.compare_set(key, "first", "second") == b"second"
    assert store.get(key) == b"second"


def test_append(store: Any, other: Any, key: str) -> None:
    store.append(key, "one,")
    store.append(key, "two")
    assert store.get(key) == b"one,two"
    other.set_timeout(SHORT)
    assert other.get(key) == b"one,two"


def test_check_and_delete_key(store: Any, key: str) -> None:
    store.set(key, "v")
    assert store.check([key])
    assert store.check([])
    assert not store.check([key, f"{key}.2"])
    assert store.delete_key(key)
    assert not store.delete_key(key)
    assert not store.check([key])


def test_num_keys_and_list_keys(store: Any, key: str) -> None:
    before = store.num_keys()
    store.multi_set([f"{key}.{i}" for i in range(3)], ["v"] * 3)
    assert store.num_keys() == before + 3
    assert sorted(name for name in store.list_keys() if name.startswith(key)) == [
        f"{key}.{i}" for i in range(3)
    ]


def test_multi_set_and_multi_get(store: Any, other: Any, key: str) -> None:
    keys = [f"{key}.{i}" for i in range(5)]
    values = [b"%d" % i for i in range(5)]
    store.multi_set(keys, [value.decode() for value in values])
    assert store.has_extended_api()
    assert other.multi_get(keys) == values
    assert other.multi_get(keys[::-1]) == values[::-1]


def test_more_keys_than_a_request_to_the_service_may_have(store: Any, key: str) -> None:
    """The world size may be greater; and values that don't fit into one reply."""
    keys = [f"{key}.{i}" for i in range(11_000)]
    store.multi_set(keys, ["v"] * len(keys))
    store.wait(keys)
    assert store.check(keys)
    assert store.multi_get(keys) == [b"v"] * len(keys)
    store.multi_set(keys[:3], ["x" * 2_000_000] * 3)
    assert [len(value) for value in store.multi_get(keys[:4])] == [2_000_000] * 3 + [1]


@pytest.mark.parametrize(
    "call",
    [
        lambda store, key: store.get(key),
        lambda store, key: store.wait([key]),
        lambda store, key: store.wait([key], SHORT),
        lambda store, key: store.multi_get([key, f"{key}.2"]),
        lambda store, key: store.queue_pop(key),
    ],
    ids=["get", "wait", "wait with its own timeout", "multi_get", "queue_pop"],
)
def test_a_wait_times_out_and_the_store_goes_on(
    store: Any, key: str, call: Callable[[Any, str], Any]
) -> None:
    """It raises torch's own exception, which names the key; `set_timeout` sets the time."""
    store.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError, match=rf"wait timeout after 200ms, keys: /{key}"):
        call(store, key)
    store.set_timeout(LONG)
    store.set(key, "v")
    assert store.get(key) == b"v"


@pytest.mark.parametrize(
    "call",
    [
        lambda store, keys: store.get(keys[1]),
        lambda store, keys: store.wait(keys),
        lambda store, keys: store.multi_get(keys)[1],
    ],
    ids=["get", "wait", "multi_get"],
)
def test_a_wait_ends_when_another_client_sets_the_last_key(
    store: Any, other: Any, key: str, call: Callable[[Any, list[str]], Any]
) -> None:
    keys = [f"{key}.1", f"{key}.2"]
    thread, results = in_thread(lambda: call(store, keys))
    other.set(keys[0], "v")
    other.set(keys[1], "v")
    thread.join(PATIENCE)
    assert results in ([b"v"], [None])


def test_a_queue(store: Any, other: Any, key: str) -> None:
    for value in ("one", "", "three"):
        store.queue_push(key, value)
    assert store.queue_len(key) == 3
    assert store.check([key])
    assert [other.queue_pop(key), other.queue_pop(key), store.queue_pop(key, False)] == [
        b"one",
        b"",
        b"three",
    ]
    assert store.queue_len(key) == 0
    with pytest.raises(dist.QueueEmptyError, match="queue is empty"):
        store.queue_pop(key, False)


def test_a_pop_waits_for_a_value(store: Any, other: Any, key: str) -> None:
    thread, results = in_thread(lambda: store.queue_pop(key))
    other.queue_push(key, "v")
    thread.join(PATIENCE)
    assert results == [b"v"]


def test_each_value_of_a_queue_is_popped_once(store: Any, key: str) -> None:
    """Several clients push and pop."""

    def push(name: str) -> None:
        client = store.clone()
        for number in range(10):
            client.queue_push(key, f"{name}{number}")
        assert client.queue_len(key) >= 0  # a reply: the pushes are done

    def pop(_: int) -> list[bytes]:
        client = store.clone()
        found: list[bytes] = []
        deadline = time.monotonic() + PATIENCE
        while len(found) < 10 and time.monotonic() < deadline:
            try:
                found.append(client.queue_pop(key))
            except dist.QueueEmptyError:  # another client was faster, after the same wait
                continue
        return found

    with ThreadPoolExecutor(8) as threads:
        popped = [threads.submit(pop, i) for i in range(4)]
        list(threads.map(push, "abcd"))
        values = [value for each in popped for value in each.result(PATIENCE)]
    assert sorted(values) == sorted(b"%c%d" % (name, number) for name in b"abcd" for number in range(10))


def test_a_barrier(store: Any, key: str) -> None:
    """The calls return when the last one is made, and a late one returns at once."""
    early = [in_thread(lambda: store.clone().barrier(key, 3, LONG)) for _ in range(2)]
    store.barrier(key, 3, LONG)
    for thread, results in early:
        thread.join(PATIENCE)
        assert results == [None]
    store.barrier(key, 3, LONG)
    with pytest.raises(dist.DistStoreError, match=f"barrier timeout after 200ms, key: {key}"):
        store.barrier(f"{key}.2", 2, SHORT)


def test_all_methods_inside_two_prefixes(store: Any, key: str) -> None:
    """torch's process groups use each store like this."""
    inner = dist.PrefixStore("inner", dist.PrefixStore(key, store))
    inner.set("k", "v")
    assert (inner.get("k"), store.get(f"{key}/inner/k")) == (b"v", b"v")
    assert (inner.add("n", 2), inner.check(["k", "n"]), inner.compare_set("k", "v", "w")) == (2, True, b"w")
    inner.append("a", "xy")
    inner.multi_set(["b"], ["z"])
    assert inner.multi_get(["a", "b"]) == [b"xy", b"z"]
    inner.queue_push("q", "v")
    assert (inner.queue_len("q"), inner.queue_pop("q")) == (1, b"v")
    assert inner.delete_key("a")
    assert sorted(inner.list_keys()) == ["b", "k", "n"]
    assert inner.num_keys() == store.num_keys()
    inner.barrier("bar", 1, LONG)
    inner.clone().wait(["k"], LONG)
    inner.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError, match="wait timeout after 200ms"):
        inner.get("none")


def test_sixteen_threads_share_a_client_and_have_one_each(store: Any, key: str) -> None:
    def count(index: int) -> None:
        mine = store if index % 2 else store.clone()
        for step in range(20):
            mine.add(key, 1)
            mine.set(f"{key}.{index}.{step}", str(step))
            assert mine.get(f"{key}.{index}.{step}") == b"%d" % step

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(count, range(16)))
    assert store.add(key, 0) == 16 * 20


def test_a_call_that_the_store_refuses_ends_its_connection_alone(both: tuple[Any, Any], key: str) -> None:
    """torch's server does so too: the protocol has no reply for it."""
    store = both[0].clone()
    store.set(key, "no number")
    with pytest.raises(dist.DistNetworkError):
        store.add(key, 1)
    both[1].set_timeout(LONG)
    assert both[1].get(key) == b"no number"


# ---- The store of a service, for programs that belong to no run.


def test_calls_wait_for_a_service_that_is_killed_and_started_again(tmp_path: Path) -> None:
    service = MortalServer(tmp_path / "server")
    service.start()
    store = RallypointStore(service.endpoint, "job", CONF, timeout=LONG)
    assert store.add("n", 1) == 1
    service.kill()
    thread, results = in_thread(lambda: store.add("n", 1))
    waiting, waited = in_thread(lambda: store.clone().get("later"))
    service.start()
    thread.join(PATIENCE)
    assert results == [2]
    store.set("later", "v")
    waiting.join(PATIENCE)
    assert waited == [b"v"]
    service.close()


def test_a_store_has_its_name_and_a_service(tmp_path: Path) -> None:
    service = MortalServer(tmp_path / "server")
    service.start()
    one, two = (RallypointStore(service.endpoint, name, CONF, timeout=SHORT) for name in ("one", "two"))
    one.set("k", "v")
    assert not two.check(["k"])
    service.close()
    with pytest.raises(ValueError, match="nonsense"):
        RallypointStore(service.endpoint, "job", {"insecure": "1", "nonsense": "1"})
    with pytest.raises(
        dist.DistNetworkError, match=r"no rendezvous service answered at .* check that it is running"
    ):
        RallypointStore(service.endpoint, "job", {"insecure": "1", "read_timeout": "1"})


# ---- Why it is no subclass of Store in Python.


def test_a_python_store_inside_a_prefix_is_not_called_for_every_method() -> None:
    """torch 2.13 has no trampoline for these. If this fails, it has: a subclass has become possible."""
    called: list[str] = []
    arguments: dict[str, tuple[Any, ...]] = {
        "set": ("k", "v"),
        "get": ("k",),
        "delete_key": ("k",),
        "num_keys": (),
        "list_keys": (),
        "queue_push": ("k", "v"),
        "queue_pop": ("k",),
        "queue_len": ("k",),
        "set_timeout": (SHORT,),
    }

    def record(name: str) -> Callable[..., Any]:
        def method(*_: object) -> Any:
            called.append(name)
            return b"v" if name == "get" else None

        return method

    python_store = type("PythonStore", (dist.Store,), {name: record(name) for name in arguments})()
    inner = dist.PrefixStore("prefix", python_store)
    for name, values in arguments.items():
        try:
            getattr(inner, name)(*values)
        except (RuntimeError, NotImplementedError):
            assert name not in called
    assert called == ["set", "get"]
