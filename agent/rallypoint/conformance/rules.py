"""The rules that the kits check, each under the id that it has on its page, and their results.

Those of agents are in docs/protocol.md, those of workers in docs/timer-socket.md and docs/store-socket.md.
"""

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
    "R54": "with stays_until_gone, the node keeps or resumes its stream in CLOSED, and leaves when no worker is alive",
    "R08": "the agent exits with 0 after OUTCOME_SUCCEEDED, and with another code after other outcomes",
    "R09": "when the agent has ended, no worker is alive",
    "R52": "FINAL of a round that the node has not confirmed starts no worker",
    # One stream
    "R10": "the first message of a newcomer is `join`, with run_id, node_id, settings, address, local_world_size",
    "R11": "a heartbeat is sent whenever nothing else was sent for keep_alive_interval, and not much more often",
    "R12": "the node sends a message at once when an update has `settling`",
    "R13": "`confirm` names the round, and is sent only when no worker of an earlier round is alive",
    "R14": "no grandchild of an earlier round is alive when the node confirms",
    "R15": "workers that are stopped get SIGTERM first; those that ignore it get SIGKILL",
    "R16": "master_port of `confirm` is a free TCP port, which the workers can bind",
    "R17": "each failed worker is reported, with round, rank, local_rank, exit_code, age",
    "R73": "FAILURE_KIND_PORT_TAKEN is only a failure for which another program has the port",
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
    "R55": "with several addresses, a node that gets no first reply goes on to another one: after 4 s, then 8, then 16",
    "R56": "after GOAWAY a stream goes on until it ends; the next one uses another connection",
    "R57": "after a resume come `worker_failed` and `succeeded` before the last of `confirm`, `depart` and `leave`",
    "R48": "a connection that is reset, also within a message, is a broken stream: the node resumes",
    # Errors
    "R33": "UNAVAILABLE, CANCELLED, DEADLINE_EXCEEDED, INTERNAL and UNKNOWN without a reason are retried",
    "R34": "DRAINING, as a message or as the reason: the node resumes",
    "R35": "LEASE_LOST: the node stops its workers and joins again",
    "R36": "LEASE_LOST with superseded_by: the node stops its workers and ends",
    "R37": "LEASE_NOT_PROVEN on a resume: the node stops its workers and joins again",
    "R38": "RUN_NOT_FOUND on a resume: the node stops its workers and joins again",
    "R39": "REVISION_AHEAD: the node stops its workers and joins again as a newcomer",
    "R53": "the `join` after a lost lease has that lease's incarnation as former_incarnation",
    "R40": "STREAM_REPLACED ends the stream: workers run on, and streams are opened with back-off only",
    "R41": "NODE_EVICTED: the node stops its workers and gives up",
    "R42": "RUN_CLOSED: the node stops its workers and ends",
    "R43": "SETTINGS_DIFFER: the node gives up, and shows the message",
    "R44": "INVALID_ARGUMENT and other lasting refusals: a newcomer gives up",
    "R45": "another error does not end the membership of a node that was admitted",
    "R49": "JOIN_TIMED_OUT: the node gives up, with an exit code other than 0",
    # Which server is this
    "R50": "with TLS, nothing is sent to a server whose certificate is of another authority, or of another name",
    # The environment of a worker
    "R46": "each worker gets the variables of the page",
    "R47": "no worker gets RALLYPOINT_RUN_SECRET*, RALLYPOINT_TLS_* or RALLYPOINT_TOKEN_*",
    # Optional
    "R51": "`started` names the running round; after a resume it is sent again, with an age that has grown",
    "R58": "`started` is not sent again once an update had `start_recorded`",
    # The watchdog's stream
    "R60": "it begins with `subscribe`: run_id, node_id, lease, incarnation, and a token made of the lease's",
    "R61": "`acquire` of all timers comes before `registered`, with the time that has passed",
    "R62": "each timer has a sequence of its own, which it keeps on another stream",
    "R63": "after `expired` the worker is killed and its failure reported, then the expiry is acknowledged",
    "R64": "the expiry of a timer that the worker holds no longer is acknowledged, and kills no worker",
    "R65": "`release` is sent when a timer ends, and `clear` when its worker has ended",
    "R66": "with a new lease, the node subscribes again, on another stream",
    "R67": "streams are opened with back-off, also after LEASE_LOST and STREAM_REPLACED: at most 40 in 8 s",
    "R68": "`watchdog_trouble` is set once there has been no stream for 5 s, and is empty when there is one again",
    "R69": "changes are gathered: at most 40 messages in 2 s",
    "R70": "after any end of the stream, for whichever reason, the node subscribes again; workers run on",
    "R71": "a refused timer ends neither the stream nor its worker, and is not sent again",
    "R72": "`learned` with count 0 is answered with the same message",
}

WORKER_RULES: dict[str, str] = {
    # docs/timer-socket.md
    "T01": "the worker uses one connection for all its timers and its progress",
    "T02": "each message has version 1, the size of its kind, and zeros in unused bytes; in a stream, a frame for each",
    "T03": "a timer has its scope, its timeout in nanoseconds, and signal 0 unless the program gives one",
    "T04": "a learned timer has flag 1 and a timeout of 0",
    "T05": "times are of CLOCK_MONOTONIC, or 0",
    "T06": "a scope has at most 256 bytes: of a longer one, a part of whole UTF-8 characters",
    "T07": "the end of a timer ends that timer, and no other one of the same scope",
    "T08": "progress has the step, of 64 bits",
    "T09": "without an agent, and when the agent closes the connection, the worker goes on",
    "T10": "after the end of a connection a later change opens another one",
    "T11": "a new connection gets the timers that still run, with the time at which they began, and no others",
    "T12": "connections are opened with pauses: at most 40 in 4 s, if each is closed at once",
    "T13": "an agent that does not read delays the worker for a short time, not at each change",
    "T14": "once the agent reads again, it gets the state of the worker",
    "T15": "a table has its size, seals and magic number; its message is the first, and word 1 is 0 then",
    "T16": "Look is sent after a change, unless the agent polls",
    "T17": "no Look is sent while the agent polls, or while another one is unread",
    # docs/store-socket.md
    "S01": "a call is a frame of two lengths, most significant byte first, a JSON object in UTF-8, and the body",
    "S02": "each call has `op`, `round` (the worker's, or 0) and `timeout` (the program's)",
    "S03": "a write has `writer_round`, the value of RALLYPOINT_ROUND",
    "S04": "`set`, `get` and `delete` have the key; values are raw bytes, also empty ones",
    "S05": "`add` has the amount, of 64 bits",
    "S06": "`compare_set` has both values in the body, and the length of the first",
    "S07": "`wait` and `check` have the list of keys",
    "S08": "`keys` is repeated with `page` until `next_page` is empty",
    "S09": "keys are any Unicode: quotes, backslashes, control characters, all planes",
    "S10": "one connection serves one call after the other, also after an error",
    "S11": "a reply may come in pieces",
    "S12": "an agent that reads slowly gets the whole call",
    "S13": "KEY_WAIT_TIMED_OUT is a timeout",
    "S14": "ROUND_OVER and LEASE_LOST mean that the worker's round is over",
    "S15": "other errors go by `code`, also with an unknown reason: UNAVAILABLE, or refused",
    "S16": "unknown fields of replies and errors are ignored",
    "S17": "the connection is not used after a reply with `last`",
    "S18": "a call without a reply is not repeated; it is UNAVAILABLE",
    "S19": "after the end of a connection, a later call opens another one",
    "S20": "the worker waits for the reply for at least 5 s after the timeout",
    "S21": "a call to a silent agent ends, and its connection with it",
}


@dataclass
class Findings:
    """Results of one scenario.

    Attributes:
        held: Rules that were checked and held.
        broken: For a broken rule, the expectation and the observation.
        left_out: The reason to end the scenario early: the program does not offer something.
    """

    held: set[str] = field(default_factory=set)
    broken: dict[str, tuple[str, str]] = field(default_factory=dict)
    left_out: str = ""


@dataclass(frozen=True)
class RuleResult:
    """The result of one rule. PASS: all checks held; FAIL: one did not; SKIPPED: none took place."""

    rule: str
    status: Literal["PASS", "FAIL", "SKIPPED"]
    scenario: str = ""
    expected: str = ""
    seen: str = ""
    reason: str = ""

    def line(self) -> str:
        """Describe the result on one line, or on three."""
        text = f"{self.rule} {self.status:7} {(RULES | WORKER_RULES)[self.rule]}"
        if self.status == "FAIL":
            return f"{text}\n    {self.scenario}: expected {self.expected}\n    seen: {self.seen}"
        return f"{text} ({self.reason})" if self.reason else text
