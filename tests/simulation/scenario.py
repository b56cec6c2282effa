"""Run a seed, from the first start of a service to the end of the last node, with the referee's checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rallypoint.rendezvous.core.state import Outcome
from rallypoint.rendezvous.runs import run
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rendezvous.core.ledger import Violation
from simulation import faults
from simulation.cluster import Cluster
from simulation.plan import RUN, SHORT_TTL, Plan, draw_plan
from simulation.seeds import Scenario

# Virtual seconds that nodes may take to agree after the faults: the sum of the longest timeouts of a plan (a lease of
# 15 s, a departure and a confirmation of 20 s each, a keep-alive of 30 s, a restart delayed by 30 s), and a margin.
AGREE_WITHIN = 210.0
# Seconds until the first round of a cluster without faults runs, and until the last node has left a closed run.
FORM_WITHIN = 60.0
END_WITHIN = 90.0


class ClusterScenario(Scenario):
    """A rendezvous service and its nodes."""

    target = "simulate"
    draw: Callable[[int], Plan] = staticmethod(draw_plan)
    plan: Plan

    def __init__(self, seed: int) -> None:
        self.plan = self.draw(seed)
        self.cluster = self.world = self.build()

    def build(self) -> Cluster:
        """Build the cluster of the plan."""
        return Cluster(self.plan)

    @property
    def actions(self) -> dict[str, tuple[faults.Action, float, bool]]:
        """The faults, by name."""
        return faults.ACTIONS

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Write checkpoints often enough for a short simulation; the product's number is for runs of days."""
        before = run._RECORDS_PER_CHECKPOINT
        run._RECORDS_PER_CHECKPOINT = self.plan.records_per_checkpoint
        try:
            yield
        finally:
            run._RECORDS_PER_CHECKPOINT = before

    def _play(self) -> None:
        cluster, plan = self.cluster, self.plan
        for node_id in plan.node_ids:
            cluster.clockwork.after(cluster.chance.expovariate(1.0), cluster.start_node, node_id)
        cluster.clockwork.after(1e-3, lambda: None)
        if plan.server_only:
            self._await("a cluster without trouble forms a round", FORM_WITHIN)
            cluster.referee.undisturbed = True
        weights = faults.draw_actions(cluster.chance, self.actions, of_server_only=plan.server_only)
        self._cause_trouble(self.actions, weights)
        self._let_pass(plan.trouble)
        cluster.calm_down()
        self._await("after faults stop, all live nodes agree on one FINAL round", AGREE_WITHIN)
        self._finale()

    def _finale(self) -> None:
        cluster = self.cluster
        if cluster.over or self.plan.finale == "nothing":
            return
        cluster.referee.undisturbed = False
        cluster.note("finale", self.plan.finale)
        ledger = cluster.referee.ledger(RUN)
        lives = len(ledger.incarnations)
        if self.plan.finale == "close":
            cluster.operator.close_run()
        else:
            cluster.around.fates.finishing = True
            for node in cluster.alive:
                if node.crew is not None:
                    node.crew.succeed()
        if self.plan.requeue == "at once":
            self._until("a run ends when it is to", END_WITHIN, lambda: cluster.over)
            self._requeue()
            return

        def reopened() -> bool:
            """Return True if a node that was started just before the close joined after it."""
            return len(ledger.incarnations) > lives

        ended = "a run that is over ends for all its nodes"
        self._until(ended, END_WITHIN, lambda: cluster.settled() and (cluster.over or reopened()))
        if reopened():
            return
        if self.plan.limits.run_ttl == SHORT_TTL:
            self._encore()
        elif self.plan.requeue == "late":
            self._requeue()

    def _requeue(self) -> None:
        """Start the job again under the name of the closed run: it runs again, or it is refused."""
        cluster, ledger = self.cluster, self.cluster.referee.ledger(RUN)
        reopens = self.plan.settings.reopen != pb.REOPEN_NEVER and (
            ledger.closed is not Outcome.SUCCEEDED or self.plan.settings.reopen == pb.REOPEN_ALWAYS
        )
        lives = len(ledger.incarnations)
        cluster.note("requeue", self.plan.requeue)
        cluster.around.fates.finishing = False
        for node_id in self.plan.node_ids:
            cluster.start_node(node_id)
        if not reopens:
            self._await("who comes to a run that stays closed is refused", END_WITHIN, closed=True)
            return
        # A join may time out before the nodes of the closed run have gone: a scheduler tries again.
        cluster.requeued = True
        again = "a job that is requeued runs again"
        self._until(again, AGREE_WITHIN, lambda: cluster.settled() and not cluster.over)
        if len(ledger.incarnations) == lives:
            raise Violation("a run that is opened again is a new incarnation of it")

    def _encore(self) -> None:
        """Create a forgotten run again under its name; its numbers continue."""
        cluster = self.cluster
        self._let_run_expire()
        if not cluster.referee.ledger(RUN).forgotten:
            raise Violation("a run without nodes is forgotten in its time")
        cluster.note("encore")
        cluster.around.fates.finishing = False
        for node_id in self.plan.node_ids:
            cluster.start_node(node_id)
        self._await("a run that comes again forms a round", FORM_WITHIN)

    def _let_run_expire(self) -> None:
        self._let_pass(1.5 * SHORT_TTL)

    def _await(self, invariant: str, seconds: float, *, closed: bool = False) -> None:
        cluster = self.cluster
        self._until(invariant, seconds, lambda: cluster.settled() and (cluster.over or not closed))

    def _until(self, invariant: str, seconds: float, done: Callable[[], bool]) -> None:
        cluster = self.cluster
        clockwork = cluster.clockwork
        if not clockwork.run(clockwork.now + seconds, done, cluster.referee.check):
            raise Violation(f"{invariant} within {seconds:g} s")
