"""Every role calls every method of every service, for its own and other runs, with certificates and with tokens."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from house.source import ROOT
from rallypoint.agent.supervisor.jobs import Jobs
from rallypoint.agent.supervisor.servicer import supervisor_registration
from rallypoint.agent.v1.supervisor_service_pb2 import DrainRequest, LaunchJobRequest
from rallypoint.agent.v1.supervisor_service_pb2_grpc import SupervisorServiceStub
from rallypoint.rendezvous.api.errors import translate
from rallypoint.rendezvous.api.service import rendezvous_services
from rallypoint.rendezvous.journal.journal import MemoryJournal
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as rendezvous_pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as rendezvous_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import (
    CERTIFIED_NAME,
    AccessFiles,
    ClientSecurity,
    ClientTLS,
    RunSecret,
    ServerOptions,
    parse_endpoint,
)
from rallypoint.rpc.errors import ServiceError, decode
from rallypoint.rpc.run_secret import Authority, _authority_key, identity_of
from rallypoint.rpc.tls import ClientCredentials
from rallypoint.serving.info import SERVICE_NAME as SERVER_SERVICE
from rallypoint.serving.policy import Role
from rallypoint.serving.server import Server
from rallypoint.serving.tokens import Token, issue, key_id
from rallypoint.timer.server.service import timer_registration
from rallypoint.timer.server.service import translate as translate_timer
from serving.conftest import Certificates, client_certificate, make_certificates
from support.joining import join_request
from support.server_info import server_info
from support.waiting import PATIENCE

pytestmark = pytest.mark.integration

CERTIFICATES, TOKENS, RUN_SECRET = "certificates", "tokens", "tokens over a run secret"
OWN, FOREIGN, NONE = "team-a-1", "team-b-1", ""
STRANGER = "stranger"
POLICY = "".join(
    f'[[grant]]\nnames = ["spiffe://rallypoint.test/{role}"]\nroles = ["{role}"]\nruns = ["team-a-*"]\n\n'
    for role in Role
)


@dataclass
class Scene:
    """A server with all services; a client named after a role has that role, for runs of team-a."""

    certificates: Certificates
    options: ServerOptions
    key: Ed25519PrivateKey
    address: str = ""
    methods: dict[str, MethodDescriptor] = field(default_factory=dict)

    @asynccontextmanager
    async def channel(self, name: str) -> AsyncIterator[grpc.aio.Channel]:
        """Open a connection as the client of this name."""
        async with open_channel(self.address, self.security(f"spiffe://rallypoint.test/{name}")) as channel:
            yield channel

    def security(self, name: str) -> ClientSecurity:
        """Return its certificate, or its token with the CA or the run secret."""
        if self.options.access.token_keys is None:
            return client_certificate(self.certificates, f"URI:{name}")
        path = self.options.access.token_keys.with_name("token")
        path.write_text(self.token(name))
        if self.options.run_secret is not None:
            return RunSecret(self.options.run_secret.text, token=path)
        return ClientTLS(self.certificates.ca, token=path)

    def token(self, name: str, *, hours: float = 1.0) -> str:
        """Issue a token for the role in the name, if there is one."""
        now = time.time()
        roles = frozenset(role for role in Role if name.endswith(f"/{role}"))
        return issue(self.key, Token(name, roles, ["team-a-*"], now + 3600 * hours), now)

    @property
    def audit(self) -> Path:
        """The path of the audit log."""
        assert self.options.access.audit_log is not None
        return self.options.access.audit_log

    def audited(self) -> list[dict[str, Any]]:
        """The lines of the audit log."""
        return [json.loads(line) for line in self.audit.read_text().splitlines()]


def public(key: Ed25519PrivateKey) -> bytes:
    """Return the public key for a server."""
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def options_for(kind: str, folder: Path, certificates: Certificates, key: Ed25519PrivateKey) -> ServerOptions:
    """Return the settings of a server that authenticates its clients in one of the ways."""
    policy, keys = folder / "policy.toml", folder / "token.pub"
    policy.write_text(POLICY)
    keys.write_bytes(public(key))
    access = AccessFiles(audit_log=folder / "audit.jsonl")
    by_token = replace(access, token_keys=keys)
    if kind == RUN_SECRET:
        return ServerOptions(access=by_token, run_secret=RunSecret("a secret of sixteen"))
    tls = ServerOptions(access=by_token, tls_cert=certificates.server, tls_key=certificates.server_key)
    if kind == TOKENS:
        return tls
    return replace(tls, access=replace(access, policy=policy), tls_client_ca=certificates.ca)


@pytest.fixture(params=[CERTIFICATES])
async def scene(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    """The server."""
    certificates, key = make_certificates(tmp_path, "test"), Ed25519PrivateKey.generate()
    scene = Scene(certificates, options_for(request.param, tmp_path, certificates, key), key)
    async with AsyncExitStack() as stack:
        rendezvous = await stack.enter_async_context(rendezvous_services(MemoryJournal()))
        services = [*rendezvous, timer_registration(), supervisor_registration(Jobs())]
        server = Server(
            scene.options,
            services=services,
            translate=lambda error: translate(error) or translate_timer(error),
        )
        await server.start()
        stack.push_async_callback(server.stop)
        names = [*(each.service_name for each in services), SERVER_SERVICE]
        described = [Default().FindServiceByName(name) for name in names]
        scene.methods = {
            f"{each.name}.{method.name}": method for each in described for method in each.methods
        }
        scene.address = server.address
        yield scene


async def refusal(channel: grpc.aio.Channel, method: MethodDescriptor, *runs: str) -> ServiceError | None:
    """Call a method about runs; return its error, or None if it succeeds or its stream stays open."""
    request = GetMessageClass(method.input_type)()
    for run in filter(None, runs):
        assert name_run(request, run)
    path = f"/{method.containing_service.full_name}/{method.name}"
    read = GetMessageClass(method.output_type).FromString
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    call = getattr(channel, kind)(path, lambda message: message.SerializeToString(), read)
    asked = call(iter([request]) if method.client_streaming else request, timeout=PATIENCE)
    try:
        if method.server_streaming:
            await asked.read()
            asked.cancel()
        else:
            await asked
    except grpc.aio.AioRpcError as error:
        if (
            error.details() == "Internal error from Core"
        ):  # gRPC's own, when a stream ends while a message is sent
            return await refusal(channel, method, *runs)
        return decode(error)
    return None


def name_run(message: Message, run: str) -> bool:
    """Set the run id in the field of a message, or in that of a nested message; return False if it has none."""
    fields = message.DESCRIPTOR.fields_by_name
    if "run_id" in fields:
        message.run_id = run  # type: ignore[attr-defined]
        return True
    for each in fields.values():
        if each.message_type is not None and has_run(each.message_type):
            within = getattr(message, each.name)
            return name_run(within.add() if hasattr(within, "add") else within, run)
    return False


def has_run(kind: Any) -> bool:
    """Return True if messages of a kind, or nested ones, have a field for a run id."""
    within = (field.message_type for field in kind.fields if field.message_type not in (None, kind))
    return "run_id" in kind.fields_by_name or any(map(has_run, within))


def documented() -> dict[str, set[str]]:
    """Return by method the roles in the documentation."""
    table = (ROOT / "docs/security.md").read_text()
    rows = re.findall(r"^\| `(\w+Service)` \| ([`\w, ]+) \| ([\w, ]+) \|$", table, re.MULTILINE)
    return {
        f"{service}.{method}": set(roles.split(", "))
        for service, methods, roles in rows
        for method in re.findall(r"\w+", methods)
    }


@pytest.mark.parametrize("scene", [CERTIFICATES, TOKENS, RUN_SECRET], indirect=True)
async def test_each_role_has_the_documented_rights_for_its_runs_and_no_others(scene: Scene) -> None:
    """All methods are documented. A call that the role does not permit is refused before it reaches the handler.

    A method that all roles may call concerns no run, so a role for any runs is sufficient.
    """
    table = documented()
    assert table.keys() == scene.methods.keys()
    wrong = []
    for who in (*Role, STRANGER):
        async with scene.channel(who) as channel:
            for name, method in scene.methods.items():
                for run in (OWN, FOREIGN, NONE) if has_run(method.input_type) else (NONE,):
                    error = await refusal(channel, method, run)
                    refused = error is not None and error.reason == "NOT_PERMITTED"
                    needed = NONE if table[name] == set(Role) else OWN
                    if refused == (who in table[name] and run == needed):
                        wrong.append(f"{who} {name} {run or 'without a run'}: {error}")
                    assert error is None or error.reason != "UNEXPECTED_ERROR", (name, error)
    assert wrong == []


@pytest.mark.parametrize("scene", [CERTIFICATES, TOKENS, RUN_SECRET], indirect=True)
async def test_a_client_of_any_role_sees_how_rights_are_given_but_no_secret_and_no_file(scene: Scene) -> None:
    """GetServerInfo names the way of authorization, so a client knows which proof may be required."""
    access = scene.options.access
    async with scene.channel("timer") as channel:
        info = await server_info(channel)
    kind = "policy" if access.policy is not None else "tokens"
    assert [*info.capabilities] == sorted(["health", "reflection", kind])
    assert str(scene.audit.parent) not in str(info)
    assert "secret of sixteen" not in str(info)


async def test_a_message_that_names_a_foreign_run_beside_its_own_is_refused(scene: Scene) -> None:
    """This holds for the actions of a timer subscription."""
    async with scene.channel("node") as channel:
        error = await refusal(channel, scene.methods["TimerService.Supervise"], OWN, FOREIGN)
    assert error is not None
    assert error.reason == "NOT_PERMITTED"


async def test_a_caller_without_a_role_for_all_runs_gets_it_when_the_policy_changes(scene: Scene) -> None:
    """It needs no restart, and an invalid policy changes nothing."""
    async with scene.channel("observer") as channel:
        method = scene.methods["RendezvousService.ListRuns"]
        assert await refusal(channel, method, NONE) is not None
        assert scene.options.access.policy is not None
        scene.options.access.policy.write_text(POLICY.replace("team-a-*", "*"))
        assert await refusal(channel, method, NONE) is None
        scene.options.access.policy.write_text("[[grant]]\nnames = 3\n")
        assert await refusal(channel, method, NONE) is None


@pytest.mark.parametrize("scene", [TOKENS, RUN_SECRET], indirect=True)
async def test_without_a_valid_token_nothing_is_answered(scene: Scene, tmp_path: Path) -> None:
    """Tokens are rejected if expired, tampered, unsigned, malformed, missing, or of another key or audience."""
    name = "spiffe://rallypoint.test/operator"
    header, _, signature = scene.token(name).split(".")
    stranger = replace(scene, key=Ed25519PrivateKey.generate())
    foreign = {"sub": name, "aud": "other", "exp": time.time() + 60, "roles": ["operator"], "runs": ["*"]}
    kid = {"kid": key_id(scene.key.public_key())}
    bad = {
        "expired": scene.token(name, hours=-0.01),
        "tampered": ".".join([header, scene.token(f"{name}/operator").split(".")[1], signature]),
        "unknown key": stranger.token(name),
        "unsigned": jwt.encode({**foreign, "aud": "rallypoint"}, "", "none", headers=kid),
        "audience": jwt.encode(foreign, scene.key, "EdDSA", headers=kid),
        "no claims": jwt.encode({"sub": name, "aud": "rallypoint"}, scene.key, "EdDSA", headers=kid),
        "no token": "x",
    }
    method = scene.methods["RendezvousService.CloseRun"]
    security, path = scene.security(name), tmp_path / "token"
    assert isinstance(security, ClientTLS | RunSecret)
    answers = {}
    async with open_channel(scene.address, security) as channel:
        for what, token in bad.items():
            path.write_text(token)
            error = await refusal(channel, method, OWN)
            answers[what] = error and error.code
        path.write_text(scene.token(name))  # the same connection continues with another token
        error = await refusal(channel, method, OWN)
        assert error is not None
        assert error.reason == "RUN_NOT_FOUND"
    async with open_channel(scene.address, replace(security, token=None)) as channel:
        error = await refusal(channel, method, OWN)
        answers["none"] = error and error.code
    assert answers == dict.fromkeys((*bad, "none"), grpc.StatusCode.UNAUTHENTICATED)


@pytest.mark.parametrize("scene", [RUN_SECRET], indirect=True)
async def test_a_holder_of_the_run_secret_cannot_certify_a_name(scene: Scene, tmp_path: Path) -> None:
    """All holders have the CA key, so a holder could sign a certificate for any name."""
    secret = scene.options.run_secret
    assert secret is not None
    now = datetime.now(UTC)
    authority = Authority("rallypoint run", _authority_key(secret), now, now + timedelta(hours=1))
    names = x509.SubjectAlternativeName([x509.DNSName("alice")])
    for file, content in zip(("alice.pem", "alice.key"), authority.issue("alice", names), strict=True):
        (tmp_path / file).write_bytes(content)
    (tmp_path / "root.pem").write_bytes(identity_of(secret).authorities or b"")
    alice = ClientTLS(tmp_path / "root.pem", tmp_path / "alice.pem", tmp_path / "alice.key")
    credentials = ClientCredentials(alice).of(parse_endpoint(scene.address))[0]
    assert credentials is not None
    override = [("grpc.ssl_target_name_override", CERTIFIED_NAME)]
    async with grpc.aio.secure_channel(scene.address, credentials, options=override) as channel:
        error = await refusal(channel, scene.methods["RendezvousService.CloseRun"], OWN)
    assert error is not None
    assert error.reason == "NOT_IDENTIFIED"
    assert scene.audited()[-1]["caller"] == ""


@pytest.mark.parametrize(
    ("name", "granted", "permitted"),
    [
        ("DNS:b.oncall.test", "*.oncall.test", True),
        ("URI:spiffe://a.test/x.oncall.test", "*.oncall.test", False),
        ("URI:spiffe://a.test/x", "*", False),
        ("URI:spiffe://a.test/x", "spiffe://*", True),
        ("URI:https://a.test/x", "client", False),  # although "client" is its common name
        ("email:x@a.test", "client", False),
    ],
)
async def test_a_name_is_taken_from_one_place_and_matches_patterns_of_its_kind(
    scene: Scene, name: str, granted: str, permitted: bool
) -> None:
    """The owner of a SPIFFE ID can choose its ending, and its signer may not check the common name."""
    assert scene.options.access.policy is not None
    scene.options.access.policy.write_text(
        f'[[grant]]\nnames = ["{granted}"]\nroles = ["operator"]\nruns = ["*"]\n'
    )
    async with open_channel(scene.address, client_certificate(scene.certificates, name)) as channel:
        error = await refusal(channel, scene.methods["RendezvousService.ListRuns"])
    assert (error is None) == permitted


@pytest.mark.parametrize("scene", [TOKENS], indirect=True)
async def test_keys_of_tokens_are_exchanged_while_the_server_runs(scene: Scene) -> None:
    """Two keys may be valid at once; tokens of a removed key are rejected."""
    keys, method, new = (
        scene.options.access.token_keys,
        scene.methods["RendezvousService.GetRun"],
        replace(scene),
    )
    new.key = Ed25519PrivateKey.generate()
    assert keys is not None
    async with scene.channel("observer") as old_channel:
        error = await refusal(old_channel, method, OWN)
        assert error is not None
        assert error.reason == "RUN_NOT_FOUND"
        keys.write_bytes(public(scene.key) + public(new.key))
        reasons = [(await refusal(old_channel, method, OWN)), None]
        async with new.channel("observer") as channel:
            reasons[1] = await refusal(channel, method, OWN)
        assert [each and each.reason for each in reasons] == ["RUN_NOT_FOUND", "RUN_NOT_FOUND"]
        keys.with_name("token").write_text(scene.token("spiffe://rallypoint.test/observer"))
        keys.write_bytes(public(new.key))
        error = await refusal(old_channel, method, OWN)
        assert error is not None
        assert error.reason == "NOT_IDENTIFIED"


@pytest.mark.parametrize("scene", [CERTIFICATES, TOKENS], indirect=True)
async def test_every_event_has_its_actor_and_the_audit_log_every_action(scene: Scene) -> None:
    """The actor is a node with its address, an operator with the name in its certificate or token, or the service."""
    async with scene.channel("node") as channel:
        settings = rendezvous_pb.RunSettings(min_nodes=1, max_nodes=1)
        joined = rendezvous_grpc.RendezvousServiceStub(channel).Join()
        await joined.write(join_request(OWN, settings=settings))
        await joined.read()
    async with scene.channel("operator") as channel:
        stub = rendezvous_grpc.RendezvousServiceStub(channel)
        await stub.RestartRun(rendezvous_pb.RestartRunRequest(run_id=OWN))
        await stub.EvictNode(rendezvous_pb.EvictNodeRequest(run_id=OWN, node_id="n"))
        await stub.ReadmitNode(rendezvous_pb.ReadmitNodeRequest(run_id=OWN, node_id="n"))
        await stub.CloseRun(rendezvous_pb.CloseRunRequest(run_id=OWN))
        events = (await stub.ListEvents(rendezvous_pb.ListEventsRequest(run_id=OWN))).events
        await stub.DeleteRun(rendezvous_pb.DeleteRunRequest(run_id=OWN))
    operator = "spiffe://rallypoint.test/operator"
    expected = {
        rendezvous_pb.EVENT_KIND_NODE_JOINED: (rendezvous_pb.ACTOR_KIND_NODE, "n"),
        rendezvous_pb.EVENT_KIND_RESTART_REQUESTED: (rendezvous_pb.ACTOR_KIND_OPERATOR, operator),
        rendezvous_pb.EVENT_KIND_NODE_EVICTED: (rendezvous_pb.ACTOR_KIND_OPERATOR, operator),
        rendezvous_pb.EVENT_KIND_NODE_READMITTED: (rendezvous_pb.ACTOR_KIND_OPERATOR, operator),
        rendezvous_pb.EVENT_KIND_RUN_CLOSED: (rendezvous_pb.ACTOR_KIND_OPERATOR, operator),
        rendezvous_pb.EVENT_KIND_ROUND_ENDED: (rendezvous_pb.ACTOR_KIND_SERVICE, ""),
    }
    actors = {event.kind: (event.actor.kind, event.actor.name) for event in events if event.kind in expected}
    assert actors == expected
    for event in events:
        at_work = event.actor.kind != rendezvous_pb.ACTOR_KIND_SERVICE
        assert event.actor.peer.startswith("ipv4:127.0.0.1:") == at_work, event
    actions = [(line["method"].rpartition("/")[2], line["caller"], line["runs"]) for line in scene.audited()]
    methods = ("RestartRun", "EvictNode", "ReadmitNode", "CloseRun", "DeleteRun")
    assert actions == [(method, operator, [OWN]) for method in methods]


@pytest.mark.parametrize("scene", [TOKENS], indirect=True)
async def test_a_node_is_superseded_only_by_its_own_kind(scene: Scene) -> None:
    """A restarted agent takes over its node id; another caller can't while the lease is valid."""

    async def join(name: str) -> ServiceError | None:
        async with scene.channel(name) as channel:
            settings = rendezvous_pb.RunSettings(min_nodes=1, max_nodes=1)
            for patience in (settings.keep_alive_interval, settings.disconnect_grace):
                patience.FromSeconds(600)
            joined = rendezvous_grpc.RendezvousServiceStub(channel).Join()
            try:
                await joined.write(join_request(OWN, settings=settings))
                await joined.read()
            except grpc.aio.AioRpcError as error:
                return decode(error)
            return None

    assert await join("host-1/node") is None
    error = await join("host-2/node")
    assert error is not None
    assert (error.code, error.reason) == (grpc.StatusCode.PERMISSION_DENIED, "NODE_ID_TAKEN")
    assert "'spiffe://rallypoint.test/host-1/node' is node 'n'" in error.message
    assert await join("host-1/node") is None


async def test_large_requests_do_not_fill_the_audit_log(scene: Scene) -> None:
    """Large requests are cut in the log, and an invalid duration in one causes no unexpected error."""
    async with scene.channel(STRANGER) as channel:
        for _ in range(150):
            await refusal(channel, scene.methods["RendezvousService.CloseRun"], "x" * 100_000)
    assert scene.audit.stat().st_size < 150 * 2_000
    async with scene.channel("operator") as channel:
        drain = DrainRequest(run_id=OWN)
        drain.grace.seconds = 10**15
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await SupervisorServiceStub(channel).Drain(drain)
    assert decode(error.value).reason != "UNEXPECTED_ERROR"
    assert scene.audited()[-1]["method"].endswith("/Drain")


async def test_the_audit_log_has_every_action_and_every_refusal(scene: Scene) -> None:
    """An entry has caller, peer, method and run; a launched command is logged without the values of its environment."""
    async with scene.channel("operator") as channel:
        await refusal(channel, scene.methods["RendezvousService.GetRun"], OWN)
        request = LaunchJobRequest()
        request.spec.run_id, request.spec.environment["KEY"] = OWN, "secret"
        request.spec.command.extend(["python", "train.py"])
        with pytest.raises(grpc.aio.AioRpcError):
            await SupervisorServiceStub(channel).LaunchJob(request)
    async with scene.channel(STRANGER) as channel:
        await refusal(channel, scene.methods["RendezvousService.CloseRun"], FOREIGN)
    launched, refused = scene.audited()
    assert launched.pop("time") <= refused.pop("time")
    assert launched.pop("peer").startswith("ipv4:127.0.0.1:")
    assert launched == {
        "event": "operator call",
        "method": "rallypoint.agent.v1.SupervisorService/LaunchJob",
        "caller": "spiffe://rallypoint.test/operator",
        "runs": [OWN],
        "request": {"spec": {"run_id": OWN, "command": ["python", "train.py"], "environment": ["KEY"]}},
    }
    assert (refused["event"], refused["caller"]) == ("call refused", "spiffe://rallypoint.test/stranger")
    assert refused["runs"] == [FOREIGN]
    assert "'spiffe://rallypoint.test/stranger' may not call CloseRun" in refused["problem"]
    assert scene.audit.stat().st_mode & 0o777 == 0o600
