"""What came of random trouble, in figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ha.check import counts
from ha.findings import Finding
from ha.history import Admission, History, Operation, Outcome, Told
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

# What must have happened in a run that says something, by the minute. A tenth of what does on two cores.
_OPERATIONS = 300
_TAKEOVERS = 0.5
_ROUNDS = 1.0


@dataclass(slots=True)
class Report:
    """What came of a run.

    Attributes:
        seconds: How long the trouble lasted.
        operations: How many operations had which outcome.
        kinds: The same by kind.
        faults: How often each fault was played.
        takeovers: How often a run's shard came to another replica.
        rounds: FINAL rounds that nodes were told of, over all runs.
        admissions: Leases that nodes were given (False), and that they took up again (True).
        events: Facts of all runs that were read back.
        recovered: How long after the last repair everything had been answered, seconds.
        findings: What is wrong.
        complaints: What replicas logged as an error.
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
        """In what ways hardly anything happened, so that it says nothing that nothing was found."""
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
        """Of it, what people want to know."""
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
        """Take the figures out of a history."""
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
