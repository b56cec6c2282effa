"""A seed of replicas: as `simulation.scenario`, with three replicas and their etcd in place of one service."""

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
    """A referee that allows a stale replica to send no updates: it may not know yet that it lost its runs.

    The decision time of a commit is not known either: a commit waits for the commit before it, and for etcd.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.losses.decided_is_known = False

    def _expect_notified(self, run_id: str, revision: int) -> None:
        pass


class ReplicaScenario(ClusterScenario):
    """Three replicas over three members of etcd, and the nodes of their runs."""

    target = "simulate-replicas"

    def build(self) -> Cluster:
        """Build the cluster of the plan."""
        # Three replicas and three members of etcd take about 450 steps per virtual second.
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
        """The faults, by name."""
        return ACTIONS

    def _let_run_expire(self) -> None:
        """Wait for the expiry again after each take-over, which restarts it. Refused offers of a shard become rare."""
        assert isinstance(self.cluster, ReplicaCluster)
        served = None
        while served != (served := self.cluster.served):
            super()._let_run_expire()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the product's connections to etcd by simulated ones, as well."""
        assert isinstance(self.cluster, ReplicaCluster)
        with self.cluster.in_place(), super().in_place():
            yield
