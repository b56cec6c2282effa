"""Hundreds of nodes, and a service that is paused or restarted: no node may be lost because reconnecting takes time.

Connections and messages cost the server CPU time, so the nodes of a herd do not all reconnect at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from simulation.cpu import Costs
from simulation.plan import Plan, default_settings
from simulation.scenario import ClusterScenario
from simulation.workers import Fates

NODES = 300
# Virtual seconds that a herd may take to form a round, and to agree once the faults have stopped.
FORM_WITHIN = 120.0
AGREE_WITHIN = 120.0
# CPU seconds of a connection, in plaintext and with TLS, and of a message, on an idle machine; and the factors by which
# they are longer on a busy one.
_ACCEPT, _ACCEPT_TLS, _MESSAGE = 0.0005, 0.003, 0.0001
_SLOWER = (1.0, 3.0, 6.0)
_ACTIONS = {"pause_server": 4.0, "crash_server": 1.0, "drain_server": 1.0, "suspend_server": 1.5}


@dataclass(frozen=True, slots=True)
class _Herd:
    """The connections of a herd, and the slowdown of its server's machine."""

    tls: bool
    slower: float

    def costs(self) -> Costs:
        return Costs((_ACCEPT_TLS if self.tls else _ACCEPT) * self.slower, _MESSAGE * self.slower)


def draw_herd(seed: int) -> Plan:
    """Return the plan of a seed."""
    chance = random.Random(f"{seed}/herd")
    herd = _Herd(chance.random() < 0.5, chance.choice(_SLOWER))
    spare = chance.choice([0, 30])
    return Plan(
        seed,
        default_settings(pb.RunSettings(min_nodes=NODES - spare, max_nodes=NODES)),
        tuple(f"node{number}" for number in range(NODES)),
        Fates(longest=1e6),
        server_only=True,
        default_terms=True,
        trouble=chance.uniform(80.0, 160.0),
        pause=chance.choice([8.0, 20.0]),
        finale="nothing",
        requeue="no",
        records_per_checkpoint=10_000,
        most_lives=2 * NODES,
        most_steps=1_000_000,
        costs=herd.costs(),
    )


class Herd(ClusterScenario):
    """One seed; `play` it once."""

    target = "simulate HERD=1"
    draw = staticmethod(draw_herd)

    def _play(self) -> None:
        cluster, plan = self.cluster, self.plan
        for node_id in plan.node_ids:
            cluster.clockwork.after(cluster.chance.uniform(0.0, 5.0), cluster.start_node, node_id)
        cluster.clockwork.after(1e-3, lambda: None)
        self._await("a herd without trouble forms a round", FORM_WITHIN)
        cluster.referee.undisturbed = True
        self._cause_trouble(self.actions, _ACTIONS)
        self._let_pass(plan.trouble)
        cluster.calm_down()
        self._await("after faults stop, the whole herd still runs its round", AGREE_WITHIN)

    def _waits_its_turn(self) -> bool:
        server = self.cluster.server
        return server is None or server.process.paused
