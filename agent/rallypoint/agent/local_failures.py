"""The failures of one round's workers on this host, and which of them came first."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rallypoint.agent.errors import WorkerFailure, earliest


class LocalFailures:
    """Collects failures, and tells of the first: at once, and again if an earlier one comes to light.

    Who failed first need not end first: one that has raised may take long to unwind, while its neighbours, who lost
    their connection to it, are gone within milliseconds.
    """

    def __init__(
        self, on_first: Callable[[WorkerFailure], None], on_earlier: Callable[[WorkerFailure], None]
    ) -> None:
        """Know of none.

        Args:
            on_first: called once, with the first failure that is known by then.
            on_earlier: called with a failure that turns out to have been before the one that was told last.
        """
        self._on_first = on_first
        self._on_earlier = on_earlier
        self._known: dict[int, WorkerFailure] = {}
        self._told: WorkerFailure | None = None

    @property
    def in_order(self) -> list[WorkerFailure]:
        """All that are known, the first first."""
        return sorted(self._known.values(), key=lambda failure: failure.at or 0.0)

    def note(self, failure: WorkerFailure) -> None:
        """Take a failure of a worker that has ended, or never began; nothing is told yet."""
        self._known[failure.local_rank] = failure

    def tell(self, under_way: Iterable[WorkerFailure] = (), *, stopping: bool = False) -> None:
        """Tell of the first failure, if it is not what was told already.

        Args:
            under_way: failures of workers that have raised, and had not ended by themselves.
            stopping: whether the workers are being stopped already, for whatever reason; then nothing is a first
                failure any more, since nobody need be told to stop them.
        """
        for failure in under_way:
            self._known.setdefault(failure.local_rank, failure)
        first = earliest(self._known.values())
        if first is None:
            return
        told, self._told = self._told, first
        if told is None:
            (self._on_earlier if stopping else self._on_first)(first)
        elif (first.at or 0.0) < (told.at or 0.0) and first.local_rank != told.local_rank:
            self._on_earlier(first)
        else:
            self._told = told
