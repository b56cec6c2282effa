"""`rallypoint serve`: each role stands alone, and what keeps it from starting is told in one line."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.cli_process import rallypoint, refusal, service
from rallypoint.cli import serve as serve_module
from rallypoint.cli.main import main
from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rallypoint.rendezvous.v1.journal_pb2 import JournalRecord


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def arguments(role: str) -> list[str]:
    """What a role needs besides the port, so as to leave no file behind."""
    return ["serve", role, *(["--journal", "memory"] if role == "rendezvous" else [])]


def refused(monkeypatch: pytest.MonkeyPatch, *flags: str | Path) -> str:
    """The one line with which a command is refused, in this process."""
    monkeypatch.setattr(serve_module, "configure_logs", lambda *_: None)
    result = CliRunner().invoke(main, ["serve", *map(str, flags)])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    return result.stderr.removeprefix("Error: ").strip()


def test_a_port_in_use_is_told_in_one_line(taken: int) -> None:
    """With the address and the flag, by a process that is not there any more."""
    told = refusal(rallypoint(*arguments("rendezvous"), "--port", str(taken)))
    assert told == f"127.0.0.1:{taken} is in use: choose another --port, or stop what listens there"


@pytest.mark.parametrize("role", ["rendezvous", "timer", "agent"])
def test_every_role_looks_at_its_port(monkeypatch: pytest.MonkeyPatch, role: str, taken: int) -> None:
    """One way to stand a service up."""
    assert "is in use" in refused(monkeypatch, *arguments(role)[1:], "--port", str(taken))


def test_unreadable_tls_files_are_told_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the flag, the file, and the reason."""
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    for file, reason in ((tmp_path / "none.pem", "No such file"), (tmp_path, "directory"), (garbage, "PEM")):
        told = refused(monkeypatch, "timer", "--port", "0", "--tls-cert", file, "--tls-key", file)
        assert told.startswith(f"--tls-cert {file}")
        assert reason in told


def test_plaintext_for_others_to_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless one insists; what to do instead is in the line."""
    told = refused(monkeypatch, "timer", "--port", "0", "--host", "0.0.0.0")  # noqa: S104
    assert told.startswith("refusing to serve plaintext on 0.0.0.0:0")
    assert "--tls-cert" in told


@pytest.mark.parametrize(
    ("journal", "expected"),
    [
        ("file.db", "--journal: 'file.db' is no journal; expected memory, or sqlite:PATH"),
        ("sqlite:", "--journal: 'sqlite:' is no journal"),
        ("sqlite:/proc/none/file.db", "can't open the journal /proc/none/file.db"),
    ],
)
def test_a_journal_that_can_not_be_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, journal: str, expected: str
) -> None:
    """With what is expected."""
    assert expected in refused(monkeypatch, "rendezvous", "--port", "0", "--journal", journal)


def flip_a_bit(file: Path) -> None:
    """Damage a page in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def cut_in_half(file: Path) -> None:
    """Lose the second half."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def write_another_file(file: Path) -> None:
    """Mistake the path."""
    file.write_text("no database at all\n" * 99)


@pytest.mark.parametrize("damage", [flip_a_bit, cut_in_half, write_another_file])
def test_a_corrupt_journal_is_refused_and_not_touched(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Whoever wants to rescue what is in it finds every byte as it was, and no file beside it but the lock."""
    file = tmp_path / "journal.db"
    asyncio.run(write_journal(file))
    damage(file)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}, file.stat().st_mtime_ns
    told = refusal(rallypoint("serve", "rendezvous", "--port", "0", "--journal", f"sqlite:{file}"))
    assert told.startswith(f"the journal {file} is damaged (")
    assert "was not touched; restore it from a backup, or move it away" in told
    assert ({path.name: path.read_bytes() for path in tmp_path.iterdir()}, file.stat().st_mtime_ns) == before


async def write_journal(file: Path) -> None:
    """A journal with something in it."""
    journal = SqliteJournal(file)
    await journal.open()
    await journal.append([JournalRecord(run_id="x" * 200, revision=revision) for revision in range(1, 200)])
    await journal.close()


def test_two_services_can_not_share_a_journal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second one says so, before it listens."""
    journal = f"sqlite:{tmp_path / 'journal.db'}"
    with service("rendezvous", "--journal", journal):
        told = refused(monkeypatch, "rendezvous", "--port", "0", "--journal", journal)
    assert "is in use by another process" in told
    assert "--journal" in told
