"""A seed of replicas: as `simulation.scenario`, with three replicas and their etcd in the place of the one service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from simulation import faults
from simulation.cluster import Cluster
from simulation.plan import Plan
from simulation.referee import Referee
from simulation.replicas.cluster import ReplicaCluster, random_listener
from simulation.replicas.faults import ACTIONS
from simulation.scenario import ClusterScenario


class ReplicaReferee(Referee):
    """Who is connected to a replica that lost its runs, and doesn't know it yet, can't be told what happens to them.

    Nor does what is written say when it was decided: it waits for the commit before, and for etcd.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.losses.decided_is_known = False

    def _expect_told(self, run_id: str, revision: int) -> None:
        pass


class ReplicaScenario(ClusterScenario):
    """Three replicas over three members of etcd, and the nodes of their runs."""

    target = "simulate-replicas"

    def build(self) -> Cluster:
        """The cluster of the plan."""
        # Three replicas and three members of etcd take some 450 steps a second.
        self.plan: Plan = replace(
            self.plan, store_clients=max(1, self.plan.store_clients), most_steps=1_000_000
        )
        ReplicaCluster.judged_by = ReplicaReferee
        cluster = ReplicaCluster(self.plan)
        network: Any = cluster.network
        network.listening = random_listener(cluster)
        return cluster

    @property
    def actions(self) -> dict[str, tuple[faults.Action, float, bool]]:
        """What may befall it, by name."""
        return ACTIONS

    def _let_run_expire(self) -> None:
        """A replica that takes the run over gives it a new term. Offers that nobody takes come ever more seldom."""
        assert isinstance(self.cluster, ReplicaCluster)
        served = None
        while served != (served := self.cluster.served):
            super()._let_run_expire()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the product's connections to etcd by simulated ones, too."""
        assert isinstance(self.cluster, ReplicaCluster)
        with self.cluster.in_place(), super().in_place():
            yield
