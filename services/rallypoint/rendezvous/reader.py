"""What can be read of runs without waiting: from the shard that owns them, or from what is durable of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from rallypoint.rendezvous.base.errors import NotOwner
from rallypoint.rendezvous.core.state import RunSettings, RunState
from rallypoint.rendezvous.history import History
from rallypoint.rendezvous.state.core import FencedState

_T = TypeVar("_T")


class RunsReader(Protocol):
    """Runs and what happened to them, as it is durable. All of it raises NotOwner where that can't be told."""

    async def read_run(self, run_id: str, view: Callable[[RunState], _T]) -> _T:
        """What `view` makes of a run.

        Raises:
            RunNotFound: There is no such run.
        """

    async def read_runs(self, view: Callable[[Iterable[RunState]], _T]) -> _T:
        """What `view` makes of all runs of this reader."""

    def elsewhere(self, run_id: str) -> NotOwner | None:
        """Who knows of a run what is not durable, which nodes are connected; None: this one does."""

    def history(self, run_id: str) -> History:
        """The events of a run that are kept.

        Raises:
            RunNotFound: There is no such run.
        """

    def settings(self, run_id: str) -> RunSettings:
        """The settings of a run, which never change.

        Raises:
            RunNotFound: There is no such run.
        """


class StoreReader(Protocol):
    """Keys and values. See StoreService for what is raised."""

    async def get(self, run_id: str, round: int, key: str, timeout: float) -> bytes:
        """The value of a key; waits for it if it can, up to `timeout` seconds, and raises NotOwner if it can't."""

    async def multi_get(self, run_id: str, round: int, keys: Sequence[str], timeout: float) -> list[bytes]:
        """The values of the keys, waited for likewise."""

    async def wait(self, run_id: str, round: int, keys: Sequence[str], timeout: float) -> None:
        """Return when all keys, each given once, are there, waited for likewise."""

    def check(self, run_id: str, round: int, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""

    def list_keys(self, run_id: str, round: int, prefix: str, after: str, count: int) -> list[str]:
        """The first `count` keys that begin with `prefix` and come after `after`, by code points."""


class StateReader(Protocol):
    """Fenced states."""

    def get(self, run_id: str) -> FencedState | None:
        """The current state of a run; None: there is none."""


class RunReader(Protocol):
    """Answers reads for some runs: a shard, or what was read of one whose owner is elsewhere."""

    @property
    def runs(self) -> RunsReader:
        """Runs and their events."""

    @property
    def store(self) -> StoreReader:
        """The stores of the runs."""

    @property
    def states(self) -> StateReader:
        """The fenced states of the runs."""
