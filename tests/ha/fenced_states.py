"""Check that the replies about fenced states are linearizable: the tokens form one chain.

Each state is written by one operation, and has its own token; a write names the token that it replaces. So the replies
themselves give the order of the states, and no search is needed: two states on one token are a fork, a state on a token
that was never issued has no predecessor, and every reply has a position on the chain, which must agree with the times
of the request and the reply.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ha.findings import Finding, Wrong
from ha.history import NEVER, Operation, Outcome

SET, GET = "state.set", "state.get"
# A token begins with the number of its state, in hexadecimal; see rallypoint.rendezvous.state.core.
_NUMBER_DIGITS = 16


def check_fenced_states(operations: Iterable[Operation]) -> list[Finding]:
    """Return the violations in the replies about fenced states.

    The request of a "state.set" has "state", unique for each write, and "token", the one it replaces or None;
    repetitions of one write are one operation or several. The reply has "has_set", and the present "state" and "token".
    The reply of a "state.get" has the last two; None: there is no state.
    """
    by_run: dict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        if operation.what in (SET, GET):
            by_run[operation.object].append(operation)
    return [finding for run, of_run in by_run.items() for finding in _Chain(run, of_run).findings()]


@dataclass(slots=True)
class _Write:
    """One write, over all its repetitions."""

    state: str
    parent: str | None
    attempts: list[Operation] = field(default_factory=list)

    @property
    def began(self) -> float:
        return min(each.began for each in self.attempts)

    @property
    def done(self) -> Sequence[Operation]:
        """The attempts whose replies confirm the write."""
        return [each for each in self.attempts if _has_set(each)]

    @property
    def may_be_done(self) -> bool:
        return any(_has_set(each) or each.outcome is Outcome.UNKNOWN for each in self.attempts)


class _Chain:
    """The states of one run."""

    def __init__(self, run: str, operations: Sequence[Operation]) -> None:
        self._run = run
        self._operations = operations
        self._writes: dict[str, _Write] = {}
        for each in operations:
            if each.what == SET:
                state, parent = each.asked["state"], each.asked["token"]
                write = self._writes.setdefault(state, _Write(state, parent))
                assert write.parent == parent, f"the history has two writes of {state!r}: each needs its own"
                write.attempts.append(each)
        # The state of each token and the token of each state; by token, the first operation whose reply had it.
        self._state_of: dict[str, str] = {}
        self._token_of: dict[str, str] = {}
        self._first_reply: dict[str, Operation] = {}
        self._position: dict[str | None, int] = {None: 0}
        self._found: list[Finding] = []

    def findings(self) -> list[Finding]:
        """Return the violations of the first failing step: these often explain the rest, and later steps rely on it."""
        for step in (self._name_states, self._find_forks, self._walk, self._check_answers, self._check_times):
            step()
            if self._found:
                break
        return self._found

    def _find(self, wrong: Wrong, sentence: str, *evidence: Operation) -> None:
        self._found.append(Finding(wrong, self._run, sentence, evidence))

    def _name_states(self) -> None:
        """Map tokens to states and states to tokens; all replies must agree."""
        for each in self._operations:
            if each.outcome is not Outcome.OK or (token := each.answered["token"]) is None:
                continue
            state = each.answered["state"]
            first = self._first_reply.setdefault(token, each)
            if self._state_of.setdefault(token, state) != state:
                other = self._state_of[token]
                self._find(Wrong.REUSED, f"token {token} stands for {other!r} and for {state!r}", first, each)
            if (known := self._token_of.setdefault(state, token)) != token:
                sentence = f"state {state!r} was set twice: as {known} and as {token}"
                self._find(Wrong.DONE_TWICE, sentence, self._first_reply[known], each)
            if _has_set(each) and state != each.asked["state"]:
                self._find(
                    Wrong.FROM_NOWHERE, "a write is told that its state was set, and is shown another", each
                )
        for token, state in self._state_of.items():
            if (write := self._writes.get(state)) is None:
                self._find(Wrong.FROM_NOWHERE, f"nobody wrote {state!r}", self._first_reply[token])
            elif not write.may_be_done:
                sentence = f"state {state!r} was refused, and is there"
                self._find(Wrong.REFUSED_BUT_DONE, sentence, *write.attempts, self._first_reply[token])

    def _children(self) -> dict[str | None, list[str]]:
        """Return, by token, the tokens of the states that were set on it."""
        children: dict[str | None, list[str]] = defaultdict(list)
        for token, state in self._state_of.items():
            children[self._writes[state].parent].append(token)
        return children

    def _find_forks(self) -> None:
        for parent, tokens in self._children().items():
            if len(tokens) > 1:
                states = " and ".join(repr(self._state_of[token]) for token in tokens)
                on = "no state" if parent is None else f"token {parent}"
                evidence = [self._first_reply[token] for token in tokens]
                self._find(Wrong.FORK, f"{states} were all set on {on}", *evidence)

    def _walk(self) -> None:
        """Give every token its position on the chain."""
        children = self._children()
        token: str | None = None
        number = 0
        while follower := children.get(token):
            before, token = token, follower[0]
            self._position[token] = len(self._position)
            if (own := int(token[:_NUMBER_DIGITS], 16)) <= number:
                evidence = [self._first_reply[each] for each in (before, token) if each is not None]
                self._find(
                    Wrong.OUT_OF_ORDER, f"the number of token {token} is not greater than {number}", *evidence
                )
            number = own
        for token in self._state_of.keys() - self._position.keys():
            parent = self._writes[self._state_of[token]].parent
            sentence = f"{self._state_of[token]!r} was set on {parent}, which never was a token of this run"
            self._find(Wrong.FROM_NOWHERE, sentence, self._first_reply[token])

    def _check_answers(self) -> None:
        """Check that a write on the current token succeeds, and that a repetition confirms a completed write."""
        for each in self._operations:
            if each.what != SET or each.outcome is not Outcome.OK:
                continue
            if not _has_set(each) and each.asked["token"] == each.answered["token"]:
                self._find(Wrong.DENIED, "a write on the current state was told that another is there", each)
            done = self._writes[each.asked["state"]].done
            if not _has_set(each) and done and each.began > min(one.ended for one in done):
                self._find(
                    Wrong.DENIED, "a write that was done is told, repeated, that it was not", done[0], each
                )

    def _check_times(self) -> None:
        """Check that no reply shows a state older than its request allows: the chain must agree with the times."""
        last: _Sighting | None = None  # of all earlier on the chain, the one that began last
        for sighting in sorted(self._sightings()):
            if last is not None and sighting.ended < last.began:
                self._report_late(last, sighting)
                return
            if last is None or sighting.began > last.began:
                last = sighting

    def _sightings(self) -> Iterator[_Sighting]:
        for token, state in self._state_of.items():
            write, at = self._writes[state], self._position[token]
            ended = min((each.ended for each in write.done), default=NEVER)
            yield _Sighting(at, 0, write.began, ended, (write.done or write.attempts)[0])
        for each in self._operations:
            if each.outcome is Outcome.OK and not _has_set(each):
                position = self._position[each.answered["token"]]
                yield _Sighting(position, 1, each.began, each.ended, each)

    def _report_late(self, late: _Sighting, before: _Sighting) -> None:
        """Report that `late` began after `before` had ended, and shows an earlier position on the chain."""
        # Later reads show if the completed write is lost, or if only this reply was stale.
        sightings = list(self._sightings())
        newest = max(
            [each.position for each in sightings if each.seen and each.began >= late.began], default=0
        )
        done = [each for each in sightings if not each.seen and each.ended < late.began]
        lost = max(done, key=lambda each: each.position, default=before)
        if late.seen and not lost.seen and lost.position > newest:
            sentence = "a write was acknowledged, and nobody who asked later saw it"
            self._find(Wrong.LOST, sentence, lost.operation, late.operation)
        else:
            sentence = "the second asked when the first was over, and was shown what had been before it"
            self._find(Wrong.STALE, sentence, before.operation, late.operation)


@dataclass(frozen=True, slots=True, order=True)
class _Sighting:
    """The position on the chain at which an operation takes effect: a write creates it, others see it (`seen` is 1)."""

    position: int
    seen: int
    began: float
    ended: float
    operation: Operation = field(compare=False)


def _has_set(operation: Operation) -> bool:
    return operation.what == SET and operation.outcome is Outcome.OK and bool(operation.answered["has_set"])
