"""rallypoint.toml: contexts and values for the commands of clients, and their precedence."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.cli_process import rallypoint, refusal, service
from cli.test_run import Understood, script, understood
from rallypoint.launcher.plan import Embedded, ExternalService, Hosted

__all__ = ["script", "understood"]

FILE = """
current = "here"

[contexts.here]
rdzv-endpoint = "{here}"
insecure = false

[contexts.away]
rdzv_endpoint = "127.0.0.1:1"
timer-endpoint = "127.0.0.1:2"
insecure = true

[status]
timeout = 0.5

[serve.timer]
port = 29410
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's settings folder with such a file."""
    (tmp_path / "rallypoint.toml").write_text(FILE.format(here="127.0.0.1:3"))
    return tmp_path


def test_a_command_without_flags_uses_the_current_context(tmp_path: Path) -> None:
    """The context is of the user's file, or of the file that a flag or a variable names."""
    with service("rendezvous", "--journal", "memory") as endpoint:
        file = tmp_path / "rallypoint.toml"
        file.write_text(FILE.format(here=endpoint))
        for given, environment in (
            ((), {"XDG_CONFIG_HOME": str(tmp_path)}),
            ((), {"HOME": str(tmp_path), "XDG_CONFIG_HOME": "", "RALLYPOINT_CONFIG": str(file)}),
            (("--config", file, "--context", "here"), {}),
            (("--context", "here", "--config", file), {}),
        ):
            result = rallypoint("status", *given, environment=environment)
            assert (result.returncode, result.stderr) == (0, "")


def test_a_flag_wins_over_a_variable_over_the_file(folder: Path) -> None:
    """The command's table wins over the context."""
    here = {"XDG_CONFIG_HOME": str(folder)}
    other = {"RALLYPOINT_RDZV_ENDPOINT": "127.0.0.1:4", "RALLYPOINT_INSECURE": "1"}
    away = {"RALLYPOINT_CONTEXT": "away"}
    assert "127.0.0.1:1" in refusal(rallypoint("status", environment=here | away))
    assert "127.0.0.1:4" in refusal(rallypoint("status", environment=here | away | other))
    result = rallypoint("status", "--rdzv-endpoint", "127.0.0.1:5", environment=here | away | other)
    assert "127.0.0.1:5" in refusal(result)
    with (folder / "rallypoint.toml").open("a") as file:
        file.write('[close]\nrdzv-endpoint = "127.0.0.1:6"\ntimeout = 0.5\n')
    assert "127.0.0.1:6" in refusal(rallypoint("close", "x", environment=here | away))


@pytest.mark.parametrize(
    ("content", "given", "reason"),
    [
        ("", ["--context", "x"], "has no context 'x'"),
        ("[contexts.prod]", ["--context", "pro"], "has no context 'pro', did you mean 'prod'?"),
        ("current = 1", [], "has no context 1"),
        ("contexts = 1", [], "contexts must be tables"),
        (
            '[contexts.a]\nrdzv-end = "x"',
            ["--context=a"],
            "unknown key 'rdzv-end', did you mean 'rdzv-endpoint'?",
        ),
        (
            "[contexts.a]\nrdzv-endpoint = 1",
            ["--context=a"],
            "rdzv-endpoint must be a string, not an integer",
        ),
        ("[stauts]", [], "[stauts] is no command, did you mean 'status'?"),
        ("[status]\nlimt = 1", [], "[status] has the unknown key 'limt'"),
        ("=", [], "is not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(
    tmp_path: Path, content: str, given: list[str], reason: str
) -> None:
    """The line names file, table and key."""
    file = tmp_path / "rallypoint.toml"
    file.write_text(content)
    line = refusal(rallypoint("status", *given, environment={"XDG_CONFIG_HOME": str(tmp_path)}))
    assert reason in line
    assert str(file) in line


def test_a_file_with_a_password_that_others_can_read_is_refused(
    tmp_path: Path, understood: Understood
) -> None:
    """The line has the command that corrects it."""
    file = tmp_path / "rallypoint.toml"
    file.write_text('[contexts.a]\nrdzv-endpoint = "etcd://me:hidden@host:2379/run"\n')
    file.chmod(0o640)
    line = refusal(rallypoint("run", "--config", file, "--context=a", "--no-python", "/bin/true"))
    assert line == f"{file} holds a password, and others can read it: chmod 600 {file}"
    file.chmod(0o600)
    assert understood.of("--config", file, "--context=a", "--no-python", "/bin/true").run_id == "run"


def test_a_job_of_one_host_is_the_same_with_an_address_for_all_commands(
    folder: Path, understood: Understood, script: Path
) -> None:
    """`rallypoint run train.py` needs no service; one line names the unused setting. With a run id it is used."""
    away = {"XDG_CONFIG_HOME": str(folder), "RALLYPOINT_CONTEXT": "away"}
    for environment, origin in (
        ({"RALLYPOINT_RDZV_ENDPOINT": "127.0.0.1:1"}, "RALLYPOINT_RDZV_ENDPOINT is not used"),
        (away, "rdzv-endpoint of the context is not used"),
    ):
        for flags, place in (
            ([], Embedded()),
            (["--nnodes=1"], Embedded()),
            (["--nnodes=2", "--node-rank=0", "--master-addr=head"], Hosted("head:29501", here=True)),
        ):
            plan = understood.of(*flags, script, environment=environment)
            assert (plan.service, plan.timer_endpoint) == (place, "")
            (notice,) = plan.notices
            assert notice.startswith(origin)
        for also, why in (([], origin.split()[0]), (["--standalone"], "leave --nnodes out")):
            assert why in refusal(rallypoint("run", "--nnodes=2", *also, script, environment=environment))
        for more in (["--rdzv-id=x"], ["--nnodes=1", "--rdzv-id=x"]):
            plan = understood.of(*more, script, environment=environment)
            assert plan.service == ExternalService("127.0.0.1:1")
    assert plan.timer_endpoint == "127.0.0.1:2"
    assert understood.of(
        "--rdzv-endpoint=a:1", "--rdzv-id=x", script, environment=away
    ).service == ExternalService("a:1")
