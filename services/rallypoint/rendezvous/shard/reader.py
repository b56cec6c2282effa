"""Readers of runs, which never wait: of the shard that owns them, or of a copy of its durable state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from rallypoint.rendezvous.base.cooperative import Work
from rallypoint.rendezvous.base.entries import StoreChange
from rallypoint.rendezvous.base.errors import NotOwner, Refusal
from rallypoint.rendezvous.base.limits import RendezvousLimits
from rallypoint.rendezvous.base.refusals import KeyWaitTimedOut
from rallypoint.rendezvous.core.commands import RunNotFound
from rallypoint.rendezvous.core.state import RunSettings, RunState
from rallypoint.rendezvous.journal.journal import JournalError, Recovered
from rallypoint.rendezvous.runs.engine import RendezvousEngine
from rallypoint.rendezvous.runs.history import Histories, History
from rallypoint.rendezvous.runs.recovery import recover_runs
from rallypoint.rendezvous.runs.run import HostedRun
from rallypoint.rendezvous.shard.shard import Shard
from rallypoint.rendezvous.state.core import SPACE, FencedState, States
from rallypoint.rendezvous.store.core import RunSpaces
from rallypoint.rendezvous.store.service import StoreService, check_reply_size

_T = TypeVar("_T")


class ReadOnlyRuns:
    """Runs that another replica owns, read-only, as they were durable when their journal was read.

    It returns the same as their owner at the moment when the journal was read, except for volatile state: the connected
    nodes. Nothing changes here, no lease expires, and no task runs. A request that would have to wait is refused with
    the address of the owner.
    """

    def __init__(self, runs: _RunsView, store: _StoreView, states: _StatesView) -> None:
        """See `restore`."""
        self.runs = runs
        self.store = store
        self.states = states

    @classmethod
    def restore(
        cls,
        recovered: Recovered,
        *,
        not_owner: Callable[[str], NotOwner],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        limits: RendezvousLimits | None = None,
        use_state: Callable[[str], None] = lambda run_id: None,
    ) -> Work[ReadOnlyRuns]:
        """Restore from the content of a journal, as cooperative work.

        Args:
            not_owner: Makes the NotOwner refusal of requests that only the owner of a run can serve.
            clock: Monotonic seconds.
            wall_clock: Unix seconds.
            use_state: Called with the run before each read of its state; may raise NotOwner instead.

        Raises:
            JournalError: A record is missing, or of a newer version.
        """
        limits = limits or RendezvousLimits()
        now = clock()
        histories = Histories(limits.events_per_run, limits.event_bytes_per_run, limits.event_bytes)
        hosted = (yield from recover_runs(recovered, histories.open, now, wall_clock() - now)).runs
        yield from histories.make_room()
        by_run: dict[str, list[StoreChange]] = {}
        of_states: list[StoreChange] = []
        for entry in recovered.store_entries:
            (of_states if entry.round == SPACE else by_run.setdefault(entry.run_id, [])).append(entry)
            yield
        try:
            spaces: dict[str, RunSpaces] = {}
            for run_id, of_run in by_run.items():
                spaces[run_id] = yield from RunSpaces.restore(run_id, of_run)
            states = yield from States.restore(of_states)
        except ValueError as error:
            raise JournalError(f"the journal can't be read by this version: {error}") from error
        return cls(
            _RunsView(hosted, not_owner),
            _StoreView(hosted, spaces, not_owner),
            _StatesView(states, use_state),
        )


class _RunsView:
    def __init__(self, hosted: Mapping[str, HostedRun], not_owner: Callable[[str], NotOwner]) -> None:
        self._hosted = hosted
        self._not_owner = not_owner

    def remote_reader(self, run_id: str) -> NotOwner:
        """Return the owner of the volatile state of a run: the connected nodes."""
        return self._not_owner(run_id)

    def now(self) -> None:
        """Return None: another process has the clock of the runs' deadlines."""

    async def read_run(self, run_id: str, view: Callable[[RunState], _T]) -> _T:
        return view(_run(self._hosted, run_id).state)

    async def read_runs(self, view: Callable[[Iterable[RunState]], _T]) -> _T:
        return view(run.state for run in self._hosted.values())

    def history(self, run_id: str) -> History:
        return _run(self._hosted, run_id).history

    def settings(self, run_id: str) -> RunSettings:
        return _run(self._hosted, run_id).state.settings


class _StoreView:
    def __init__(
        self, hosted: Mapping[str, HostedRun], spaces: Mapping[str, RunSpaces], not_owner: Refusal
    ) -> None:
        self._hosted = hosted
        self._spaces = spaces
        self._not_owner = not_owner

    async def get(self, run_id: str, round: int, key: str, timeout: float) -> bytes:
        (value,) = self._present(run_id, round, [key], timeout)
        return value

    async def multi_get(self, run_id: str, round: int, keys: Sequence[str], timeout: float) -> list[bytes]:
        values = self._present(run_id, round, keys, timeout)
        check_reply_size(values)
        return values

    async def wait(self, run_id: str, round: int, keys: Sequence[str], timeout: float) -> None:
        self._present(run_id, round, keys, timeout)

    def check(self, run_id: str, round: int, keys: Sequence[str]) -> bool:
        return not self._reading(run_id, round).missing(round, keys)

    def list_keys(self, run_id: str, round: int, prefix: str, after: str, count: int) -> list[str]:
        return self._reading(run_id, round).keys(round, prefix, after, count)

    def _present(self, run_id: str, round: int, keys: Sequence[str], timeout: float) -> list[bytes]:
        """Return the values of keys if all are there.

        Raises:
            NotOwner: Some are missing, and the request wants to wait for them.
            KeyWaitTimedOut: Some are missing, and the request does not want to wait.
        """
        spaces = self._reading(run_id, round)
        if missing := spaces.missing(round, dict.fromkeys(keys)):
            if timeout > 0:
                raise self._not_owner(run_id)
            raise KeyWaitTimedOut(run_id, missing, timeout)
        return [spaces.value(round, key) or b"" for key in keys]

    def _reading(self, run_id: str, round: int) -> RunSpaces:
        current_round = _run(self._hosted, run_id).writable_round
        spaces = self._spaces.get(run_id) or RunSpaces(run_id)
        spaces.check_round(round, current_round or 0)
        return spaces


class _StatesView:
    def __init__(self, states: States, use: Callable[[str], None]) -> None:
        self._states = states
        self._use = use

    def get(self, run_id: str) -> FencedState | None:
        held = self._states.held(run_id)
        if held is None:
            return None
        self._use(run_id)
        return held.current


def _run(hosted: Mapping[str, HostedRun], run_id: str) -> HostedRun:
    run = hosted.get(run_id)
    if run is None:
        raise RunNotFound(run_id)
    return run


RunsReader: TypeAlias = RendezvousEngine | _RunsView
StoreReader: TypeAlias = StoreService | _StoreView
RunReader: TypeAlias = Shard | ReadOnlyRuns
