"""`rallypoint completion`: a script for each shell, and completions that know commands and flags."""

from __future__ import annotations

import shutil

import pytest
from click.testing import CliRunner

from cli.cli_process import rallypoint
from rallypoint.cli.main import main


@pytest.mark.parametrize(
    ("shell", "loads"), [("bash", "complete -o"), ("zsh", "compdef"), ("fish", "complete")]
)
def test_there_is_a_script_for_each_shell(shell: str, loads: str) -> None:
    """It asks this program, by its name, in the way that click answers."""
    if shell == "bash" and shutil.which("bash") is None:
        pytest.skip("click asks bash for its version")
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    assert loads in result.output
    assert f"_RALLYPOINT_COMPLETE={shell}_complete" in result.output


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("rallypoint s", ["submit", "serve", "status", "scopes"]),
        pytest.param("rallypoint agent s", ["stacks", "stop"], marks=pytest.mark.slow),
        pytest.param("rallypoint agent logs --f", ["--follow"], marks=pytest.mark.slow),
        pytest.param("rallypoint submit --ag", ["--agents"], marks=pytest.mark.slow),
        pytest.param("rallypoint serve r", ["rendezvous"], marks=pytest.mark.slow),
        pytest.param("rallypoint run --nproc", ["--nproc-per-node"], marks=pytest.mark.slow),
        ("rallypoint timers --ex", ["--expired"]),
        ("rallypoint completion ", ["bash", "zsh", "fish"]),
    ],
)
def test_the_shell_is_offered_what_can_come_next(words: str, offered: list[str]) -> None:
    """Commands, their commands, flags, and values."""
    position = str(len(words.split(" ")) - 1)
    result = rallypoint(
        environment={"_RALLYPOINT_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": position}
    )
    assert [line.partition(",")[2] for line in result.stdout.splitlines()] == offered
    assert result.stderr == ""
