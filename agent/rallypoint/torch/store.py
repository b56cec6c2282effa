"""Stores for torch: one for any program, and that of a round for torch's agent.

store = RallypointStore("rendezvous.example:29400", "job-17")
torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, Store, TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousError

from rallypoint.torch.process import ERRORS, CompanionProcess
from rallypoint.worker.store import RoundOverError, StoreError, StoreRequestError
from rallypoint.worker.store import Store as RunStore

__all__ = ["RallypointStore", "RoundStore"]

# Keys of torch 2.13's agent (torch/distributed/elastic/agent/server/api.py). If another version has others, the round's
# end may end the agent in the moment of the rank assignment, and a success is reported when torchrun ends.
_ROLE_INFO = "torchelastic/role_info/"
_ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
_EXIT_BARRIER = "torchelastic/agent/terminal_state"
# Rank 0 reads and writes a key for each node. With this many calls at a time, a thousand nodes take a second.
_CONCURRENT_CALLS = 32
# They live as long as this process: torch may hold a store after its object in Python is gone.
_companions: list[CompanionProcess] = []


class RallypointStore(TCPStore):  # type: ignore[misc]  # torch has no types here
    """A store with a name, kept by a Rallypoint service: it is the same one in all processes that give that name.

    It is torch's own client, connected to a companion process of this one, which keeps the keys in the service. So it
    does all that a TCPStore does, works inside a PrefixStore, and calls of C++ threads don't need Python's lock; but no
    host has the keys. docs/torch-store.md has the limits. A store is forgotten two hours after its last process has
    left: give that of each job a name of its own.
    """

    def __init__(
        self,
        endpoint: str,
        name: str,
        conf: Mapping[str, object] | None = None,
        timeout: timedelta = timedelta(seconds=300),
    ) -> None:
        """Start the companion, and connect to it.

        Args:
            endpoint: Of the service, or of its replicas, separated by commas.
            name: Of the store.
            conf: `read_timeout` in seconds, and the keys about security; docs/torchrun-plugin.md has them.
            timeout: Of calls that wait; see `set_timeout`.

        Raises:
            ValueError: An argument is invalid; one line.
            DistNetworkError: The service can't be reached or refuses this client, or the companion does not start.
        """
        try:
            companion = CompanionProcess()
        except RendezvousError as error:
            raise DistNetworkError(str(error)) from None
        try:
            texts = {key: str(value) for key, value in (conf or {}).items()}
            companion.send("open_store", endpoint=endpoint, name=name, conf=texts, local_addr="")
            port = _port_of(companion)
            super().__init__("127.0.0.1", port, is_master=False, timeout=timeout, wait_for_workers=False)
        except BaseException as error:
            companion.end()
            if isinstance(error, RendezvousError):
                raise DistNetworkError(str(error)) from None
            raise
        _companions.append(companion)


def _port_of(companion: CompanionProcess) -> int:
    # It has a time limit of its own for the service: `read_timeout`.
    messages = companion.receive(None)
    if messages[0]["is"] == "ended":
        raise ERRORS[messages[0]["how"]](messages[0]["detail"])
    return int(messages[0]["port"])


class RoundStore(Store):  # type: ignore[misc]  # torch has no types here
    """The keys of one round, in the run's store: they outlive any host, and end with the round.

    torch's agent keeps two things in it: the worker counts and roles from which it computes the workers' ranks, and its
    exit barrier. It has no answer to a store that fails while it computes ranks, and would end with all its workers. So
    a round that is over by then gets ranks as if all nodes were like this one: its workers are stopped at once, since
    `num_nodes_waiting` reports the end of the round.
    """

    def __init__(
        self, path: str, round_: int, rank: int, world_size: int, on_exit_barrier: Callable[[], None]
    ) -> None:
        """Make the store; it connects on first use.

        Args:
            path: The socket of the companion.
            on_exit_barrier: Called when the agent waits for the others at the end, and all workers here succeeded.
        """
        super().__init__()
        self._store = RunStore(path, round=round_)
        self._rank = rank
        self._world_size = world_size
        self._on_exit_barrier = on_exit_barrier
        self._role_info = b""

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        if key.startswith(_ROLE_INFO):
            self._role_info = _bytes(value)
        try:
            self._store.set(key, value)
        except RoundOverError as error:
            if not key.startswith((_ROLE_INFO, _ASSIGNED_RANKS)):
                raise DistStoreError(str(error)) from error
        except StoreError as error:
            raise DistStoreError(str(error)) from error

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait until it is set, for the store's timeout at most."""
        try:
            return self._store.get(key, self._seconds())
        except RoundOverError as error:
            if self._role_info and key.startswith((_ROLE_INFO, _ASSIGNED_RANKS)):
                return self._role_info if key.startswith(_ROLE_INFO) else self._alike()
            raise DistStoreError(str(error)) from error
        except StoreError as error:
            raise DistStoreError(str(error)) from error

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys; wait until they are set."""
        with ThreadPoolExecutor(_CONCURRENT_CALLS) as threads:
            return list(threads.map(self.get, keys))

    def multi_set(self, keys: list[str], values: Iterable[str | bytes]) -> None:
        """Store values."""
        # The service commits writes together that arrive together.
        with ThreadPoolExecutor(_CONCURRENT_CALLS) as threads:
            list(threads.map(self.set, keys, values))

    def add(self, key: str, amount: int) -> int:
        """Add to an integer, and return the sum."""
        return int(self._call(lambda: self._store.add(key, amount)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are set; wait for the timeout, or the store's own, at most."""
        if any(key.startswith(_EXIT_BARRIER) for key in keys):
            self._on_exit_barrier()
        self._call(lambda: self._store.wait(keys, self._seconds(timeout)))

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys are set."""
        return bool(self._call(lambda: self._store.check(keys)))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a key if it has the expected value, or is absent and that is empty; return its value afterwards."""
        return bytes(self._call(lambda: self._store.compare_set(key, expected_value, desired_value)))

    def delete_key(self, key: str) -> bool:
        """Remove a key; return True if it was set."""
        return bool(self._call(lambda: self._store.delete(key)))

    def num_keys(self) -> int:
        """Count the keys."""
        return len(self._call(self._store.keys))

    def close(self) -> None:
        """Close the idle connections. The store may be used again."""
        self._store.close()

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except StoreRequestError as error:
            raise ValueError(str(error)) from error
        except StoreError as error:
            raise DistStoreError(str(error)) from error

    def _seconds(self, timeout: timedelta | None = None) -> float:
        return min(24 * 3600.0, (timeout or self.timeout).total_seconds())

    def _alike(self) -> bytes:
        """The ranks of this node's workers if all nodes have as many, with the same role."""
        count = json.loads(self._role_info)["local_world_size"]
        base, total = self._rank * count, self._world_size * count
        return json.dumps([base, total, base, total]).encode()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
