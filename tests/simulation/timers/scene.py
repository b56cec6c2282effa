"""All parts of one seed: a timer service, agents with their workers, the network between them, and their faults."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rallypoint.timer.core.values import Learned
from simulation.clockwork import Clockwork, Process
from simulation.network import Link, Network
from simulation.timers.host import Host, resume
from simulation.timers.plan import Plan
from simulation.timers.referee import DRIFT, Referee
from simulation.timers.service import Service
from simulation.timers.sockets import ReadingProcess

# Limit of the starts of agents in one seed.
_MOST_LIVES = 12
# Seconds between two incarnations of a run, as long as a process takes to start: the ages of two leases do not show
# which is newer if they differ by less than the latency of messages.
_APART = 1.0


class Scene:
    """All parts of one seed's simulation; `trace` lists the events."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.chance = self._stream("faults")
        self.clockwork = Clockwork(self._stream("ties"))
        self._over = False
        self.trace: list[tuple[float, str, tuple[Any, ...]]] = []
        self.referee = Referee(plan.settings, self.note, self.clockwork.at, lambda: self.clockwork.now)
        self.network = Network(self.clockwork, self._stream("network"))
        self.service: Service | None = None
        self.hosts: list[Host] = []
        self.links: list[Link] = []
        self.calm = False
        self.struck: set[str] = set()
        # Total seconds of pauses that a watch clock leaves out.
        self.forgivable = 0.0
        self._processes: list[Process] = []
        self._clocks = self._stream("clocks")
        self._services = 0
        self._saved: list[tuple[str, Learned]] = []
        self._lives = 0
        # Number of incarnations of the run; by node, the newest incarnation in which it was, and the next lease there.
        self._incarnations = 1
        self._new_incarnation_at = 0.0
        self._leases: dict[str, tuple[str, int]] = {}
        # Links that are not healed before the end of their stall.
        self._stalled: set[str] = set()
        # Agents that still run after the end of their job.
        self._lingering: list[Host] = []
        self._temper = replace(plan.temper)
        self.start_service()
        for number in range(1, plan.hosts + 1):
            link = Link(f"node{number}", plan.latency)
            self.links.append(link)
            self.start_host(link)

    def _stream(self, purpose: str) -> random.Random:
        return random.Random(f"{self.plan.seed}/{purpose}")

    def note(self, what: str, *details: Any) -> None:
        """Add an entry to the trace."""
        if not self._over:
            self.trace.append((self.clockwork.now, what, details))

    def _machine(self) -> Callable[[str], ReadingProcess]:
        """Return a function that starts processes with one clock."""
        rate, offset = self._clocks.uniform(1 - DRIFT, 1 + DRIFT), self._clocks.uniform(10.0, 1e6)

        def start(name: str) -> ReadingProcess:
            process = ReadingProcess(self.clockwork, name, self.referee.unforeseen, rate=rate, offset=offset)
            self._processes.append(process)
            return process

        return start

    # ---- the service

    def start_service(self) -> None:
        """Start a service with no state, unless one runs."""
        if self.service is not None:
            return
        self._services += 1
        process = self._machine()(f"service{self._services}")
        self.note("start", process.name)
        self.service = Service(
            process,
            self.referee,
            self.plan.settings,
            on_ready=self._serves,
            on_exit=lambda service: self.end_service(silently=False),
        )

    def _serves(self, service: Service) -> None:
        table, now = service.watchdog.table, service.watchdog.now()
        for run_id, learned in self._saved:
            table.restore(run_id, learned, now)
        self.network.listener = service

    def save_learned(self, service: Service) -> None:
        """Save the learned timeouts for the next service."""
        self._saved = list(service.watchdog.table.all_learned())
        self.note("save", *self._saved)

    def end_service(self, *, silently: bool) -> None:
        """End the service's process, with its state, and start the next one soon."""
        service, self.service = self.service, None
        if service is None:
            return
        self.note("end", service.process.name)
        service.process.kill()
        self.network.listener = None
        self.network.died(service.process, silently=silently)
        for host in self.hosts:
            host.registered_at = None
        self._shake()
        self.clockwork.after(self.chance.choice([0.02, 0.5, 3.0]), self.start_service)

    def pause_service(self, seconds: float) -> None:
        """Pause the service for `seconds`."""
        service = self.service
        if service is None or service.process.paused:
            return
        self.note("pause", service.process.name, round(seconds, 2))
        self.forgivable += seconds + 1.0
        service.process.pause()
        self._shake()
        self.network.paused(service.process)
        self.clockwork.after(seconds, self._resume_service, service)

    def _resume_service(self, service: Service) -> None:
        if service.process.paused:
            self.note("resume", service.process.name)
            resume(service.process, self.chance.random() < 0.5)
        self._shake()

    # ---- hosts

    @property
    def alive(self) -> list[Host]:
        """Hosts whose agent is alive."""
        return [host for host in self.hosts if host.process.alive]

    def start_host(self, link: Link) -> None:
        """Start an agent with its workers; it has a new lease of the last incarnation that its node was in."""
        if self._lives >= _MOST_LIVES and not self.calm:
            return
        self._lives += 1
        incarnation, lease = self._leases.get(link.name, ("run 1", 10))
        for former in self.hosts:
            if (former.name, former.incarnation) == (link.name, incarnation):
                lease = max(lease, former.lease + 1)
        self._leases[link.name] = incarnation, lease + 10
        host = Host(
            self.clockwork,
            self.network,
            self.referee,
            self._stream(f"host{self._lives}"),
            link,
            name=link.name,
            life=self._lives,
            lease=lease,
            incarnation=incarnation,
            new_process=self._machine(),
            temper=self._temper,
            reaping=self.plan.reaping,
        )
        self.note("start", host.process.name)
        self.hosts = [each for each in self.hosts if each.name != host.name] + [host]
        host.rival = next((each for each in self._lingering if each.name == host.name), None)
        self.referee.hosts[host.name] = host
        self._shake()
        for _ in range(self.plan.workers):
            host.start_worker()

    def crash_host(self, host: Host, *, silently: bool) -> None:
        """Kill an agent with its workers, or its whole host; another agent starts soon."""
        self.note("crash", host.process.name)
        if host.stillness.standing:
            host.stillness.end(self.clockwork.now)
        host.crash()
        self.network.died(host.process, silently=silently)
        self.clockwork.after(self.chance.choice([0.1, 1.0, 4.0]), self.start_host, host.link)

    def begin_new_incarnation(self) -> None:
        """Make all nodes join a new incarnation of the run."""
        if self.clockwork.now < self._new_incarnation_at + _APART:
            return
        self._incarnations += 1
        self._new_incarnation_at = self.clockwork.now
        self.note("begin anew", self._incarnations)
        for lease, host in enumerate(self.alive, start=2):
            self._leases[host.name] = f"run {self._incarnations}", lease + 10
            host.renew(lease, f"run {self._incarnations}")

    def second_job(self, host: Host) -> None:
        """Start another agent on a host, in a new incarnation of the run; the previous agent still runs."""
        if self._lives >= _MOST_LIVES or self.clockwork.now < self._new_incarnation_at + _APART:
            return
        self._incarnations += 1
        self._new_incarnation_at = self.clockwork.now
        self.note("second job", host.process.name)
        self._leases[host.name] = f"run {self._incarnations}", 2
        host.outlive_its_job()
        self._lingering.append(host)
        self.clockwork.after(self.chance.choice([0.2, 2.0, 8.0]), self._end_job, host)
        self.start_host(host.link)

    def _end_job(self, host: Host) -> None:
        if host in self._lingering:
            self.note("end", host.process.name)
            self._lingering.remove(host)
            host.crash()
            self.network.died(host.process, silently=False)

    def stop_agent(self, host: Host, seconds: float) -> None:
        """Pause an agent for `seconds`; its workers run on."""
        if host.process.paused or not host.process.alive:
            return
        self.note("stop agent", host.process.name, round(seconds, 2))
        self.forgivable += seconds + 1.0
        host.process.pause()
        self._shake()
        self.network.paused(host.process)
        self.clockwork.after(seconds, self._go_on, host)

    def stop_host(self, host: Host, seconds: float) -> None:
        """Pause an agent and its workers for `seconds`."""
        if host.process.paused or not host.process.alive:
            return
        self.note("stop host", host.process.name, round(seconds, 2))
        self.forgivable += seconds + 1.0
        host.stop()
        self._shake()
        self.network.paused(host.process)
        self.clockwork.after(seconds, self._go_on, host)

    def _go_on(self, host: Host) -> None:
        if host.process.paused:
            self.note("go on", host.process.name)
            messages_first = self.chance.random() < 0.5
            if host.stillness.standing:
                host.go_on(messages_first)
            else:
                resume(host.process, messages_first)
        self._shake()

    def block(self, link: Link, *, up: bool, down: bool, seconds: float) -> None:
        """Drop all traffic on a link for `seconds`."""
        if not link.whole:
            return
        self.note("block", link.name, f"up={up} down={down}", round(seconds, 2))
        self.network.block(link, up=up, down=down)
        self._unsettle(link)
        self._shake()
        self.clockwork.after(seconds, self.heal, link)

    def stall(self, link: Link, seconds: float) -> None:
        """Drop client messages on a link for `seconds`; no other fault ends it early."""
        if link.whole and not self.calm:
            self.forgivable += seconds
            self._stalled.add(link.name)
            self.block(link, up=True, down=False, seconds=seconds)
            self.clockwork.after(seconds, self._unstall, link)

    def _unstall(self, link: Link) -> None:
        self._stalled.discard(link.name)
        self.heal(link)

    def heal(self, link: Link) -> None:
        """Let a link work again, unless it is stalled."""
        if not link.whole and link.name not in self._stalled:
            self.note("heal", link.name)
            self.network.heal(link)
            # Messages in flight arrive now, late.
            self._shake()

    def reset(self, link: Link) -> None:
        """Break all connections of a link."""
        self.note("reset", link.name)
        self.network.reset(link)
        self._unsettle(link)

    def _unsettle(self, link: Link) -> None:
        for host in self.hosts:
            if host.link is link:
                host.registered_at = None

    def _shake(self) -> None:
        """Note which hosts are affected by a pause or fault: their workers need not be reaped promptly."""
        service = self.service
        for host in self.hosts:
            still = host.process.paused or not host.link.whole or (service and service.process.paused)
            if still:
                host.shaken_at = math.inf
            elif host.shaken_at == math.inf:
                host.shaken_at = self.clockwork.now

    # ---- the end of all faults

    def calm_down(self) -> None:
        """End all faults: repair everything that is broken; from now on no further worker hangs."""
        self.note("calm")
        self.calm = True
        self._temper.steady = True
        for link in self.links:
            self.heal(link)
        for host in list(self._lingering):
            self._end_job(host)
        for host in self.alive:
            self._go_on(host)
            for program in host.programs:
                if program.process.paused:
                    program.process.resume()
        if self.service is not None:
            self._resume_service(self.service)
        self.start_service()
        for link in self.links:
            if not any(host.link is link and host.process.alive for host in self.hosts):
                self.start_host(link)

    def finish(self) -> None:
        """From now on workers enter no scope."""
        self.note("finish")
        self._temper.finishing = True

    def settled(self) -> bool:
        """Return True if every agent is watched, and no worker is in a scope that must end or must be reaped."""
        service = self.service
        return service is not None and not self.unwatched and not self.referee.owed(service.ripe)

    @property
    def unwatched(self) -> list[str]:
        """Agents whose timers the service does not watch, with the reason."""
        watched = self.service.watched if self.service is not None else set()
        return [
            f"{host.process.name}: {host.client.trouble}"
            for host in self.alive
            if host.client.trouble or (host.name, host.incarnation, host.lease) not in watched
        ]

    def dispose(self) -> None:
        """End all processes."""
        self._over = True
        self.clockwork.unwind(self._processes)
