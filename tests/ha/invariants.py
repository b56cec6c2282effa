"""Invariants of all reports about a run, from any replica and under any fault.

The checks use only the reports that clients received and the log of events at the end, so they do not depend on the
product's own code. `journal_rules` checks the journal itself against the rules of the core.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.json_format import ParseDict

from ha.findings import Finding, Wrong
from ha.history import Admission, History, Logged, Operation, Outcome, Told
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

_Update = pb.NodeUpdate | pb.Run
_FORMED = (pb.PHASE_FROZEN, pb.PHASE_FINAL)


def check_invariants(history: History) -> list[Finding]:
    """Return the violations in the reports about the runs of a history."""
    told = [Message(each) for each in history.of(Told)]
    logs = Logs(history.of(Logged))
    found: list[Finding] = list(logs.findings)
    found += _revisions_that_fall(told, history.of(Logged))
    found += leases_given_twice(history.of(Admission))
    for run_id, of_run in _by_run(told).items():
        found += rounds_of_two_memberships(run_id, of_run)
        found += logs.reports_not_durable(run_id, of_run)
    found += reads_of_the_past(history.of(Operation), told)
    found += writes_after_the_end(history.of(Operation), history.of(Admission), told)
    return found


class Message:
    """A recorded report, with its decoded message."""

    __slots__ = ("entry", "update")

    def __init__(self, entry: Told) -> None:
        self.entry = entry
        self.update: _Update = ParseDict(dict(entry.update), pb.NodeUpdate() if entry.node_id else pb.Run())

    def seats(self) -> Iterator[tuple[str, int, pb.Assignment]]:
        """Return the assignments in it, each with its node and lease."""
        if isinstance(self.update, pb.NodeUpdate):
            if self.update.HasField("assignment"):
                yield self.entry.node_id, self.entry.lease, self.update.assignment
            return
        for node in self.update.nodes:
            if node.HasField("assignment"):
                yield node.node_id, node.lease, node.assignment

    @property
    def over(self) -> int:
        """The newest round that it shows to be over; for a closed run, a number above all rounds."""
        if self.update.phase == pb.PHASE_CLOSED:
            return 2**31
        formed = [place.round - 1 for _, _, place in self.seats()]
        if isinstance(self.update, pb.Run) and self.update.phase in _FORMED:
            formed.append(self.update.round - 1)
        return max([self.update.last_round_end.round, *formed])


def _by_run(told: Sequence[Message]) -> dict[str, list[Message]]:
    by_run: dict[str, list[Message]] = defaultdict(list)
    for message in told:
        by_run[message.entry.run_id].append(message)
    return by_run


def _revisions_that_fall(told: Sequence[Message], logged: Iterable[Logged]) -> Iterator[Finding]:
    """Check that the revisions that one subscriber receives never fall, and that it misses no event."""
    last: dict[tuple[str, str], Message] = {}
    for message in told:
        entry = message.entry
        before = last.setdefault((entry.subscriber, entry.run_id), message)
        if message.update.revision < before.update.revision:
            sentence = f"{entry.subscriber} was told revision {before.update.revision}, then {message.update.revision}"
            yield Finding(Wrong.OUT_OF_ORDER, entry.run_id, sentence, (before.entry, entry))
        last[entry.subscriber, entry.run_id] = message
    seen: dict[tuple[str, str], Logged] = {}
    for event in logged:
        if not event.subscriber:
            continue
        earlier = seen.get((event.subscriber, event.run_id))
        if earlier is not None and int(event.event["revision"]) != int(earlier.event["revision"]) + 1:
            sentence = f"{event.subscriber} was told an event that doesn't follow on the one before"
            yield Finding(Wrong.OUT_OF_ORDER, event.run_id, sentence, (earlier, event))
        seen[event.subscriber, event.run_id] = event


def leases_given_twice(admissions: Iterable[Admission]) -> Iterator[Finding]:
    """Check that a lease number is given once, and that a node resumes only its own."""
    given: dict[tuple[str, int], Admission] = {}
    for each in admissions:
        before = given.setdefault((each.run_id, each.lease), each)
        if before is each:
            continue
        if not each.resumed or before.node_id != each.node_id:
            sentence = f"lease {each.lease} was given to {before.subscriber} and to {each.subscriber}"
            yield Finding(Wrong.REUSED, each.run_id, sentence, (before, each))


def rounds_of_two_memberships(run_id: str, told: Sequence[Message]) -> list[Finding]:
    """Check that all reports of a round agree, and that its ranks are 0 … n-1, each of one node."""
    rounds: dict[int, _Round] = {}
    found: list[Finding] = []
    for message in told:
        for node_id, lease, place in message.seats():
            round_ = rounds.setdefault(place.round, _Round(run_id, place, message.entry))
            finding = round_.contradiction(node_id, lease, place, message)
            if finding is not None:
                found.append(finding)
    tokens = [rounds[number].place.fencing_token for number in sorted(rounds)]
    if tokens != sorted(set(tokens)):
        sentence = f"fencing tokens don't grow from round to round: {tokens}"
        found.append(Finding(Wrong.OUT_OF_ORDER, run_id, sentence))
    return found


class _Round:
    """The reports of one round."""

    def __init__(self, run_id: str, place: pb.Assignment, first_entry: Told) -> None:
        self.place = place
        self._run_id = run_id
        self._first_report = first_entry
        self._holders: dict[int, tuple[str, int, int, Told]] = {}
        self._rank_of: dict[str, int] = {}
        self._port = 0

    def contradiction(
        self, node_id: str, lease: int, place: pb.Assignment, message: Message
    ) -> Finding | None:
        """Return a finding if a report contradicts earlier ones."""
        if _common(place) != _common(self.place):
            sentence = f"round {place.round} is told as {_common(self.place)} and as {_common(place)}"
            return Finding(Wrong.REUSED, self._run_id, sentence, (self._first_report, message.entry))
        if not 0 <= place.group_rank < place.group_world_size:
            sentence = f"rank {place.group_rank} of {place.group_world_size} in round {place.round}"
            return Finding(Wrong.RANKS, self._run_id, sentence, (message.entry,))
        holder = (node_id, lease, place.base_rank, message.entry)
        before = self._holders.setdefault(place.group_rank, holder)
        if before[:3] != holder[:3]:
            sentence = f"rank {place.group_rank} of round {place.round} is {before[:3]}'s and {holder[:3]}'s"
            return Finding(Wrong.REUSED, self._run_id, sentence, (before[3], message.entry))
        if self._rank_of.setdefault(node_id, place.group_rank) != place.group_rank:
            other = self._holders[self._rank_of[node_id]]
            sentence = f"{node_id} has two ranks in round {place.round}"
            return Finding(Wrong.RANKS, self._run_id, sentence, (other[3], message.entry))
        if message.update.phase == pb.PHASE_FINAL:
            self._port = self._port or place.master_port
            if self._port != place.master_port:
                sentence = f"round {place.round} is told with two ports"
                return Finding(Wrong.REUSED, self._run_id, sentence, (message.entry,))
        return self._overlap(message) if len(self._holders) == place.group_world_size else None

    def _overlap(self, message: Message) -> Finding | None:
        """Return a finding if the base ranks, all known, repeat, don't begin at 0, or exceed the world size."""
        bases = [self._holders[rank][2] for rank in range(len(self._holders))]
        if len(set(bases)) == len(bases) and min(bases) == 0 and max(bases) < self.place.world_size:
            return None
        sentence = f"workers' ranks of round {self.place.round} begin at {bases}"
        return Finding(Wrong.RANKS, self._run_id, sentence, (message.entry,))


def _common(place: pb.Assignment) -> tuple[int, int, int, str]:
    """Return the fields that are the same for all participants of a round."""
    return place.group_world_size, place.world_size, place.fencing_token, place.master_address


class Logs:
    """The logs of events as they were at the end, and the state of each run at each revision."""

    def __init__(self, logged: Iterable[Logged]) -> None:
        """Fold the events of every run; `findings` has the violations in the logs themselves."""
        self.findings: list[Finding] = []
        self._states: dict[str, list[_State]] = defaultdict(lambda: [_State()])
        events: dict[tuple[str, int], Logged] = {}
        watched: list[Logged] = []
        for each in logged:
            if each.subscriber:
                watched.append(each)
                continue
            states, event = self._states[each.run_id], ParseDict(dict(each.event), pb.Event())
            if event.revision != len(states):
                sentence = f"event {event.revision} comes after {len(states) - 1} events: some are missing"
                self.findings.append(Finding(Wrong.OUT_OF_ORDER, each.run_id, sentence, (each,)))
                states += [states[-1]] * max(0, event.revision - len(states))
            events[each.run_id, event.revision] = each
            after = states[-1].after(event)
            if event.kind == pb.EVENT_KIND_ROUND_FROZEN and event.round <= states[-1].newest:
                sentence = f"round {event.round} was formed after round {states[-1].newest}"
                self.findings.append(Finding(Wrong.REUSED, each.run_id, sentence, (each,)))
            states.append(after)
        for each in watched:
            durable = events.get((each.run_id, int(each.event["revision"])))
            if durable is None or durable.event != each.event:
                sentence = f"{each.subscriber} was told of an event that the log has not, or not so"
                evidence = (each,) if durable is None else (each, durable)
                self.findings.append(Finding(Wrong.NOT_DURABLE, each.run_id, sentence, evidence))

    def reports_not_durable(self, run_id: str, told: Sequence[Message]) -> Iterator[Finding]:
        """Check that every reported state is in the log, with the same values as far as the log has them."""
        states = self._states[run_id]
        for message in told:
            revision = message.update.revision
            if revision >= len(states):
                sentence = f"revision {revision} was told; the log ends at {len(states) - 1}"
                yield Finding(Wrong.NOT_DURABLE, run_id, sentence, (message.entry,))
                continue
            for what, own, durable in states[revision].compared(message):
                if own != durable:
                    sentence = (
                        f"revision {revision} was told with {what} {own!r}, and in the log it is {durable!r}"
                    )
                    yield Finding(Wrong.NOT_DURABLE, run_id, sentence, (message.entry,))


class _State:
    """The state of a run after one of its events, as far as events show it."""

    __slots__ = ("end", "formed", "newest", "outcome", "phase", "size", "token", "world_size")

    def __init__(self) -> None:
        self.phase: int = pb.PHASE_JOINABLE
        self.newest = 0
        self.formed = 0
        self.token = self.size = self.world_size = 0
        self.end = pb.RoundEnd()
        self.outcome: int = pb.OUTCOME_UNSPECIFIED

    def after(self, event: pb.Event) -> _State:
        """Return the state after one more event."""
        state = _State()
        for name in _State.__slots__:
            setattr(state, name, getattr(self, name))
        match event.kind:
            case pb.EVENT_KIND_ROUND_FROZEN:
                state.phase, state.newest, state.formed = pb.PHASE_FROZEN, event.round, event.round
                state.token, state.size, state.world_size = (
                    event.revision,
                    event.group_world_size,
                    event.world_size,
                )
            case pb.EVENT_KIND_ROUND_FINALIZED:
                state.phase = pb.PHASE_FINAL
            case pb.EVENT_KIND_ROUND_ENDED:
                state.phase, state.formed, state.end = pb.PHASE_JOINABLE, 0, event.round_end
            case pb.EVENT_KIND_WORKER_FAILED if event.earliest and event.round == state.end.round:
                # It was the first failure of the round, though another ended it: the end is attributed to it.
                cause, node_id = pb.ROUND_END_CAUSE_WORKER_FAILED, event.failure.node_id
                state.end = pb.RoundEnd(round=event.round, cause=cause, node_id=node_id)
            case pb.EVENT_KIND_RUN_CLOSED:
                state.phase, state.formed, state.outcome = pb.PHASE_CLOSED, 0, event.run_end.outcome
        return state

    def compared(self, message: Message) -> Iterator[tuple[str, Any, Any]]:
        """Return pairs of a reported and a durable value, each with its name."""
        update = message.update
        yield "phase", pb.Phase.Name(update.phase), pb.Phase.Name(pb.Phase.ValueType(self.phase))
        yield "outcome", update.run_end.outcome, self.outcome
        if self.phase != pb.PHASE_CLOSED:
            told, end = update.last_round_end, self.end
            own, durable = (told.round, told.cause, told.node_id), (end.round, end.cause, end.node_id)
            yield "the end of the round before", own, durable
            if end.detail:  # no event has the sentence of a failure that turned out to be the first
                yield "the end of the round before", told.detail, end.detail
        for _, _, place in message.seats():
            yield "round", place.round, self.formed
            yield "fencing token", place.fencing_token, self.token
            yield "nodes", place.group_world_size, self.size
            yield "workers", place.world_size, self.world_size


def reads_of_the_past(operations: Iterable[Operation], told: Sequence[Message]) -> Iterator[Finding]:
    """Check that a read shows no revision older than one known when it began, and that a revision has one state.

    The reply of a "run.get" has "revision", "phase" and "round".
    """
    reads = [each for each in operations if each.what == "run.get" and each.outcome is Outcome.OK]
    shown: dict[tuple[str, int], Operation] = {}
    moments: list[tuple[float, int, Operation | Told, str, int]] = []
    for each in reads:
        revision = each.answered["revision"]
        same = shown.setdefault((each.object, revision), each)
        if same.answered != each.answered:
            yield Finding(
                Wrong.REUSED, each.object, f"revision {revision} was shown as two states", (same, each)
            )
        # At equal times, the begin of a read comes before a known revision: their real order is unknown.
        moments += [(each.began, 0, each, each.object, 0), (each.ended, 1, each, each.object, revision)]
    for message in told:
        moments.append((message.entry.at, 1, message.entry, message.entry.run_id, message.update.revision))
    newest: dict[str, tuple[int, Operation | Told]] = {}
    expected: dict[int, tuple[int, Operation | Told]] = {}
    for _, known, entry, run_id, revision in sorted(moments, key=lambda moment: moment[:2]):
        if not known:
            if run_id in newest:
                expected[id(entry)] = newest[run_id]
        elif run_id not in newest or revision > newest[run_id][0]:
            newest[run_id] = revision, entry
    for each in reads:
        least, first_entry = expected.get(id(each), (0, each))
        if each.answered["revision"] < least:
            sentence = f"revision {least} was known when the read of {each.answered['revision']} began"
            yield Finding(Wrong.STALE, each.object, sentence, (first_entry, each))


def writes_after_the_end(
    operations: Iterable[Operation], admissions: Iterable[Admission], told: Sequence[Message]
) -> Iterator[Finding]:
    """Check that no write is accepted that begins after its round or its lease was known to be over.

    The request of a write to a store has "writer": its run, node, lease and round; 0: it belongs to no round.
    """
    newer: dict[tuple[str, str], list[tuple[float, int, Admission]]] = defaultdict(list)
    for each in admissions:
        newer[each.run_id, each.node_id].append((each.at, each.lease, each))
    ended: dict[str, list[tuple[float, int, Told]]] = defaultdict(list)
    for message in told:
        if message.over:
            ended[message.entry.run_id].append((message.entry.at, message.over, message.entry))
    over = {run_id: _first_of_each(known) for run_id, known in ended.items()}
    for operation in operations:
        writer: Mapping[str, Any] | None = operation.asked.get("writer")
        if writer is None or operation.outcome is not Outcome.OK:
            continue
        run_id, round_, lease = writer["run_id"], writer["round"], writer["lease"]
        for at, newest, entry in over.get(run_id, ()):
            if round_ and at < operation.began and newest >= round_:
                sentence = f"a write of round {round_} was taken, which was known to be over"
                yield Finding(Wrong.UNFENCED, operation.object, sentence, (entry, operation))
                break
        for at, newest, admission in newer[run_id, writer["node_id"]]:
            if at < operation.began and newest > lease:
                sentence = f"a write under lease {lease} was taken, which lease {newest} had superseded"
                yield Finding(Wrong.UNFENCED, operation.object, sentence, (admission, operation))
                break


def _first_of_each(known: Sequence[tuple[float, int, Told]]) -> list[tuple[float, int, Told]]:
    """Return the reports that were the first to show a newer round to be over, by time."""
    first: list[tuple[float, int, Told]] = []
    for each in sorted(known, key=lambda each: each[0]):
        if not first or each[1] > first[-1][1]:
            first.append(each)
    return first
