"""Flags win over the environment, that over the file, that over defaults; every mistake costs one clear line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from rallypoint.rpc.endpoint import (
    AccessFiles,
    ClientTLS,
    Plaintext,
    RunSecret,
    ServerOptions,
    ServiceStartError,
)
from rallypoint.rpc.runtime_folder import role_socket
from rallypoint.serving.options import Setting, client_options, server_options

Run = Callable[..., Result]

SECRET = "0123456789abcdef"  # noqa: S105 (of tests)


@pytest.fixture
def got() -> dict[str, Any]:
    """The arguments that the command received."""
    return {}


@pytest.fixture
def run(got: dict[str, Any], tmp_path: Path) -> Run:
    """Runs a command line; `config` is written to a file and given as --config."""

    @click.group()
    def program() -> None:
        pass

    @program.group()
    def serve() -> None:
        pass

    @serve.command()
    @click.option("--journal", cls=Setting, type=click.Choice(["memory", "sqlite"]), default="sqlite")
    @server_options("timer", 29410)
    @click.option("--label", cls=Setting, multiple=True)
    def timer(**arguments: Any) -> None:
        got.update(arguments)

    @serve.command()
    @server_options("agent", 29420, also_client=True)
    def agent(**arguments: Any) -> None:
        got.update(arguments)

    @serve.command()
    @server_options("rendezvous", 29400)
    def broken(options: ServerOptions) -> None:
        raise ServiceStartError("127.0.0.1:29400 is in use")

    @program.command()
    @client_options
    @click.argument("run_id")
    def status(**arguments: Any) -> None:
        got.update(arguments)

    def invoke(*arguments: str, config: str | None = None, **environment: str) -> Result:
        if config is not None:
            file = tmp_path / "rallypoint.toml"
            file.write_text(config)
            arguments = (*arguments, "--config", str(file))
        return CliRunner().invoke(program, arguments, env=environment, prog_name="rallypoint")

    return invoke


def ok(result: Result) -> None:
    assert result.exit_code == 0, result.output


def test_without_settings_the_defaults_hold(run: Run, got: dict[str, Any]) -> None:
    ok(run("serve", "timer"))
    options = ServerOptions(host=role_socket("timer"), port=29410)
    assert got == {"options": options, "journal": "sqlite", "label": ()}


@pytest.mark.parametrize(
    ("flags", "place"),
    [
        (["--port", "7"], ("127.0.0.1", 7)),
        (["--host", "localhost"], ("localhost", 29410)),
        (["--host", "::", "--port", "0"], ("::", 0)),
    ],
)
def test_a_server_listens_at_the_given_address(
    run: Run, got: dict[str, Any], flags: list[str], place: tuple[str, int]
) -> None:
    ok(run("serve", "timer", *flags))
    assert (got["options"].host, got["options"].port) == place


FILE = (
    '[serve.timer]\nport = 3\ndrain-grace = 3\njournal = "memory"\nlog_level = "error"\nlabel = ["a", "b"]\n'
)


def test_flag_wins_over_environment_over_file_over_default(run: Run, got: dict[str, Any]) -> None:
    ok(
        run(
            "serve",
            "timer",
            "--port",
            "1",
            config=FILE,
            RALLYPOINT_PORT="2",
            RALLYPOINT_DRAIN_GRACE="2",
            RALLYPOINT_INSECURE="true",
        )
    )
    options = got["options"]
    assert (options.port, options.drain_grace, options.log_level, options.host) == (
        1,
        2.0,
        "error",
        "127.0.0.1",
    )
    assert options.insecure is True
    assert got["journal"] == "memory"
    assert got["label"] == ("a", "b")


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "3601"])
def test_an_invalid_time_is_refused(run: Run, text: str) -> None:
    """No loop can wait for it, or for its end."""
    result = run("serve", "timer", "--drain-grace", text)
    assert result.exit_code == 2
    assert "--drain-grace" in result.output


def test_a_flag_can_turn_off_a_setting_of_the_file(run: Run, got: dict[str, Any]) -> None:
    ok(run("serve", "timer", "--no-insecure", config="[serve.timer]\ninsecure = true\n"))
    assert got["options"].insecure is False


def test_the_file_itself_can_be_named_by_the_environment(
    run: Run, got: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "elsewhere.toml"
    file.write_text('[serve.timer]\nport = 5\njournal = "memory"\n')
    ok(run("serve", "timer", RALLYPOINT_CONFIG=str(file)))
    assert got["options"].port == 5
    assert got["journal"] == "memory"


def test_a_command_reads_its_own_table_only(run: Run, got: dict[str, Any]) -> None:
    ok(run("serve", "agent", config=FILE + "[serve.agent]\nport = 7\n[status]\n"))
    assert got["options"].port == 7
    assert got["options"].log_level == "info"


def test_every_setting_has_a_flag_and_an_environment_variable(run: Run) -> None:
    text = run("serve", "timer", "--help").output
    words = set(text.replace("/", " ").split())
    for field in (ServerOptions.__dataclass_fields__ | AccessFiles.__dataclass_fields__).keys() - {"access"}:
        name = "run_secret_file" if field == "run_secret" else field
        assert f"--{name.replace('_', '-')}" in words
        assert f"RALLYPOINT_{name.upper()}" in text
    assert "RALLYPOINT_JOURNAL" in text


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ("[serve.timer]\nprot = 1", "[serve.timer] has the unknown key 'prot', did you mean 'port'?"),
        ("[serve.timer]\nzzz = 1", "[serve.timer] has the unknown key 'zzz' (known: "),
        ("[serve.timer]\nconfig = 'x'", "unknown key 'config'"),
        ("[serve.timer]\nhelp = true", "unknown key 'help'"),
        ("[serve.timr]\nport = 1", "[serve.timr] is no command, did you mean 'timer'?"),
        ("[timer]\nport = 1", "[timer] is no command"),
        ("serve = 1", "serve must be a table, [serve], not an integer"),
        ("[serve]\ntimer = 'x'", "serve.timer must be a table, [serve.timer], not a string"),
        ("[serve.timer]\nport = '1'", "[serve.timer] port must be an integer, not a string"),
        ("[serve.timer]\nport = true", "[serve.timer] port must be an integer, not a boolean"),
        ("[serve.timer]\nport = 1.0", "[serve.timer] port must be an integer, not a float"),
        ("[serve.timer]\nport = [1]", "[serve.timer] port must be an integer, not an array"),
        ("[serve.timer]\nport = 65536", "[serve.timer] port: 65536 is not in the range"),
        ("[serve.timer]\ndrain-grace = '5s'", "[serve.timer] drain-grace must be a float, not a string"),
        ("[serve.timer]\ninsecure = 1", "[serve.timer] insecure must be a boolean, not an integer"),
        ("[serve.timer]\nhost = 1", "[serve.timer] host must be a string, not an integer"),
        ("[serve.timer]\ntls-cert = {a = 1}", "[serve.timer] tls-cert must be a string, not a table"),
        ("[serve.timer]\nhost = 2026-01-01", "[serve.timer] host must be a string, not a date or time"),
        ("[serve.timer]\nlabel = 'a'", "[serve.timer] label must be an array, not a string"),
        ("[serve.timer]\nlabel = [1]", "[serve.timer] label must be a string, not an integer"),
        ("[serve.timer]\nlog-level = 'loud'", "[serve.timer] log-level: 'loud' is not one of"),
        ("[serve.timer]\njournal = 'tape'", "[serve.timer] journal: 'tape' is not one of"),
        ("[serve.timer]\ntls-key = 'a'\ntls_key = 'b'", "sets 'tls_key' twice"),
        ("port = = 1", "is not TOML"),
    ],
)
def test_a_mistake_in_the_file_costs_one_line_that_names_file_and_key(
    run: Run, got: dict[str, Any], config: str, complaint: str
) -> None:
    result = run("serve", "timer", config=config)
    assert result.exit_code == 2
    assert got == {}
    [line] = result.output.splitlines()
    assert complaint in line
    assert "rallypoint.toml" in line


def test_a_file_that_cannot_be_read_is_named(run: Run, tmp_path: Path) -> None:
    for file, complaint in ((tmp_path / "absent", "No such file"), (tmp_path, "Is a directory")):
        result = run("serve", "timer", "--config", str(file))
        assert result.exit_code == 2
        assert f"cannot read --config {file}: {complaint}" in result.output


def test_bytes_that_are_no_text_are_no_toml(run: Run, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    result = run("serve", "timer", "--config", str(tmp_path / "binary"))
    assert result.exit_code == 2
    assert "is not TOML" in result.output


@pytest.mark.parametrize(
    ("arguments", "environment", "complaint"),
    [
        (["--port", "x"], {}, "--port"),
        (["--port", "65536"], {}, "--port"),
        (["--drain-grace", "-1"], {}, "--drain-grace"),
        (["--log-format", "xml"], {}, "--log-format"),
        ([], {"RALLYPOINT_PORT": "tcp://10.0.0.1:29400"}, "RALLYPOINT_PORT"),
    ],
)
def test_a_mistake_on_the_command_line_or_in_the_environment_is_named(
    run: Run, arguments: list[str], environment: dict[str, str], complaint: str
) -> None:
    result = run("serve", "timer", *arguments, **environment)
    assert result.exit_code == 2
    assert complaint in result.output.splitlines()[-1]


def test_a_server_that_cannot_start_costs_one_line_and_exit_code_2(run: Run) -> None:
    result = run("serve", "broken")
    assert (result.exit_code, result.output) == (2, "Error: 127.0.0.1:29400 is in use\n")


def test_a_client_is_secured_according_to_its_flags(run: Run, got: dict[str, Any], tmp_path: Path) -> None:
    ok(run("status", "r1"))
    assert got == {"security": None, "run_id": "r1"}
    ok(run("status", "r1", "--insecure"))
    assert got["security"] == Plaintext()
    ok(run("status", "r1", RALLYPOINT_RUN_SECRET=f" {SECRET}\n"))
    assert got["security"] == RunSecret(SECRET)
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    ok(run("status", "r1", "--run-secret-file", str(tmp_path / "secret")))
    assert got["security"] == RunSecret(SECRET)
    ok(run("status", "r1", "--tls-ca", "ca.pem", RALLYPOINT_TLS_CERT="c.pem", RALLYPOINT_TLS_KEY="k.pem"))
    assert got["security"] == ClientTLS(Path("ca.pem"), Path("c.pem"), Path("k.pem"))


@pytest.mark.parametrize(
    ("flags", "environment", "complaint"),
    [
        (["--insecure"], {"RALLYPOINT_RUN_SECRET": SECRET}, "--insecure and the run secret contradict"),
        (["--insecure", "--tls-ca", "c.pem"], {}, "--insecure and the --tls flags contradict"),
        ([], {"RALLYPOINT_RUN_SECRET": "short"}, "RALLYPOINT_RUN_SECRET has 5 characters"),
        (["--run-secret-file", "/nowhere"], {}, "--run-secret-file /nowhere: No such file"),
        ([], {"RALLYPOINT_RUN_SECRET_FILE": "/nowhere"}, "--run-secret-file /nowhere: No such file"),
    ],
)
def test_an_invalid_secret_costs_one_line(
    run: Run, flags: list[str], environment: dict[str, str], complaint: str
) -> None:
    result = run("status", "r1", *flags, **environment)
    assert result.exit_code == 2
    assert complaint in result.output
    assert len(result.output.splitlines()) == 1


def test_a_server_that_is_a_client_too_shows_its_certificate_there(run: Run, got: dict[str, Any]) -> None:
    ok(run("serve", "agent", "--tls-cert", "c.pem", "--tls-key", "k.pem"))
    assert got["security"] is None
    ok(run("serve", "agent", "--tls-cert", "c.pem", "--tls-key", "k.pem", "--tls-ca", "ca.pem"))
    assert got["security"] == ClientTLS(Path("ca.pem"), Path("c.pem"), Path("k.pem"))
    assert got["options"].tls_cert == Path("c.pem")


def test_a_single_command_reads_the_top_of_the_file(tmp_path: Path) -> None:
    seen = []

    @click.command()
    @server_options("rendezvous", 29400)
    def alone(options: ServerOptions) -> None:
        seen.append(options.port)

    file = tmp_path / "alone.toml"
    file.write_text("port = 9\n")
    assert CliRunner().invoke(alone, ["--config", str(file)]).exit_code == 0
    assert seen == [9]
