"""Bugs to plant in replicas, their leases and their journals, including those of `ha.planted`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rallypoint.etcd.session import Session
from rallypoint.etcd.values import CreateRevision, ModRevision, Txn
from rallypoint.rendezvous.journal.etcd.journal import EtcdJournal
from rallypoint.rendezvous.journal.etcd.pool import CommitPool
from rallypoint.rendezvous.journal.journal import Entry
from simulation.plants import Plant, give_no_new_term_to_leases, tell_before_commit
from support.replacing import instead_of


def _without(patch: pytest.MonkeyPatch, kind: type) -> None:

    @instead_of(patch, CommitPool, "transact")
    async def lax(transact: Any, self: CommitPool, txn: Txn) -> Any:
        return await transact(
            self, replace(txn, when=[each for each in txn.when if not isinstance(each, kind)])
        )


def commit_whoever_owns_the_shard(patch: pytest.MonkeyPatch) -> None:
    """Commits do not compare the owner of the shard."""
    _without(patch, CreateRevision)


def commit_after_any_commit(patch: pytest.MonkeyPatch) -> None:
    """Commits do not compare the last commit."""
    _without(patch, ModRevision)


def acknowledge_before_commit(patch: pytest.MonkeyPatch) -> None:
    """An append returns as soon as its entries are sent, before they are durable."""

    @instead_of(patch, EtcdJournal, "append")
    async def rash(append: Any, self: EtcdJournal, entries: Sequence[Entry]) -> None:
        sending = asyncio.ensure_future(append(self, entries))
        sending.add_done_callback(lambda done: done.cancelled() or done.exception())


def believe_in_a_lease_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A replica serves until it receives the loss of its lease, also after a pause."""
    patch.setattr(Session, "held", lambda self: not self._lost.is_set())


# A refusal also announces a fact: a lease must not be refused before its supersession is durable (seed 0).
_SENT = "nothing is told before it is durable|what is acknowledged is durable|a lease that stands is honoured"

REPLICA_PLANTS: dict[Plant, str] = {
    commit_whoever_owns_the_shard: "nobody but its owner writes to a shard",
    commit_after_any_commit: "a commit is done once|revisions are 1, 2, 3|not lost|takes effect once",
    acknowledge_before_commit: f"durable|{_SENT}",
    tell_before_commit: _SENT,
    believe_in_a_lease_for_ever: "who reads sees nothing that is past|trouble of the server alone",
    give_no_new_term_to_leases: "trouble of the server alone",
}
