"""The plan of a seed: a run's settings, its nodes, and the kinds and rates of faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from rallypoint.rendezvous.base.limits import RendezvousLimits
from rallypoint.rendezvous.core.state import RunSettings
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import set_seconds
from simulation.clockwork import MOST_STEPS
from simulation.cpu import Costs
from simulation.workers import Fates

RUN = "run"
# Seconds after which a run without nodes is forgotten, in some seeds. Longer than a node may take to notice that its
# server has gone: otherwise nodes would come back to a closed run, find none, and create it again.
SHORT_TTL = 40.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The random choices of a seed."""

    seed: int
    settings: pb.RunSettings
    node_ids: tuple[str, ...]
    fates: Fates
    # Only the server has faults: then no worker may ever be restarted.
    server_only: bool
    # The timeouts of leases and rounds are the defaults, and pauses of the server are as long as operators make them.
    default_terms: bool
    # Seconds of the period with faults, and mean seconds between two faults.
    trouble: float
    pause: float
    # The end for the nodes that are left: nothing happens, all workers succeed, or an operator closes the run.
    finale: str
    # Start of the job under the same name after that: not at all, when all nodes have gone, or at once.
    requeue: str
    # Records between two checkpoints; limits of the run's history and life.
    records_per_checkpoint: int
    limits: RendezvousLimits = field(default_factory=RendezvousLimits)
    # Limits: starts of agents during the faults, and callbacks of the whole cluster.
    most_lives: int = 40
    most_steps: int = MOST_STEPS
    # Clients outside the workers that use store and fenced state; 0: no workers do either. Seconds between two calls.
    store_clients: int = 0
    store_pace: float = 1.0
    # CPU cost of connections and messages for the server.
    costs: Costs = field(default_factory=Costs)

    def describe(self) -> str:
        """Return one paragraph for the report of a failure."""
        settings = " ".join(str(self.settings).split())
        return (
            f"seed {self.seed}: nodes {' '.join(self.node_ids[:12])}{' …' if len(self.node_ids) > 12 else ''}; "
            f"{'trouble of the server only' if self.server_only else 'any trouble'}"
            f"{' at default terms' if self.default_terms else ''} for {self.trouble:.0f} s, "
            f"something every {self.pause:.1f} s; finale: {self.finale}; requeue: {self.requeue}; {self.fates}; "
            f"{settings}"
        )


def draw_plan(seed: int) -> Plan:
    chance = random.Random(f"{seed}/plan")
    server_only = chance.random() < 0.2
    stores = random.Random(f"{seed}/stores")
    min_nodes = chance.choice([1, 2, 2, 3])
    max_nodes = min_nodes + chance.choice([0, 0, 1, 2])
    default_terms = chance.random() < 0.12
    settings = _settings(chance, min_nodes, max_nodes, patient=server_only)
    reopening = random.Random(f"{seed}/reopening")
    settings.reopen = reopening.choice(pb.Reopen.values())
    if default_terms:
        default_settings(settings)
    count = min_nodes if server_only else chance.randint(min_nodes, max_nodes + 1)
    return Plan(
        seed,
        settings,
        tuple(f"node{number}" for number in chance.sample([1, 2, 3, 9, 10, 11], min(count, 6))),
        _fates(chance, server_only),
        server_only,
        default_terms,
        trouble=chance.uniform(45.0, 150.0) if default_terms else chance.uniform(15.0, 45.0),
        pause=6.0 if default_terms else chance.choice([0.7, 1.5, 4.0]),
        finale=chance.choice(["nothing", "success", "close"]),
        requeue=reopening.choice(["no", "late", "at once"]),
        limits=RendezvousLimits(
            events_per_run=chance.choice([20, 50_000]), run_ttl=chance.choice([7_200.0, 7_200.0, SHORT_TTL])
        ),
        store_clients=stores.choice([0, 0, 1, 2]),
        store_pace=stores.choice([0.5, 2.0, 5.0]),
        records_per_checkpoint=chance.choice([1, 10, 30, 1000]),
    )


def _settings(chance: random.Random, min_nodes: int, max_nodes: int, *, patient: bool) -> pb.RunSettings:
    max_restarts = chance.choice([0, 1, 3, 100])
    settings = pb.RunSettings(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        max_restarts=max_restarts,
        max_restarts_per_node=min(max_restarts, chance.choice([0, 0, 1, 2])),
        keep_alive_max_attempt=3,
        scale_up_policy=chance.choice(pb.ScaleUpPolicy.values()),
        rank_policy=chance.choice(pb.RankPolicy.values()),
    )
    seconds = {
        "exit_barrier_timeout": 300.0 if patient else chance.choice([5.0, 20.0, 300.0]),
        "restart_window": chance.choice([0.0, 0.0, 15.0]),
        "restart_backoff": chance.choice([0.0, 2.0, 30.0]),
        "scale_up_delay": chance.choice([1.0, 6.0]),
        "join_timeout": 60.0 if patient else chance.choice([8.0, 60.0]),
        "last_call_timeout": chance.choice([0.0, 2.0, 10.0]),
        "confirm_timeout": 20.0 if patient else chance.choice([6.0, 20.0]),
        "keep_alive_interval": chance.choice([1.0, 2.0, 5.0]),
        "disconnect_grace": 2.0 if patient else chance.choice([0.0, 0.5, 2.0]),
    }
    for name, value in seconds.items():
        set_seconds(getattr(settings, name), value)
    return settings


def default_settings(settings: pb.RunSettings) -> pb.RunSettings:
    """Set the timeouts of leases and rounds to the defaults of the core."""
    defaults = RunSettings()
    settings.keep_alive_max_attempt = defaults.keep_alive_max_attempt
    for name in ("keep_alive_interval", "disconnect_grace", "confirm_timeout", "last_call_timeout"):
        set_seconds(getattr(settings, name), getattr(defaults, name))
    return settings


def _fates(chance: random.Random, server_only: bool) -> Fates:
    bereaved = chance.choice([0.0, 0.6, 1.0])
    if server_only:
        return Fates(succeeding=chance.choice([0.0, 0.0, 0.3]), longest=120.0)
    return Fates(
        failing=chance.choice([0.0, 0.1, 0.4, 0.9]),
        infectious=chance.choice([0.0, 0.5, 1.0]),
        bereaved=bereaved,
        unmendable=chance.choice([0.0, 0.0, 0.1]),
        succeeding=chance.choice([0.0, 0.2, 0.9]),
        longest=chance.choice([3.0, 30.0]),
        slowest_stop=chance.choice([0.1, 1.0, 30.0]),
    )
