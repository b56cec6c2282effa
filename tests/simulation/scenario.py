"""A seed, played from the first start of a service to the last node's rest, under the eyes of the referee."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rallypoint.rendezvous.runs import run
from rendezvous.core.ledger import Violation
from simulation import faults
from simulation.clockwork import Stuck
from simulation.cluster import Cluster
from simulation.plan import RUN, SHORT_TTL, Plan, draw_plan
from simulation.seeds import Failed, fingerprint, quiet, report, shown

__all__ = ["Failed", "Scenario", "fingerprint", "play", "replay", "shown"]

# Virtual seconds that nodes may take to agree once there is no more trouble: the longest terms of a plan (a lease of
# 15 s, a departure and a confirmation of 20 s each, a keep-alive of 30 s, a restart held back for 30 s) one after the
# other, and some.
AGREE_WITHIN = 210.0
# Until the first round of a cluster without any trouble runs, and until the last node has gone from a closed run.
FORM_WITHIN = 60.0
END_WITHIN = 90.0


class Scenario:
    """One seed; `play` it once."""

    # Of make, that plays such seeds; and what draws their plans.
    target = "simulate"
    draw: Callable[[int], Plan] = staticmethod(draw_plan)

    def __init__(self, seed: int) -> None:
        self.plan: Plan = self.draw(seed)
        self.cluster = self.build()

    def build(self) -> Cluster:
        """The cluster of the plan."""
        return Cluster(self.plan)

    @property
    def actions(self) -> dict[str, tuple[faults.Action, float, bool]]:
        """What may befall it, by name."""
        return faults.ACTIONS

    def play(self) -> Cluster:
        """Play it to the end.

        Raises:
            Failed: An invariant is broken.
        """
        cluster = self.cluster
        with quiet():
            try:
                with _checkpoints(self.plan.records_per_checkpoint):
                    self._play()
            except (Violation, Stuck) as error:
                raise Failed(report(error, cluster, self.plan, self.target)) from error
            finally:
                cluster.dispose()
        return cluster

    def _play(self) -> None:
        cluster, plan = self.cluster, self.plan
        for node_id in plan.node_ids:
            cluster.clockwork.after(cluster.chance.expovariate(1.0), cluster.start_node, node_id)
        cluster.clockwork.after(1e-3, lambda: None)
        if plan.server_only:
            self._await("a cluster without trouble forms a round", FORM_WITHIN)
            cluster.referee.undisturbed = True
        weights = faults.draw_actions(cluster.chance, self.actions, of_server_only=plan.server_only)
        cluster.note("actions", weights)
        self._trouble(weights)
        self._let_pass(plan.trouble)
        cluster.calm_down()
        self._await("after faults stop, all live nodes agree on one FINAL round", AGREE_WITHIN)
        self._finale()

    def _trouble(self, weights: dict[str, float]) -> None:
        cluster = self.cluster

        def strike() -> None:
            if cluster.calm:
                return
            if self._waits_its_turn():
                cluster.clockwork.after(1.0, strike)
                return
            name = cluster.chance.choices(list(weights), list(weights.values()))[0]
            cluster.struck.add(name)
            self.actions[name][0](cluster)
            cluster.clockwork.after(cluster.chance.expovariate(1 / self.plan.pause), strike)

        cluster.clockwork.after(cluster.chance.expovariate(1 / self.plan.pause), strike)

    def _waits_its_turn(self) -> bool:
        """Whether the next thing comes after what there is."""
        return False

    def _finale(self) -> None:
        cluster = self.cluster
        if cluster.over or self.plan.finale == "nothing":
            return
        cluster.referee.undisturbed = False
        cluster.note("finale", self.plan.finale)
        if self.plan.finale == "close":
            cluster.operator.close_run()
        else:
            cluster.around.fates.finishing = True
            for node in cluster.alive:
                if node.crew is not None:
                    node.crew.succeed()
        self._await("a run that is over ends for all its nodes", END_WITHIN, closed=True)
        if self.plan.limits.run_ttl == SHORT_TTL:
            self._encore()

    def _encore(self) -> None:
        """A run that was forgotten comes again under its name, with its numbers going on."""
        cluster = self.cluster
        self._let_pass(1.5 * SHORT_TTL)
        if not cluster.referee.ledger(RUN).forgotten:
            raise Violation("a run without nodes is forgotten in its time")
        cluster.note("encore")
        cluster.around.fates.finishing = False
        for node_id in self.plan.node_ids:
            cluster.start_node(node_id)
        self._await("a run that comes again forms a round", FORM_WITHIN)

    def _let_pass(self, seconds: float) -> None:
        clockwork = self.cluster.clockwork
        clockwork.run(clockwork.now + seconds, lambda: False, self.cluster.referee.check)

    def _await(self, invariant: str, seconds: float, *, closed: bool = False) -> None:
        cluster = self.cluster

        def done() -> bool:
            return cluster.settled() and (cluster.over or not closed)

        clockwork = cluster.clockwork
        if not clockwork.run(clockwork.now + seconds, done, cluster.referee.check):
            raise Violation(f"{invariant} within {seconds:g} s")


def play(seed: int) -> Cluster:
    """Play a seed.

    Raises:
        Failed: It breaks an invariant.
    """
    return Scenario(seed).play()


def replay(seed: int) -> tuple[list[str], str]:
    """Play a seed; returns all that happened, and what came of it: empty if no invariant was broken."""
    return replay_of(Scenario(seed))


def replay_of(scenario: Scenario) -> tuple[list[str], str]:
    """Play a scenario; returns as `replay` does."""
    verdict = ""
    try:
        scenario.play()
    except Failed as failure:
        verdict = str(failure).splitlines()[0]
    return [*shown(scenario.cluster), scenario.plan.describe()], verdict


@contextmanager
def _checkpoints(records: int) -> Iterator[None]:
    """Checkpoints so often that a short life sees some; the product's own number is for runs of days."""
    before = run._RECORDS_PER_CHECKPOINT
    run._RECORDS_PER_CHECKPOINT = records
    try:
        yield
    finally:
        run._RECORDS_PER_CHECKPOINT = before
