"""The rules of docs/protocol.md that the kit checks, each under the id that it has on that page, and their results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RULES: dict[str, str] = {
    # The life of a node
    "R01": "no worker runs while the phase is JOINABLE or FROZEN, or while the node has no assignment",
    "R02": "JOINABLE, FROZEN, and FROZEN or FINAL without an assignment stop the workers",
    "R03": "FINAL with an assignment starts all workers of its round",
    "R04": "an update that repeats the state changes nothing",
    "R05": "updates are states, not steps: the node acts on the last one, also if others are skipped",
    "R06": "an unknown phase counts as JOINABLE; unknown fields are ignored",
    "R07": "CLOSED stops the workers and ends the agent",
    "R08": "the agent exits with 0 after OUTCOME_SUCCEEDED, and with another code after other outcomes",
    "R09": "when the agent has ended, no worker is alive",
    # One stream
    "R10": "the first message of a newcomer is `join`, with run_id, node_id, settings, address, local_world_size",
    "R11": "a heartbeat is sent whenever nothing else was sent for keep_alive_interval, and not much more often",
    "R12": "the node sends a message at once when an update has `settling`",
    "R13": "`confirm` names the round, and is sent only when no worker of an earlier round is alive",
    "R14": "no grandchild of an earlier round is alive when the node confirms",
    "R15": "workers that are stopped get SIGTERM first; those that ignore it get SIGKILL",
    "R16": "master_port of `confirm` is a free TCP port, which the workers can bind",
    "R17": "each failed worker is reported, with round, rank, local_rank, exit_code, age",
    "R18": "success is reported once all workers have ended with 0; the stream stays open until CLOSED",
    "R19": "workers that have succeeded are started again if the round forms again",
    "R20": "after exit_barrier_passed the node leaves in good order, with exit code 0, or waits for CLOSED",
    "R21": "to leave, a node with workers sends `depart`, stops them, sends `leave`, and ends with the stream",
    "R22": "to leave, a node without workers sends `leave` alone",
    # When the stream ends
    "R23": "workers run on while there is no stream",
    "R24": "a new stream begins with `resume`: run_id, node_id, lease and token as granted",
    "R25": "after_revision of `resume` is the highest revision that the node received",
    "R26": "`worker_failed` is sent again after a resume, with an age that has grown",
    "R27": "`succeeded` is sent again after a resume",
    "R28": "the last of `confirm`, `depart` and `leave` is sent again after a resume",
    "R29": "streams are opened with back-off: random pauses, at most 40 streams in 8 s",
    "R30": "the node waits for RetryInfo.retry_delay",
    "R31": "a node that gets NOT_OWNER with owner_address goes on there at once",
    "R32": "redirects are followed at most 4 times in a row, then with the back-off",
    # Errors
    "R33": "UNAVAILABLE and CANCELLED without a reason are retried",
    "R34": "DRAINING, as a message or as the reason: the node resumes",
    "R35": "LEASE_LOST: the node stops its workers and joins again",
    "R36": "LEASE_LOST with superseded_by: the node stops its workers and ends",
    "R37": "LEASE_NOT_PROVEN on a resume: the node stops its workers and joins again",
    "R38": "RUN_NOT_FOUND on a resume: the node stops its workers and joins again",
    "R39": "REVISION_AHEAD: the node stops its workers and joins again as a newcomer",
    "R40": "STREAM_REPLACED ends the stream: workers run on, and streams are opened with back-off only",
    "R41": "NODE_EVICTED: the node stops its workers and gives up",
    "R42": "RUN_CLOSED: the node stops its workers and ends",
    "R43": "SETTINGS_DIFFER: the node gives up, and shows the message",
    "R44": "INVALID_ARGUMENT: a newcomer gives up",
    "R45": "another error does not end the membership of a node that was admitted",
    # The environment of a worker
    "R46": "each worker gets the variables of the page",
    "R47": "no worker gets RALLYPOINT_RUN_SECRET*, RALLYPOINT_TLS_* or RALLYPOINT_TOKEN_*",
}


@dataclass
class Findings:
    """Results of one scenario.

    Attributes:
        held: Rules that were checked and held.
        broken: For a broken rule, the expectation and the observation.
    """

    held: set[str] = field(default_factory=set)
    broken: dict[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class RuleResult:
    """The result of one rule.

    Attributes:
        rule: Its id.
        status: PASS: all checks held; FAIL: one did not; SKIPPED: none took place.
        scenario: The scenario in which it was broken.
        expected: The expectation.
        seen: The observation.
        reason: The reason to skip it.
    """

    rule: str
    status: Literal["PASS", "FAIL", "SKIPPED"]
    scenario: str = ""
    expected: str = ""
    seen: str = ""
    reason: str = ""

    def line(self) -> str:
        """Describe the result on one line, or on three."""
        text = f"{self.rule} {self.status:7} {RULES[self.rule]}"
        if self.status == "FAIL":
            return f"{text}\n    {self.scenario}: expected {self.expected}\n    seen: {self.seen}"
        return f"{text} ({self.reason})" if self.reason else text
