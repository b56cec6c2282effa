"""The results of random faults, in figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ha.check import counts
from ha.findings import Finding
from ha.history import Admission, History, Operation, Outcome, Told
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

# Least activity per minute of a meaningful run: a tenth of the activity on two cores.
_OPERATIONS = 300
_TAKEOVERS = 0.5
_ROUNDS = 1.0


@dataclass(slots=True)
class Report:
    """The results of a run.

    Attributes:
        seconds: Duration of the faults.
        operations: Number of operations by outcome.
        kinds: Number of operations by kind and outcome.
        faults: Number of times that each fault occurred.
        takeovers: Number of times that a run's shard moved to another replica.
        rounds: Number of FINAL rounds reported to nodes, over all runs.
        admissions: Number of leases that nodes got (False), and resumed (True).
        events: Number of facts that were read back, of all runs.
        recovered: Seconds from the last repair until everything was answered.
        findings: The violations.
        complaints: The errors that replicas logged.
    """

    seconds: float = 0.0
    operations: Counter[Outcome] = field(default_factory=Counter)
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    takeovers: int = 0
    rounds: int = 0
    admissions: Counter[bool] = field(default_factory=Counter)
    events: int = 0
    recovered: float = 0.0
    findings: Sequence[Finding] = ()
    complaints: Sequence[str] = ()

    def idle(self) -> list[str]:
        """Return the figures that are so low that the absence of findings proves nothing."""
        minutes = self.seconds / 60
        wanted = {
            "operations that succeeded": (self.operations[Outcome.OK], _OPERATIONS),
            "takeovers": (self.takeovers, _TAKEOVERS),
            "FINAL rounds": (self.rounds, _ROUNDS),
        }
        return [
            f"{count} {what}, at least {minutes * least:.0f} expected"
            for what, (count, least) in wanted.items()
            if count < minutes * least
        ]

    def __str__(self) -> str:
        """Return a summary for people."""
        faults = ", ".join(f"{count} {name}" for name, count in sorted(self.faults.items()))
        return (
            f"{self.seconds / 60:.1f} min of trouble: {sum(self.faults.values())} faults ({faults}); operations: "
            f"{self.operations[Outcome.OK]} ok, {self.operations[Outcome.REFUSED]} refused, "
            f"{self.operations[Outcome.UNKNOWN]} of unknown outcome; {self.takeovers} takeovers, "
            f"{self.rounds} FINAL rounds, {self.admissions[False]} leases given, {self.admissions[True]} resumed, "
            f"{self.events} events; all answered {self.recovered:.1f} s after the last repair; "
            f"{len(self.findings)} findings"
        )

    def count(self, history: History) -> None:
        """Compute the figures of a history."""
        self.operations = Counter(each.outcome for each in history.of(Operation))
        self.kinds = counts(history)
        self.admissions = Counter(each.resumed for each in history.of(Admission))
        final = pb.Phase.Name(pb.PHASE_FINAL)
        self.rounds = len(
            {
                (each.run_id, each.update["assignment"]["round"])
                for each in history.of(Told)
                if each.update.get("phase") == final and "assignment" in each.update
            }
        )
