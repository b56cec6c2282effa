"""Newcomers that join a healthy run and leave moments later, again and again, for a virtual hour.

Healthy nodes must run for nearly all of that time: a round that ends for a newcomer costs all of them a restart.
"""

from __future__ import annotations

import random
from itertools import count

from rallypoint.rendezvous.core import facts
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rendezvous.core.ledger import Violation
from simulation.node import Node
from simulation.plan import Plan, default_settings
from simulation.scenario import FORM_WITHIN, ClusterScenario
from simulation.workers import Fates

# Virtual seconds in which newcomers come and go, the share of them in which a round must be FINAL, and the seconds in
# which nodes must agree afterwards.
HOUR = 3600.0
LEAST_SHARE = 0.95
AGREE_WITHIN = 120.0


def draw_joiners(seed: int) -> Plan:
    """Return the plan of a seed."""
    chance = random.Random(f"{seed}/joiners")
    healthy = chance.randint(2, 3)
    settings = pb.RunSettings(
        min_nodes=chance.randint(1, healthy),
        max_nodes=healthy + chance.choice([1, 2]),
        max_restarts=3,
        max_restarts_per_node=chance.choice([0, 1]),
        scale_up_policy=chance.choice(
            [pb.SCALE_UP_POLICY_IMMEDIATE, pb.SCALE_UP_POLICY_IMMEDIATE, pb.SCALE_UP_POLICY_DELAYED]
        ),
    )
    settings.scale_up_delay.FromNanoseconds(chance.choice([6, 30]) * 10**9)
    return Plan(
        seed,
        default_settings(settings),
        tuple(f"node{number}" for number in range(healthy)),
        Fates(longest=1e6, slowest_stop=1.0, bereaved=chance.choice([0.0, 1.0])),
        server_only=False,
        default_terms=True,
        trouble=HOUR,
        # Seconds after which a newcomer comes again.
        pause=chance.choice([1.0, 5.0, 10.0, 30.0, 60.0]),
        finale="nothing",
        requeue="no",
        records_per_checkpoint=chance.choice([30, 1000]),
        most_lives=5_000,
        most_steps=1_000_000,
    )


class Joiners(ClusterScenario):
    """One seed; `play` it once."""

    target = "simulate JOINERS=1"
    draw = staticmethod(draw_joiners)

    def _play(self) -> None:
        cluster, plan = self.cluster, self.plan
        for node_id in plan.node_ids:
            cluster.start_node(node_id)
        cluster.clockwork.after(1e-3, lambda: None)
        self._await("a cluster without trouble forms a round", FORM_WITHIN)
        begun = cluster.clockwork.now
        self._start_newcomers()
        self._let_pass(plan.trouble)
        share = self._share_of_final(begun)
        cluster.note("share", round(share, 4))
        if share <= LEAST_SHARE:
            raise Violation(
                f"healthy nodes run for {LEAST_SHARE:.0%} of the time in which newcomers come and go"
            )
        cluster.calm_down()
        self._await("after newcomers stop coming, all live nodes agree on one FINAL round", AGREE_WITHIN)

    def _start_newcomers(self) -> None:
        """Start a newcomer and end it, again and again: under one name, or under a new one each time."""
        cluster, chance = self.cluster, self.cluster.chance
        names = (f"joiner{number}" for number in count()) if chance.random() < 0.5 else None
        life = chance.choice([0.2, 2.0, 6.0, 20.0, 40.0])
        ways = chance.choice([("crash",), ("power",), ("stop",), ("crash", "power", "stop")])

        def come() -> None:
            if cluster.calm:
                return
            cluster.start_node(next(names) if names is not None else "joiner")
            cluster.clockwork.after(life * chance.uniform(0.5, 1.0), go, cluster.nodes[-1])

        def go(node: Node) -> None:
            way = chance.choice(ways)
            if node.process.alive:
                cluster.note(way, node.process.name)
                {"crash": node.crash, "power": node.lose_power, "stop": node.request_stop}[way]()
            cluster.clockwork.after(self.plan.pause * chance.uniform(0.7, 1.3), come)

        come()

    def _share_of_final(self, begun: float) -> float:
        """Return the share of the time since `begun` in which a round was FINAL."""
        since: float | None = begun
        total = 0.0
        for at, what, details in self.cluster.trace:
            if what != "durable" or at < begun:
                continue
            fact = details[2]
            if isinstance(fact, facts.RoundFinalized):
                since = at
            elif isinstance(fact, (facts.RoundEnded, facts.RunClosed)) and since is not None:
                total, since = total + at - since, None
        now = self.cluster.clockwork.now
        return (total + (now - since if since is not None else 0.0)) / (now - begun)
