"""The faults of a cluster: one function for each, with its weight.

To add one, write a function that applies it to a `Cluster` and decorate it with `@action`. A seed has only some of
them, each with a weight of its own, so that rare combinations occur.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from simulation.cluster import Cluster
from simulation.node import Node

Action = Callable[[Cluster], None]

# By name: the action, its weight, and True if it is a fault of the server alone.
ACTIONS: dict[str, tuple[Action, float, bool]] = {}


def action(weight: float, *, of_server: bool = False) -> Callable[[Action], Action]:
    """Register a function as an action."""

    def register(act: Action) -> Action:
        ACTIONS[act.__name__] = act, weight, of_server
        return act

    return register


def draw_actions(
    chance: random.Random, actions: dict[str, tuple[Action, float, bool]], *, of_server_only: bool
) -> dict[str, float]:
    """Return the actions of a seed and their weights: each is chosen with probability 0.5."""
    drawn = {
        name: weight * chance.uniform(0.2, 2.0)
        for name, (_, weight, of_server) in actions.items()
        if (of_server or not of_server_only) and chance.random() < 0.5
    }
    return drawn or {next(name for name, (_, _, of_server) in actions.items() if of_server): 1.0}


def _some(cluster: Cluster) -> Node | None:
    nodes = [node for node in cluster.alive if not node.process.paused]
    return cluster.chance.choice(nodes) if nodes else None


def _bring_back(cluster: Cluster, node: Node) -> None:
    """Start a killed node again, perhaps, and perhaps under another name."""
    chance = cluster.chance
    node_id = node.node_id if chance.random() < 0.7 else chance.choice(cluster.plan.node_ids)
    if chance.random() < 0.8:
        cluster.clockwork.after(chance.choice([0.0, 0.5, 3.0, 10.0]), _start, cluster, node_id)


def _start(cluster: Cluster, node_id: str) -> None:
    if not cluster.calm:
        cluster.start_node(node_id)


# ---- nodes


@action(2.0)
def crash_agent(cluster: Cluster) -> None:
    """An agent is killed."""
    node = _some(cluster)
    if node is not None:
        cluster.note("crash", node.process.name)
        node.crash()
        _bring_back(cluster, node)


@action(1.0)
def lose_host(cluster: Cluster) -> None:
    """A host loses power."""
    node = _some(cluster)
    if node is not None:
        cluster.note("power off", node.process.name)
        node.lose_power()
        _bring_back(cluster, node)


@action(1.0)
def cut_host(cluster: Cluster) -> None:
    """A host reaches neither the service nor its peers for a while."""
    node = _some(cluster)
    if node is not None and node.whole:
        cluster.note("cut host", node.process.name)
        node.cut_off(cluster.chance.choice([0.5, 3.0, 12.0, 35.0]))


@action(1.5)
def pause_agent(cluster: Cluster) -> None:
    """An agent is paused, and its workers run on."""
    node = _some(cluster)
    if node is not None:
        cluster.pause(node.process, cluster.chance.choice([0.3, 3.0, 12.0, 30.0]))


@action(1.0)
def suspend_host(cluster: Cluster) -> None:
    """A host is suspended with its agent and workers, and its monotonic clock stands still."""
    node = _some(cluster)
    if node is not None:
        cluster.pause(node.process, cluster.chance.choice([3.0, 12.0, 30.0]), suspended=True)
        node.fall_asleep()


@action(2.0)
def stop_node(cluster: Cluster) -> None:
    """A node gets a stop request."""
    node = _some(cluster)
    if node is not None:
        cluster.note("stop", node.process.name)
        node.request_stop()


@action(1.0)
def start_duplicate(cluster: Cluster) -> None:
    """An agent is started under a name that another agent may still have."""
    cluster.start_node(cluster.chance.choice(cluster.plan.node_ids))


# ---- the network


@action(2.0)
def cut_link(cluster: Cluster) -> None:
    """Packets from a host, to it, or both are lost for a while."""
    link = cluster.chance.choice(cluster.links)
    direction = cluster.chance.choice(["up", "down", "both"])
    cluster.note("cut", link.name, direction)
    cluster.network.block(link, up=direction != "down", down=direction != "up")
    cluster.clockwork.after(cluster.chance.choice([0.5, 3.0, 12.0, 35.0]), cluster.heal, link)


@action(2.0)
def reset_link(cluster: Cluster) -> None:
    """The connections of a host break."""
    link = cluster.chance.choice(cluster.links)
    cluster.note("reset", link.name)
    cluster.network.reset(link)


@action(1.0)
def stall_first_messages(cluster: Cluster) -> None:
    """The connections of a host break, and those made next stall between their opening and the first message."""
    link = cluster.chance.choice(cluster.links)
    link.stalled = cluster.chance.choice([8.0, 12.0, 30.0])
    cluster.note("stall", link.name, link.stalled)
    cluster.network.reset(link)
    cluster.clockwork.after(cluster.chance.choice([1.0, 5.0]), cluster.end_stall, link)


@action(1.0)
def slow_link(cluster: Cluster) -> None:
    """A host's network becomes slow, or fast again."""
    link = cluster.chance.choice(cluster.links)
    link.latency = cluster.chance.choice([0.0005, 0.02, 0.3, 2.0])
    cluster.note("latency", link.name, link.latency)


# ---- the service


@action(2.0, of_server=True)
def crash_server(cluster: Cluster) -> None:
    """The service is killed."""
    cluster.end_server(silently=False)


@action(0.5)
def lose_server_host(cluster: Cluster) -> None:
    """The service's host loses power."""
    cluster.end_server(silently=True)


@action(1.5, of_server=True)
def pause_server(cluster: Cluster) -> None:
    """The service is paused."""
    chance = cluster.chance
    seconds = (
        chance.uniform(2.0, 60.0) if cluster.plan.default_terms else chance.choice([0.5, 3.0, 12.0, 30.0])
    )
    if (process := cluster.serving) is not None:
        cluster.pause(process, seconds)


@action(0.7, of_server=True)
def suspend_server(cluster: Cluster) -> None:
    """The service's host is suspended, and its monotonic clock stands still."""
    if (process := cluster.serving) is not None:
        cluster.pause(process, cluster.chance.choice([3.0, 12.0, 30.0]), suspended=True)


@action(0.7, of_server=True)
def set_clock(cluster: Cluster) -> None:
    """The wall clock of the service's host is set back or forward by up to hours."""
    cluster.set_clock(cluster.chance.choice([-1.0, 1.0]) * cluster.chance.uniform(600.0, 20_000.0))


@action(1.0)
def pause_server_at_a_failure(cluster: Cluster) -> None:
    """The service is paused after the report of a failure, before the reports of those that follow."""
    cluster.ambush = cluster.chance.choice([3.0, 12.0])
    cluster.note("ambush", cluster.ambush)


@action(1.0, of_server=True)
def drain_server(cluster: Cluster) -> None:
    """The service is drained."""
    if cluster.server is not None:
        cluster.note("drain", cluster.server.process.name)
        cluster.server.drain()


@action(1.0, of_server=True)
def change_disk(cluster: Cluster) -> None:
    """The disk becomes slow, or fast again, or full."""
    disk = cluster.disk
    disk.latency = cluster.chance.choice([0.0005, 0.005, 0.1, 2.0])
    disk.failing = cluster.chance.choice([0.0, 0.0, 0.2])
    cluster.note("disk", disk.latency, disk.failing)


# ---- operators


@action(0.7)
def restart_run(cluster: Cluster) -> None:
    """An operator restarts all workers."""
    cluster.note("restart")
    cluster.operator.restart_run()


@action(0.7)
def evict_node(cluster: Cluster) -> None:
    """An operator evicts a node, which may not be in the run."""
    node_id = cluster.chance.choice(cluster.plan.node_ids)
    cluster.note("evict", node_id)
    cluster.operator.evict_node(node_id)


@action(0.7)
def readmit_node(cluster: Cluster) -> None:
    """An operator readmits a node, which may not be evicted."""
    node_id = cluster.chance.choice(cluster.plan.node_ids)
    cluster.note("readmit", node_id)
    cluster.operator.readmit_node(node_id)
    _start(cluster, node_id)


@action(0.1)
def close_run(cluster: Cluster) -> None:
    """An operator closes the run."""
    cluster.note("close")
    cluster.operator.close_run()
