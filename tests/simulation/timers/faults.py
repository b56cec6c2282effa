"""The faults of a scene. Each action is a function of the scene; a seed has about half of them."""

from __future__ import annotations

import random
from collections.abc import Callable

from simulation.timers.host import RUN, Host
from simulation.timers.scene import Scene

Action = Callable[[Scene], None]
ACTIONS: dict[str, tuple[Action, float]] = {}


def action(weight: float) -> Callable[[Action], Action]:
    """Register a function as an action, with a weight."""

    def register(function: Action) -> Action:
        ACTIONS[function.__name__] = (function, weight)
        return function

    return register


def draw_actions(chance: random.Random) -> dict[str, float]:
    """Return the actions of a seed and their weights: about half of them, so that rare combinations occur."""
    chosen = {name: weight * chance.uniform(0.2, 2.0) for name, (_, weight) in ACTIONS.items()}
    return {name: weight for name, weight in chosen.items() if chance.random() < 0.5} or chosen


def _host(scene: Scene) -> Host | None:
    return scene.chance.choice(scene.alive) if scene.alive else None


@action(2.0)
def kill_service(scene: Scene) -> None:
    """The service is killed, and loses its state."""
    scene.end_service(silently=scene.chance.random() < 0.2)


@action(1.0)
def drain_service(scene: Scene) -> None:
    """The service is drained, and another one starts."""
    if scene.service is not None:
        scene.note("drain", scene.service.process.name)
        for host in scene.hosts:
            host.registered_at = None
        service = scene.service
        service.process.call_soon(service.drain)


@action(2.0)
def pause_service(scene: Scene) -> None:
    """The service is paused."""
    scene.pause_service(scene.chance.choice([0.05, 0.3, 1.0, 4.0, 12.0]))


@action(1.5)
def pause_agent(scene: Scene) -> None:
    """An agent is paused, and its workers run on."""
    if host := _host(scene):
        scene.stop_agent(host, scene.chance.choice([0.05, 0.3, 1.0, 4.0]))


@action(1.5)
def pause_host(scene: Scene) -> None:
    """An agent is paused with its workers."""
    if host := _host(scene):
        scene.stop_host(host, scene.chance.choice([0.3, 0.6, 2.0, 8.0]))


@action(0.7)
def pause_everything(scene: Scene) -> None:
    """A machine with the service, all agents and all workers is paused."""
    seconds = scene.chance.choice([0.6, 2.0, 8.0])
    scene.pause_service(seconds)
    for host in scene.alive:
        scene.stop_host(host, seconds)


@action(0.7)
def stop_worker(scene: Scene) -> None:
    """A process of a worker is stopped: that counts as a hang."""
    if (host := _host(scene)) and host.programs and not host.stillness.standing:
        process = scene.chance.choice(host.programs).process
        if process.alive and not process.paused:
            scene.note("stop worker", process.name)
            process.pause()
            scene.clockwork.after(scene.chance.choice([0.3, 3.0]), _let_go, host, process)


def _let_go(host: Host, process: object) -> None:
    for program in host.programs:
        if program.process is process and process.paused and not host.stillness.standing:
            program.process.resume()


@action(1.5)
def block_link(scene: Scene) -> None:
    """The network drops everything, for longer or shorter than a keep-alive takes."""
    up, down = scene.chance.choice([(True, True), (True, False), (False, True)])
    link = scene.chance.choice(scene.links)
    scene.block(link, up=up, down=down, seconds=scene.chance.choice([0.3, 2.0, 20.0]))


@action(1.5)
def cut_off(scene: Scene) -> None:
    """Connections break, and new ones fail for a while."""
    link = scene.chance.choice(scene.links)
    if link.whole:
        scene.reset(link)
        scene.block(link, up=True, down=True, seconds=scene.chance.choice([0.5, 3.0]))


@action(1.0)
def save_learned(scene: Scene) -> None:
    """The learned timeouts of runs are saved for the next service."""
    if scene.service is not None and not scene.service.process.paused:
        scene.save_learned(scene.service)


@action(0.5)
def forget_scopes(scene: Scene) -> None:
    """An operator makes the run forget its learned timeouts."""
    if scene.service is not None:
        scene.note("forget", scene.service.process.name)
        scene.service.process.call_soon(scene.service.watchdog.forget_scopes, RUN, "")


@action(2.0)
def reset_link(scene: Scene) -> None:
    """Connections break."""
    scene.reset(scene.chance.choice(scene.links))


@action(0.5)
def crash_agent(scene: Scene) -> None:
    """An agent dies with its workers."""
    if host := _host(scene):
        scene.crash_host(host, silently=scene.chance.random() < 0.3)


@action(0.7)
def renew_lease(scene: Scene) -> None:
    """A node gets a new lease from the rendezvous service."""
    if (host := _host(scene)) and not host.process.paused:
        scene.note("renew", host.process.name)
        host.renew(host.lease + 1, host.incarnation)


@action(0.4)
def begin_new_incarnation(scene: Scene) -> None:
    """The rendezvous service has lost its state: its run begins again, with leases from the first number on."""
    if not any(host.process.paused for host in scene.alive):
        scene.begin_new_incarnation()


@action(0.4)
def second_job(scene: Scene) -> None:
    """Another job with the run's name starts on a host, while the agent of the previous one still runs."""
    if (host := _host(scene)) and not host.process.paused:
        scene.second_job(host)


@action(0.4)
def lose_lease(scene: Scene) -> None:
    """Another agent has a node's lease for a moment, so the node's own is refused until it has joined again."""
    service = scene.service
    if service is None or not (host := _host(scene)) or host.process.paused:
        return
    scene.note("lose lease", host.process.name)
    host.lease, host.registered_at = host.lease + 1, None
    service.process.call_soon(service.intrude, RUN, host.name, host.lease, host.incarnation)
    scene.clockwork.after(scene.chance.choice([0.1, 1.0, 3.0]), _join_again, host)


def _join_again(host: Host) -> None:
    if host.process.alive and not host.over:
        host.renew(host.lease + 1, host.incarnation)


@action(0.3)
def stall_first_message(scene: Scene) -> None:
    """The network drops the first message of an agent's next call, for longer than the service waits for it."""
    if scene.service is not None and (host := _host(scene)) and host.link.whole:
        scene.note("stall opening", host.name)
        scene.service.when_called(host.link, lambda: scene.stall(host.link, 12.0))
        scene.reset(host.link)


@action(0.4)
def stumble(scene: Scene) -> None:
    """An agent is paused, and soon after it its whole host."""
    if (host := _host(scene)) and not host.process.paused:
        first, between = scene.chance.choice([0.6, 1.0]), scene.chance.uniform(0.0, 0.3)
        scene.stop_agent(host, first)
        scene.clockwork.after(first + between, _stop, scene, host, scene.chance.choice([0.6, 2.0, 5.0]))


def _stop(scene: Scene, host: Host, seconds: float) -> None:
    if not scene.calm:
        scene.stop_host(host, seconds)


@action(1.0)
def cut_line(scene: Scene) -> None:
    """A worker's process loses the connection to its agent, and reconnects."""
    if (host := _host(scene)) and host.programs:
        program = scene.chance.choice(host.programs)
        scene.note("cut", program.process.name)
        program.cut(scene.chance.choice([0.001, 0.2, 1.0]))


@action(0.7)
def kill_worker(scene: Scene) -> None:
    """A worker dies by itself."""
    if (host := _host(scene)) and host.workers:
        host.lose_worker(scene.chance.choice(list(host.workers.values())))


@action(1.0)
def fork_worker(scene: Scene) -> None:
    """A worker forks a process with its own timers."""
    if (host := _host(scene)) and host.workers:
        host.fork(scene.chance.choice(list(host.workers.values())))


@action(0.7)
def end_child(scene: Scene) -> None:
    """A forked process dies."""
    if host := _host(scene):
        children = [
            program for program in host.programs if program is not host.workers[program.worker_id].programs[0]
        ]
        if children:
            scene.chance.choice(children).die()
