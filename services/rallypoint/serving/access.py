"""Which calls of a server may go on: by the caller's certificate or token, and the runs that the messages name.

Each refusal and each action of an operator goes to the audit log.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import grpc
from google.protobuf.message import Message

from rallypoint.rpc.durations import is_repeated
from rallypoint.rpc.errors import ServiceError, invalid
from rallypoint.serving.audit import Audit
from rallypoint.serving.flow import Context, client_of
from rallypoint.serving.policy import ALL_RUNS, EVERY_ROLE, OPERATORS, Policy, Rights, Role
from rallypoint.serving.tokens import InvalidToken, TokenKeys

# Messages within one message that are searched for runs: more than any service takes.
_MOST_ENTRIES = 10_000


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a call.

    Attributes:
        name: The name in its token, else in its certificate; empty: it sent neither.
        peer: Its address, as gRPC gives it.
    """

    name: str
    peer: str

    @property
    def client(self) -> str:
        """The party whose runs are limited in number: its name, else its host."""
        return self.name or client_of(self.peer)

    def __str__(self) -> str:
        return self.name or self.peer


# The client of this task's call, if its rights were looked at.
_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)


def caller_of(context: Context) -> Caller:
    """Return the client of a call to a method for operators."""
    return _caller.get() or Caller("", context.peer())


def _certified_name(context: Context) -> str:
    """Return the SPIFFE ID in the client's certificate, else its first DNS name, else its common name.

    The common name does not count beside alternative names: who signs a certificate for those may not check it.
    """
    found = context.auth_context()
    keys = ["peer_spiffe_id", "peer_dns"]
    if not found.keys() & _ALTERNATIVE_NAMES:
        keys.append("x509_common_name")
    for key in keys:
        for first in found.get(key, ()):
            return first.decode(errors="replace")
    return ""


_ALTERNATIVE_NAMES = {"x509_subject_alternative_name", "peer_uri", "peer_email", "peer_ip", "peer_dns"}


class Access:
    """Decides whether calls may go on."""

    def __init__(
        self,
        rights: Mapping[str, Rights],
        policy: Policy | None,
        tokens: TokenKeys | None,
        audit: Audit,
        *,
        certificates: bool,
    ) -> None:
        """Begin.

        Args:
            rights: By the full name of each service. Under a policy, methods that are not in it are for operators.
            policy: Grants of the names in certificates. None: a client with a certificate may call everything.
            tokens: Checks tokens. None: there are none, and a client without a certificate may call everything too.
            audit: The audit log.
            certificates: True if an authority of the operator's signs those of clients. A holder of a run secret can
                sign one for any name.
        """
        self._roles = {
            f"/{service}/{method}": frozenset(roles)
            for service, methods in rights.items()
            for method, roles in methods.items()
        }
        self._policy = policy
        self._tokens = tokens
        self._audit = audit
        self._certificates = certificates

    def begin(self, method: str, context: Context) -> Permit | None:
        """Return the permit of a call that begins; None: it may go on, with any messages."""
        roles = self._roles.get(method)
        if self._policy is None and self._tokens is None and roles != OPERATORS:
            return None
        name = _certified_name(context) if self._certificates else ""
        caller, roles = Caller(name, context.peer()), roles or OPERATORS
        _caller.set(caller)
        if self._tokens is not None and (text := _bearer(context)):
            try:
                token = self._tokens.check(text)
            except InvalidToken as refused:
                return Permit(self._audit, method, caller, roles, f"the token is not valid: {refused}")
            runs = token.runs if token.roles & roles else []
            caller = Caller(token.name, caller.peer)
            _caller.set(caller)
            return Permit(self._audit, method, caller, roles, runs)
        if not caller.name and (self._policy or self._tokens):
            kinds = ["certificate with a name"] * bool(self._policy) + ["token (--token-file)"] * bool(
                self._tokens
            )
            problem = f"this server takes no calls without a {' or a '.join(kinds)}"
            return Permit(self._audit, method, caller, roles, problem)
        runs = [ALL_RUNS] if self._policy is None else self._policy.runs(caller.name, roles)
        return Permit(self._audit, method, caller, roles, runs)


class Permit:
    """The runs that one call may name."""

    def __init__(
        self, audit: Audit, method: str, caller: Caller, roles: Collection[Role], runs: Sequence[str] | str
    ) -> None:
        """Permit nothing yet.

        Args:
            method: The method, as gRPC names it.
            roles: The roles that may call it.
            runs: Patterns of the runs for which the client has one of them; or the reason why its name is not known.
        """
        self._audit = audit
        self._method = method
        self._caller = caller
        self._roles = roles
        self._runs = runs
        self._begun = False

    def check(self, message: Message) -> None:
        """Check a message; the first one must name a run, unless the client may call the method for all runs, or it is
        about none.

        Raises:
            ServiceError: UNAUTHENTICATED, the caller has no name; PERMISSION_DENIED, it has no right to the method, or
                not for a run that the message names.
        """
        # Before the search for runs, which takes time: a caller without a right must not cause it, and one with a right
        # for all runs needs it only for the audit log.
        permitted = self._permitted_runs(message)
        if self._roles == EVERY_ROLE or (ALL_RUNS in permitted and self._roles != OPERATORS):
            return
        runs = list(dict.fromkeys(_runs(message)))
        if ALL_RUNS not in permitted:
            if not runs and not self._begun:
                raise self._denied([], ", and without a run's name it concerns all runs")
            for run in runs:
                if not any(fnmatchcase(run, pattern) for pattern in permitted):
                    raise self._denied(runs, f" for run {run!r}")
        if not self._begun and self._roles == OPERATORS:
            self._audit.allowed(self._method, self._caller.name, self._caller.peer, runs, message)
        self._begun = True

    async def check_each(self, messages: AsyncIterator[Message]) -> AsyncIterator[Message]:
        """Yield the messages of a stream; `check` each. A caller without any right to it is refused at once."""
        self._permitted_runs(None)
        async for message in messages:
            self.check(message)
            yield message

    def _permitted_runs(self, message: Message | None) -> Collection[str]:
        run = getattr(message, "run_id", "")
        if isinstance(self._runs, str):
            raise self._refused([run], grpc.StatusCode.UNAUTHENTICATED, "NOT_IDENTIFIED", self._runs)
        if not self._runs:
            raise self._denied([run], "")
        return self._runs

    def _denied(self, runs: Collection[str], about: str) -> ServiceError:
        method, roles = self._method.rpartition("/")[2], " or ".join(sorted(self._roles))
        problem = f"{self._caller.name!r} may not call {method}{about}: that needs the role {roles}"
        return self._refused(runs, grpc.StatusCode.PERMISSION_DENIED, "NOT_PERMITTED", problem)

    def _refused(
        self, runs: Collection[str], code: grpc.StatusCode, reason: str, problem: str
    ) -> ServiceError:
        self._audit.refused(self._method, self._caller.name, self._caller.peer, runs, problem)
        return ServiceError(code, reason, problem)


def _bearer(context: Context) -> str:
    """Return the token that a client sent with a call; empty: it sent none."""
    for key, value in context.invocation_metadata() or ():
        if key == "authorization" and isinstance(value, str):
            scheme, _, token = value.partition(" ")
            if scheme.lower() == "bearer":
                return token.strip()
    return ""


def _runs(message: Message) -> Iterator[str]:
    """Yield the runs that a message names, in itself or in the messages within."""
    for name, is_run, repeated in _ways_to_runs(message.DESCRIPTOR):
        if repeated:
            entries = getattr(message, name)
            if len(entries) > _MOST_ENTRIES:
                raise invalid(name, f"at most {_MOST_ENTRIES} are permitted, not {len(entries)}")
            for each in entries:
                yield from _runs(each)
        elif not is_run:
            if message.HasField(name):
                yield from _runs(getattr(message, name))
        elif run := getattr(message, name):
            yield run


@cache
def _ways_to_runs(kind: Any) -> Sequence[tuple[str, bool, bool]]:
    """Return the fields of a kind of messages that may hold a run: name, whether it is one, and whether it is repeated.

    A message may have millions of others, which a hostile client fills.
    """
    ways = []
    for field in kind.fields:
        within = field.message_type
        if field.name == "run_id":
            ways.append((field.name, True, False))
        elif (
            within in (None, kind)
            or within.GetOptions().map_entry
            or within.file.package.startswith("google.")
        ):
            continue
        elif _ways_to_runs(within):
            ways.append((field.name, False, is_repeated(field)))
    return ways
