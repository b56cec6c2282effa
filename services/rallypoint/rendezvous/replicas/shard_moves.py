"""The lines by which a replica tells people that shards came to it, or went: one for each wave of those that did."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from rallypoint.rendezvous.journal.etcd.keys import Owner
from rallypoint.rendezvous.replicas.cluster import Before
from rallypoint.rendezvous.replicas.ownership import Why
from rallypoint.rendezvous.replicas.waves import Wave, Waves
from rallypoint.rpc.logs import get_logger

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Taken:
    before: Before | None
    why: Why


@dataclass(frozen=True, slots=True)
class _Given:
    owner: Owner | None
    why: Why
    declined: bool


class ShardMoves:
    """Tells what happened to the shards of one session."""

    def __init__(self) -> None:
        """Nothing has happened yet."""
        self._waves = Waves(_tell)

    def taken(self, before: Before | None, why: Why, runs: int, seconds: float) -> None:
        """A shard is served here now.

        Args:
            before: Who owned it; None: nobody whom we saw.
            why: Why it was claimed.
            runs: How many it has.
            seconds: For how long it was free.
        """
        self._waves.add(_Taken(before, why), runs=runs, seconds=seconds)

    def given(self, owner: Owner | None, why: Why, runs: int, seconds: float, *, declined: bool) -> None:
        """A shard was handed over.

        Args:
            owner: Who has it now; None: no other replica took it.
            why: Why it was handed over.
            runs: How many it has.
            seconds: How long that took.
            declined: Whether no other replica took it in time though others are there.
        """
        self._waves.add(_Given(owner, why, declined), runs=runs, seconds=seconds)

    def end(self) -> None:
        """Tell at once what was not told yet."""
        self._waves.end()


def _tell(moved: Hashable, wave: Wave) -> None:
    counts = {"shards": wave.shards, "runs": wave.runs, "seconds": round(wave.slowest, 3)}
    match moved:
        case _Taken(None, why):
            _log.info("took free shards", **counts, why=why.value)
        case _Taken(Before(owner, ended), why):
            how = "its lease ended" if ended else "it handed them over"
            places = {"before": owner.replica, "address": owner.address}
            _log.info("took shards over", **counts, **places, how=how, why=why.value)
        case _Given(None, why, True):
            _log.warning("gave shards up, and nobody took them yet", **counts, why=why.value)
        case _Given(None, why):
            # The normal end of a service that has one replica.
            _log.info("gave shards up, no other replica is there", **counts, why=why.value)
        case _Given(Owner() as owner, why):
            places = {"to": owner.replica, "address": owner.address}
            _log.info("handed shards over", **counts, **places, why=why.value)
