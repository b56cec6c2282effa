"""`rallypoint`: the help of every command loads no gRPC, and a mistyped command is answered in one line."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.cli_process import rallypoint, refusal
from rallypoint.cli.main import main

COMMANDS = [
    [],
    ["run"],
    ["serve"],
    ["serve", "rendezvous"],
    ["serve", "timer"],
    ["serve", "agent"],
    ["status"],
    ["progress"],
    ["timers"],
    ["scopes"],
    ["close"],
    ["completion"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_command_has_help(command: list[str], flag: str) -> None:
    """The help has a usage line, a description of the command, and its options."""
    result = CliRunner().invoke(main, [*command, flag])
    assert result.exit_code == 0
    first, *rest = result.output.splitlines()
    assert first.startswith(
        " ".join(["Usage: rallypoint", *command]).replace("Usage: rallypoint", "Usage: main")
    )
    assert len(rest[1].strip()) > 20
    assert re.search(r"^  -h, --help +Show this message", result.output, re.MULTILINE)


@pytest.mark.parametrize("module", ["rallypoint", "rallypoint.cli.main"])
def test_python_runs_it_as_a_module(module: str, tmp_path: Path) -> None:
    """It replaces `python -m torch.distributed.run` in batch scripts: the installed program, from any folder."""
    python = [sys.executable, "-m", module]
    script = tmp_path / "train.py"
    script.write_text("import os; print('rank', os.environ['RANK'])")
    ran = rallypoint("run", "--standalone", "--log-level", "warning", script, program=python)
    assert (ran.returncode, ran.stdout) == (0, "rank 0\n"), ran.stderr
    assert "`rallypoint run --help`" in refusal(rallypoint("run", "--no-such-flag", program=python))


def test_the_commands_are_listed_as_they_introduce_themselves() -> None:
    """The list is written by hand, so that it costs no imports; it must not go out of date."""
    result = CliRunner().invoke(main, ["--help"])
    for name in ("run", "serve", "status", "progress", "timers", "scopes", "close", "completion"):
        assert f"\n  {name} " in result.output
        assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "run --help",
        "status --help",
        "progress --help",
        "timers --help",
        "scopes --help",
        "close --help",
        "tls init --help",
        "completion bash",
    ],
)
def test_help_and_completion_load_no_grpc(command: str) -> None:
    """gRPC takes longer than all the rest, and completion runs at every press of the Tab key."""
    program = f"""
import sys
from rallypoint.cli.main import main
try:
    main({command.split()!r})
finally:
    assert not [name for name in sys.modules if name.split(".")[0] in ("cryptography", "grpc")]
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_version_is_that_of_the_distribution() -> None:
    """The version has one source."""
    result = CliRunner().invoke(main, ["--version"], prog_name="rallypoint")
    assert result.output == f"rallypoint, version {version('rallypoint')}\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["statsu"], "No such command 'statsu'"),
        (["serve", "everything"], "No such command 'everything'"),
        (["--verbose"], "No such option '--verbose'"),
        (["status", "--joson"], "No such option '--joson'"),
        (["close"], "Missing argument 'RUN_ID'"),
        (["completion", "cmd"], "'cmd' is not one of 'bash', 'zsh', 'fish'"),
        (["status", "a", "b"], "Got unexpected extra argument (b)"),
        (["serve", "timer", "--port", "70000"], "70000 is not in the range"),
    ],
)
def test_an_invalid_command_line_is_refused_in_one_line(arguments: list[str], told: str) -> None:
    """The line has the mistake and the command to look at; the whole usage would hide it."""
    result = CliRunner().invoke(main, arguments, prog_name="rallypoint")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert told in result.stderr
    assert result.stderr.count("\n") == 1
    command = " ".join(
        ["rallypoint", *[name for name in arguments[:1] if name in ("status", "close", "completion")]]
    )
    assert command in result.stderr


@pytest.mark.parametrize("group", [[], ["serve"]])
def test_a_group_without_a_command_shows_its_help(group: list[str]) -> None:
    """It is a request for help rather than a mistake."""
    result = CliRunner().invoke(main, group)
    assert result.exit_code == 2
    assert "Commands:" in result.output


def test_ctrl_c_before_there_is_anything_to_stop_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a shell's code for it; no traceback appears, from the first moment on."""

    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    result = CliRunner().invoke(main, ["run", "train.py"])
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "Error: interrupted\n")
