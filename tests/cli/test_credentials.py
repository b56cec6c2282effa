"""`rallypoint tls init` and `rallypoint token`: their files secure connections, and no file is overwritten."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from cli.cli_process import RALLYPOINT, rallypoint, refusal, service
from rallypoint.cli.main import main

BOB = "spiffe://example.org/ns/training/bob"


def init(*arguments: str | Path) -> str:
    """Run the command in this process; return its output."""
    result = CliRunner().invoke(main, ["tls", "init", *map(str, arguments)])
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def refused(*arguments: str | Path, command: tuple[str, ...] = ("tls", "init")) -> str:
    """Return the one line with which the command is refused."""
    result = CliRunner().invoke(main, [*command, *map(str, arguments)])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    return result.stderr


def test_the_printed_commands_use_mutual_tls(tmp_path: Path) -> None:
    """The server's certificate serves an agent as a client too; a client without a certificate is refused."""
    output = init(tmp_path / "a b", "head.example").splitlines()
    serve, run, status = (shlex.split(line)[2:] for line in output if line.startswith("  rallypoint "))
    with service(
        "rendezvous", "--journal", "memory", *serve[1:], "--host", "localhost", "--port", "0"
    ) as own:
        at = ("--rdzv-endpoint", f"localhost:{own.rpartition(':')[2]}")
        for flags in (status, run[:-1]):
            result = rallypoint("status", *flags, *at)
            assert (result.returncode, result.stderr) == (0, "")
        stranger = rallypoint("status", *status[:-4], *at)
        assert "it may require a client certificate" in refusal(stranger)


def test_each_certificate_has_its_names_uses_and_days(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    init(folder, "head", "10.0.0.1", "[fd00::1]", "--client", "alice", "--client", BOB, "--days", "7")
    ca = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0
    assert ca.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    addresses = [ip_address(each) for each in ("10.0.0.1", "fd00::1", "127.0.0.1", "::1")]
    for stem, name, dns, others, usages in (
        ("server", "server", ["head", "localhost"], addresses, both),
        ("alice", "alice", ["alice"], [], both[1:]),
        ("bob", BOB, [], [BOB], both[1:]),
    ):
        each = x509.load_pem_x509_certificate((folder / f"{stem}.pem").read_bytes())
        each.verify_directly_issued_by(ca)
        found = each.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert each.subject.rfc4514_string() == f"CN={name}"
        assert found.get_values_for_type(x509.DNSName) == dns
        assert [general.value for general in found if not isinstance(general, x509.DNSName)] == others
        assert list(each.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == usages
        assert timedelta(days=6) < each.not_valid_after_utc - datetime.now(UTC) <= timedelta(days=7)


def test_keys_are_of_this_user_only_and_no_file_is_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "tls"
    init(folder, "head")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.glob("*.key"))}
    assert modes == {"tls": 0o700, "ca.key": 0o600, "server.key": 0o600, "client.key": 0o600}
    for name in ("server.pem", "ca.key"):
        (folder / name).unlink()
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert "ca.pem exists, and nothing is overwritten" in refused(folder, "head")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["head:29400"], "'head:29400' is no host name and no address"),
        (["10.0.0.300"], "is no host name and no address"),
        (["unix:/s"], "is no host name and no address"),
        (["::"], "is no address that clients connect to"),
        (["h", "--client", "a/b"], "'a/b' is no name for a client"),
        (["h", "--client", "spiffe://example.org/.."], "is no name for a client"),
        (["h", "--client", f"spiffe://example.org/{'x' * 64}"], "is longer than 64 characters"),
        (["h", "--client", "server"], "would be those of the server"),
        (["h", "--client", "bob", "--client", BOB], "two clients would have the files bob.pem"),
        (["h", "--days", "0"], "0 is not in the range"),
        (["h", "--days", "3651"], "3651 is not in the range"),
        ([], "Missing argument 'HOST...'"),
    ],
)
def test_bad_input_is_refused_in_one_line(tmp_path: Path, arguments: list[str], reason: str) -> None:
    assert reason in refused(tmp_path / "tls", *arguments)
    assert not (tmp_path / "tls").exists()


def test_files_that_can_not_be_written_are_named_and_leave_nothing_behind(tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "tls"
    file.touch()
    assert "is a file" in refused(file, "h")
    assert f"can't write {file / 'tls'}: Not a directory" in refused(file / "tls", "h")
    full = ("sh", "-c", 'ulimit -f 0; exec "$@"', "sh", str(RALLYPOINT))
    line = refusal(rallypoint("tls", "init", folder, "h", program=full))
    assert line == f"can't write {folder / 'ca.pem'}: File too large"
    assert list(folder.iterdir()) == []


def token(*arguments: str | Path, given: str = "") -> str:
    """Run `rallypoint token` in this process; return its output."""
    result = CliRunner().invoke(main, ["token", *map(str, arguments)], input=given)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def test_a_token_is_issued_for_a_role_and_runs_and_shows_that(tmp_path: Path) -> None:
    """The key is private; inspecting with the public key shows if a server accepts the token."""
    key, public = tmp_path / "keys/token.key", tmp_path / "keys/token.pub"
    assert str(public) in token("key", key.parent)
    assert key.stat().st_mode & 0o777 == 0o600
    text = token("issue", "ci-bot", "--key", key, "--role", "node", "--role", "observer", "--run", "train-*")
    shown = token("inspect", "--keys", public, given=text).splitlines()
    assert [line.split(maxsplit=1)[1] for line in shown[:3]] == ["ci-bot", "node, observer", "train-*"]
    assert shown[-1] == "valid"
    token("key", tmp_path / "other")
    other = tmp_path / "other/token.pub"
    told = CliRunner().invoke(main, ["token", "inspect", "--keys", str(other)], input=text)
    assert (told.exit_code, "which this server does not know" in told.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("key", "{keys}"), "exists, and nothing is overwritten"),
        (("issue", "x", "--key", "{keys}/token.pub", "--role", "node"), "holds no private Ed25519 key"),
        (("issue", "x", "--key", "{keys}/none", "--role", "node"), "No such file"),
        (("issue", "x", "--key", "{keys}/token.key", "--role", "boss"), "'boss' is not one of"),
        (("issue", "x", "--key", "{keys}/token.key", "--role", "node", "--hours", "nan"), "nan"),
        (("inspect", "{keys}/token.pub"), "the token is not valid"),
        (("inspect", "{keys}/none"), "No such file"),
    ],
)
def test_an_error_in_a_token_command_is_reported(
    tmp_path: Path, arguments: tuple[str, ...], told: str
) -> None:
    """The error is one line."""
    token("key", tmp_path / "k")
    assert told in refused(*(each.format(keys=tmp_path / "k") for each in arguments), command=("token",))
