"""Bugs to plant in store and fenced state; see `plants`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rallypoint.rendezvous.base.entries import RESERVED
from rallypoint.rendezvous.journal.journal import Recovered
from rallypoint.rendezvous.runs.engine import RendezvousEngine
from rallypoint.rendezvous.shard import shard
from rallypoint.rendezvous.state import core as states
from rallypoint.rendezvous.state.core import SPACE, next_token
from rallypoint.rendezvous.state.service import FencedStateService
from rallypoint.rendezvous.store import core, writes
from rallypoint.rendezvous.store.store import RunStore
from simulation.plants import Plant, publish_before_commit
from support.replacing import instead_of


def acknowledge_writes_before_commit(patch: pytest.MonkeyPatch) -> None:
    """The store responds while the journal still writes."""
    publish_before_commit(patch, RunStore)


def set_states_before_commit(patch: pytest.MonkeyPatch) -> None:
    """The fenced-state service responds while the journal still writes."""
    publish_before_commit(patch, FencedStateService)


def carry_out_every_repetition(patch: pytest.MonkeyPatch) -> None:
    """A repeated write is carried out again."""
    patch.setattr(writes, "is_repetition", lambda operation, fingerprint, record: False)


def forget_operations_in_a_crash(patch: pytest.MonkeyPatch) -> None:
    """A restarted store has its values, but not the records of the operations that wrote them."""

    @instead_of(patch, shard, "_restoring")
    def careless(restoring: Any, recovered: Recovered, *args: Any) -> Any:
        kept = [entry for entry in recovered.store_entries if not entry.key.startswith(RESERVED)]
        return restoring(replace(recovered, store_entries=kept), *args)


def lose_a_value_in_a_crash(patch: pytest.MonkeyPatch) -> None:
    """Recovery omits the last value."""

    @instead_of(patch, shard, "_restoring")
    def careless(restoring: Any, recovered: Recovered, *args: Any) -> Any:
        kept = [entry for entry in recovered.store_entries if entry.round != SPACE]
        rest = [entry for entry in recovered.store_entries if entry.round == SPACE]
        return restoring(replace(recovered, store_entries=[*kept[:-1], *rest]), *args)


def take_writes_of_every_round(patch: pytest.MonkeyPatch) -> None:
    """The store accepts writes of any past round."""

    @instead_of(patch, core.RunSpaces, "check_round")
    def lax(check: Any, self: core.RunSpaces, round: int, current_round: int) -> None:
        check(self, round, max(round, 1) if round < current_round else current_round)


def judge_writes_by_durable_rounds(patch: pytest.MonkeyPatch) -> None:
    """The store accepts writes of a round while its end is being written to the journal."""
    patch.setattr(RendezvousEngine, "latest_round", RendezvousEngine.writable_round)


def take_writes_under_every_lease(patch: pytest.MonkeyPatch) -> None:
    """The store does not check the lease of the writer."""
    patch.setattr(RunStore, "_check_writer", lambda self, write: None)


def set_a_state_with_any_token(patch: pytest.MonkeyPatch) -> None:
    """A fenced state can be set with any token."""

    @instead_of(patch, states.StatesDraft, "set")
    def lax(decide: Any, self: states.StatesDraft, request: states.SetState, nonce: bytes) -> Any:
        held = self.held(request.run_id)
        return decide(self, replace(request, token=None if held is None else held.current.token), nonce)


def one_token_for_two_states(patch: pytest.MonkeyPatch) -> None:
    """A new fenced state keeps the token of the one that it replaces."""
    patch.setattr(states, "next_token", lambda before, nonce: before or next_token(before, nonce))


# A service that misses entries takes the store for empty, and opens the run again over the entries that are left.
_KEPT = "a run that is opened again has an empty store"

STORE_PLANTS: dict[Plant, str] = {
    acknowledge_writes_before_commit: "what is acknowledged is durable",
    set_states_before_commit: "what is acknowledged is durable",
    carry_out_every_repetition: "a write takes effect once",
    forget_operations_in_a_crash: f"a write takes effect once|{_KEPT}",
    lose_a_value_in_a_crash: f"who reads sees nothing that is past|what was acknowledged is not lost|{_KEPT}",
    take_writes_of_every_round: "no write of a round is acknowledged after its end was told",
    judge_writes_by_durable_rounds: "no write of a round is acknowledged after its end was told",
    take_writes_under_every_lease: "nothing is written under a lease that is over",
    set_a_state_with_any_token: "takes the place of that whose token was shown",
    one_token_for_two_states: "a token stands for one state|tokens grow by one",
}
