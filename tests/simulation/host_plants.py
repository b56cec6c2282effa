"""Bugs to plant in the product that are found by lost hosts, herds, newcomers and clocks, by kind of simulation."""

from __future__ import annotations

from typing import Any

import pytest

from rallypoint.rendezvous import client
from rallypoint.rendezvous.core import apply, failures, newcomers
from rallypoint.rendezvous.core.state import RunState
from rallypoint.rendezvous.runs.engine import RendezvousEngine
from simulation.plants import Plant, give_no_time_after_a_pause
from support.replacing import instead_of


def hold_no_failure_for_a_broken_stream(patch: pytest.MonkeyPatch) -> None:
    """A worker's failure ends its round even if the stream of another participant is broken."""
    patch.setattr(failures, "misses_participant", lambda state: False)


def attribute_no_failure_to_a_loss(patch: pytest.MonkeyPatch) -> None:
    """Failures are counted even if a host of their round turns out to be lost."""
    patch.setattr(failures, "failed_round_of", lambda state, node_id: 0)


def end_a_run_while_participants_are_silent(patch: pytest.MonkeyPatch) -> None:
    """A run fails, or a node is evicted, before the other participants have sent a sign of life."""

    @instead_of(patch, failures, "is_settled")
    def hasty(is_settled: Any, state: RunState, now: float) -> Any:
        silent, state.silent = state.silent, set()
        try:
            return is_settled(state, now)
        finally:
            state.silent = silent


def overlook_broken_streams(patch: pytest.MonkeyPatch) -> None:
    """A node whose stream broke counts as connected until its lease expires."""

    @instead_of(patch, apply, "disconnect")
    def careless(disconnect: Any, state: RunState, node_id: str, now: float) -> None:
        disconnect(state, node_id, now)
        state.disconnected.discard(node_id)


def give_up_for_a_late_first_message(patch: pytest.MonkeyPatch) -> None:
    """A node in a run treats FIRST_MESSAGE_LATE, the error of a slow stream, as a refusal."""
    patch.setattr(client, "_REFUSALS", client._REFUSALS | {"FIRST_MESSAGE_LATE"})


def keep_leases_by_the_wall_clock(patch: pytest.MonkeyPatch) -> None:
    """Deadlines use the wall clock, which operators and daemons set."""

    @instead_of(patch, RendezvousEngine, "__init__")
    def naive(init: Any, self: RendezvousEngine, *args: Any, **settings: Any) -> None:
        init(self, *args, **{**settings, "clock": settings["wall_clock"]})


def let_every_newcomer_in(patch: pytest.MonkeyPatch) -> None:
    """A round ends for each newcomer, even if earlier newcomers soon failed."""
    patch.setattr(newcomers, "READY_AFTER", 0.0)
    patch.setattr(newcomers, "_hold", lambda count, longest: 0.0)


_AGREE = "all live nodes agree on one FINAL round"
_ALONE = "trouble of the server alone"

# By kind of simulation and plant: a pattern of the invariants that it breaks.
HOST_PLANTS: dict[str, dict[Plant, str]] = {
    "clusters": {
        hold_no_failure_for_a_broken_stream: "a failure is held",
        attribute_no_failure_to_a_loss: "no restart is counted|no restart is counted for the loss",
        end_a_run_while_participants_are_silent: "follow a lost host|waits for what others have to report",
        overlook_broken_streams: "a failure is held|no round freezes",
        give_up_for_a_late_first_message: "was admitted is not refused",
        keep_leases_by_the_wall_clock: f"{_ALONE}|{_AGREE}|whoever waits, waits|held back|in a row|in its time|barrier",
    },
    "herds": {give_no_time_after_a_pause: _ALONE},
    "joiners": {let_every_newcomer_in: "of the time"},
}
