"""`rallypoint serve`: each role is a server by itself, and an error at its start is one line."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc.aio
import pytest
from click.testing import CliRunner

from cli.cli_process import rallypoint, refusal, service
from cli.serving import Serving
from rallypoint.cli import serve as serve_module
from rallypoint.cli.main import main
from rallypoint.rendezvous.base.limits import Limits, RendezvousLimits, StateLimits, StoreLimits
from rallypoint.rendezvous.journal.journal import Record
from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.rpc.errors import decode
from rallypoint.rpc.runtime_folder import role_socket
from support.joining import join_request
from support.waiting import PATIENCE

KEEPING_NOTHING = {"rendezvous": ("--journal", "memory"), "timer": ("--learned", "none")}


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def arguments(role: str) -> list[str]:
    """Return a role's arguments besides the port, such that it leaves no file behind."""
    return ["serve", role, *KEEPING_NOTHING.get(role, ())]


def refused(monkeypatch: pytest.MonkeyPatch, *flags: str | Path) -> str:
    """Return the one line with which a command is refused, in this process."""
    monkeypatch.setattr(serve_module, "configure_logs", lambda *_: None)
    result = CliRunner().invoke(main, ["serve", *map(str, flags)])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    return result.stderr.removeprefix("Error: ").strip()


def test_a_port_in_use_is_reported_in_one_line(taken: int) -> None:
    """The line has the address and the flag, and the process has exited."""
    told = refusal(rallypoint(*arguments("rendezvous"), "--port", str(taken)))
    assert told == f"127.0.0.1:{taken} is in use: choose another --port, or stop what listens there"


@pytest.mark.parametrize("role", ["rendezvous", "timer", "agent"])
def test_every_role_looks_at_its_port(monkeypatch: pytest.MonkeyPatch, role: str, taken: int) -> None:
    """All roles start their server by the same code."""
    assert "is in use" in refused(monkeypatch, *arguments(role)[1:], "--port", str(taken))


def test_unreadable_tls_files_are_named_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The line has the flag, the file, and the reason."""
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    for file, reason in ((tmp_path / "none.pem", "No such file"), (tmp_path, "directory"), (garbage, "PEM")):
        told = refused(
            monkeypatch, *arguments("timer")[1:], "--port", "0", "--tls-cert", file, "--tls-key", file
        )
        assert told.startswith(f"--tls-cert {file}")
        assert reason in told


def test_plaintext_on_a_network_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag allows it; the line has the alternatives."""
    told = refused(monkeypatch, *arguments("timer")[1:], "--port", "0", "--host", "0.0.0.0")  # noqa: S104
    assert told.startswith("refusing to serve plaintext at 0.0.0.0:0")
    assert "--tls-cert" in told


@pytest.mark.parametrize(
    ("journal", "expected"),
    [
        ("file.db", "--journal: 'file.db' is not a journal; expected memory, sqlite:PATH or etcd://…"),
        ("sqlite:", "--journal: 'sqlite:' is not a journal"),
        ("sqlite:/proc/none/file.db", "can't open the journal /proc/none/file.db"),
    ],
)
def test_an_invalid_journal_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, journal: str, expected: str
) -> None:
    """The line states the expected form."""
    assert expected in refused(monkeypatch, "rendezvous", "--port", "0", "--journal", journal)


def flip_a_bit(file: Path) -> None:
    """Flip a bit of a page in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def cut_in_half(file: Path) -> None:
    """Drop the second half."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def write_another_file(file: Path) -> None:
    """Replace the file, as a wrong path would."""
    file.write_text("no database at all\n" * 99)


@pytest.mark.parametrize("damage", [flip_a_bit, cut_in_half, write_another_file])
def test_a_corrupt_journal_is_refused_and_not_touched(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """A user who wants to rescue its content finds every byte unchanged, and no file beside it but the lock."""
    file = tmp_path / "journal.db"
    asyncio.run(write_journal(file))
    damage(file)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}, file.stat().st_mtime_ns
    told = refusal(rallypoint("serve", "rendezvous", "--port", "0", "--journal", f"sqlite:{file}"))
    assert told.startswith(f"the journal {file} is damaged (")
    assert "was not touched; restore it from a backup, or move it away" in told
    assert ({path.name: path.read_bytes() for path in tmp_path.iterdir()}, file.stat().st_mtime_ns) == before


async def write_journal(file: Path) -> None:
    """Write a journal with some entries."""
    journal = SqliteJournal(file)
    await journal.open()
    await journal.append([Record("x" * 200, revision, b"fact") for revision in range(1, 200)])
    await journal.close()


def test_two_services_can_not_share_a_journal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second one reports it, before it listens."""
    journal = f"sqlite:{tmp_path / 'journal.db'}"
    with service("rendezvous", "--journal", journal):
        told = refused(monkeypatch, "rendezvous", "--port", "0", "--journal", journal)
    assert "is in use by another process" in told
    assert "--journal" in told


# Every limit that has a flag, with a value that no default has.
LIMITS = {
    "--max-runs": 11,
    "--max-nodes-per-run": 12,
    "--max-subscribers-per-run": 13,
    "--max-events-per-run": 14,
    "--max-event-bytes-per-run": 15,
    "--run-ttl": 16.5,
    "--message-rate": 17.5,
    "--message-burst": 18,
    "--max-store-bytes": 30,
    "--max-store-bytes-per-run": 19,
    "--max-store-keys-per-run": 20,
    "--max-store-waiters-per-run": 21,
    "--max-store-waited-keys-per-run": 22,
    "--max-store-queued-bytes-per-run": 23,
    "--max-states": 24,
    "--max-states-per-client": 31,
    "--max-state-bytes-per-client": 32,
    "--max-runs-per-client": 33,
    "--max-store-bytes-per-client": 34,
    "--max-state-bytes": 25,
    "--max-state-queued-bytes": 26,
    "--max-state-watchers": 27,
    "--state-ttl": 28.5,
    "--max-event-bytes": 29,
}


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Serving:
    return Serving("rendezvous", monkeypatch)


def test_without_flags_the_limits_are_those_of_the_parts(chosen: Serving) -> None:
    """The defaults are defined once, where they are explained."""
    options, _, limits = chosen()
    assert (options, limits) == (ServerOptions(host=role_socket("rendezvous"), port=29400), Limits())


def test_every_limit_can_be_set(chosen: Serving, tmp_path: Path) -> None:
    """By flag, in the environment, in a file; each sets the limit that it is named for."""
    expected = Limits(
        RendezvousLimits(
            runs=11,
            runs_per_client=33,
            nodes_per_run=12,
            subscribers_per_run=13,
            events_per_run=14,
            event_bytes_per_run=15,
            run_ttl=16.5,
            messages_per_second=17.5,
            message_burst=18,
            event_bytes=29,
        ),
        StoreLimits(
            all_bytes=30,
            client_bytes=34,
            run_bytes=19,
            run_keys=20,
            waiters=21,
            waited_keys=22,
            queued_bytes=23,
        ),
        StateLimits(
            states=24, states_per_client=31, state_bytes=25, client_bytes=32, queued_bytes=26, watchers=27
        ),
        28.5,
    )
    assert [limits for *_, limits in chosen.in_each_way(LIMITS, tmp_path / "config.toml")] == [expected] * 3


def test_the_rate_of_requests_can_be_set(chosen: Serving) -> None:
    """Every role has the flags, since every server has clients."""
    options, *_ = chosen("--request-rate", "0", "--request-burst", "7", "--request-byte-rate", "0")
    assert (options.request_rate, options.request_burst, options.request_byte_rate) == (0.0, 7, 0)


@pytest.mark.parametrize("flag", [*LIMITS, "--request-rate", "--request-burst", "--request-byte-rate"])
@pytest.mark.parametrize("value", ["-1", "nan", "inf", "many", ""])
def test_an_invalid_limit_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, flag: str, value: str
) -> None:
    """The line has the flag and its value."""
    told = refused(monkeypatch, "rendezvous", "--port", "0", "--journal", "memory", f"{flag}={value}")
    assert flag in told
    assert value in told


async def test_limits_hold_on_the_wire() -> None:
    """A flag must have an effect."""
    with service(
        "rendezvous", "--journal", "memory", "--max-runs", "1", "--request-burst", "9", "--request-rate", "1"
    ) as address:
        async with open_channel(address) as channel:
            stub = pb_grpc.RendezvousServiceStub(channel)
            reasons = [await join_refused(stub, name) for name in ("first", "second")]
            assert reasons == [None, "TOO_MANY_RUNS"]
            asked = (stub.ListRuns(pb.ListRunsRequest(), timeout=PATIENCE) for _ in range(9))
            results = await asyncio.gather(*asked, return_exceptions=True)
            told = [decode(result).reason for result in results if isinstance(result, grpc.aio.AioRpcError)]
            assert told
            assert set(told) == {"TOO_MANY_REQUESTS"}


async def join_refused(stub: pb_grpc.RendezvousServiceAsyncStub, run_id: str) -> str | None:
    """Return the reason for which a node is refused, or None if it got its lease."""
    call = stub.Join(timeout=PATIENCE)
    await call.write(join_request(run_id))
    try:
        response = await call.read()
    except grpc.aio.AioRpcError as error:
        return decode(error).reason
    assert isinstance(response, pb.JoinResponse)
    assert response.lease.number > 0
    call.cancel()
    return None
