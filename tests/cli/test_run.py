"""`rallypoint run`: torchrun's flags under torchrun's names; what can't be done as asked is told in one line."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cli.cli_process import rallypoint, refusal
from rallypoint.cli import run as run_module
from rallypoint.cli.main import main

SCRIPT = "print('hello')"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that can be run."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


class Understood:
    """What a command line was taken for, with nothing being run."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.command: Sequence[str] = ()
        self.flags: dict[str, Any] = {}

    def take(self, command: Sequence[str], **flags: Any) -> int:
        """In the place of running it."""
        self.command, self.flags = command, flags
        return 0

    def of(self, *arguments: str | Path, environment: dict[str, str] | None = None) -> dict[str, Any]:
        """Parse a command line; returns its flags."""
        result = CliRunner(env=environment).invoke(main, ["run", *map(str, arguments)])
        assert result.exit_code == 0, result.stderr
        return self.flags

    def command_of(self, *arguments: str | Path) -> list[str]:
        """Parse a command line; returns what its workers run."""
        self.of(*arguments)
        return list(self.command)


@pytest.fixture
def understood(monkeypatch: pytest.MonkeyPatch) -> Understood:
    """Keeps jobs from being run."""
    understood = Understood()
    monkeypatch.setattr(run_module, "_run", understood.take)
    return understood


def test_the_defaults_are_torchruns(understood: Understood, script: Path) -> None:
    """One node, one worker, no restarts, 30 s to stop."""
    flags = understood.of("--standalone", script)
    assert list(understood.command) == [sys.executable, "-u", str(script)]
    assert flags.pop("rdzv_id").startswith("standalone-")
    assert flags == {
        "nnodes": (1, 1),
        "nproc_per_node": 1,
        "standalone": True,
        "rdzv_endpoint": "",
        "rdzv_conf": {},
        "max_restarts": 0,
        "topology": "",
        "role": "default",
        "log_dir": None,
        "redirects": "0",
        "tee": "0",
        "local_addr": "",
        "shutdown_timeout": 30.0,
        "evidence_timeout": 2.0,
        "stall_after": None,
        "node_id": "",
        "timer_endpoint": "",
        "supervisor_address": "127.0.0.1:0",
        "log_level": "info",
        "log_format": "auto",
        "tls": None,
    }


def test_flags_may_have_dashes_or_underscores(understood: Understood, script: Path) -> None:
    """torchrun takes both."""
    dashes = [
        "--nproc-per-node",
        "2",
        "--rdzv-conf=join_timeout=9",
        "--max-restarts=3",
        "--shutdown-timeout",
        "5",
    ]
    underscores = [
        flag.replace("-", "_").replace("__", "--", 1) if flag[0] == "-" else flag for flag in dashes
    ]
    assert underscores[0] == "--nproc_per_node"
    first = understood.of("--standalone", "--rdzv-id", "a", *dashes, script)
    assert understood.of("--standalone", "--rdzv_id", "a", *underscores, script) == first
    assert (first["nproc_per_node"], first["max_restarts"], first["shutdown_timeout"]) == (2, 3, 5.0)
    assert first["rdzv_conf"] == {"join_timeout": "9"}


def test_the_environment_sets_flags_too(understood: Understood, script: Path) -> None:
    """PET_<NAME> as with torchrun; RALLYPOINT_<NAME> wins over it, and the flag over both."""
    torchrun = {
        "PET_NNODES": "2:4",
        "PET_NPROC_PER_NODE": "3",
        "PET_RDZV_ENDPOINT": "a:1",
        "PET_RDZV_ID": "x",
    }
    flags = understood.of(script, environment=torchrun)
    assert (flags["nnodes"], flags["nproc_per_node"]) == ((2, 4), 3)
    assert (flags["rdzv_endpoint"], flags["rdzv_id"]) == ("a:1", "x")
    both = torchrun | {"RALLYPOINT_NPROC_PER_NODE": "4"}
    assert understood.of(script, environment=both)["nproc_per_node"] == 4
    assert understood.of("--nproc-per-node", "5", script, environment=both)["nproc_per_node"] == 5


def test_what_follows_the_program_is_the_programs(understood: Understood, script: Path) -> None:
    """Even what looks like a flag of ours."""
    like_ours = ["--nnodes", "x", "-m", "--", "--help"]
    assert understood.command_of("--standalone", script, *like_ours)[3:] == like_ours
    assert understood.command_of("--standalone", "--", script, "--epochs=3")[3:] == ["--epochs=3"]


def test_a_module_or_any_program_can_be_run(understood: Understood, monkeypatch: pytest.MonkeyPatch) -> None:
    """-m, --no-python, and PYTHON_EXEC for the interpreter."""
    here = [sys.executable, "-u", "-m", "package.train", "--lr", "1"]
    assert understood.command_of("--standalone", "-m", "package.train", "--lr", "1") == here
    assert understood.command_of("--standalone", "--no-python", "/bin/true", "a") == ["/bin/true", "a"]
    monkeypatch.setenv("PYTHON_EXEC", "/opt/python")
    assert understood.command_of("--standalone", "--module", "a") == ["/opt/python", "-u", "-m", "a"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--nnodes", "3:1"], r"'--nnodes' .*'3:1' has its maximum below its minimum; did you mean 1:3\?"),
        (["--nnodes", "x"], "'--nnodes' .*'x' is not a number of nodes; expected N or MIN:MAX"),
        (["--nproc-per-node", "0"], "'--nproc-per-node' .*'0' workers can't form a job; the least is 1"),
        (
            ["--standalone", "--nnodes", "2"],
            "--nnodes: --standalone runs on this host alone: leave --nnodes out",
        ),
        (["--standalone", "--rdzv-endpoint", "a:1"], "--standalone has its own rendezvous: leave it out"),
        (["--rdzv-endpoint", "a:1"], "Give --rdzv-id NAME"),
        (["--rdzv-id", "x"], "Give --rdzv-endpoint HOST:PORT"),
        (
            ["--standalone", "--rdzv-conf", "join=1"],
            "'--rdzv-conf' .*'join' is no setting; known: close_timeout, ",
        ),
        (["--standalone", "--max-restarts", "-1"], "'--max-restarts' .*-1 is not in the range"),
        (["--standalone", "--max-restarts", "9999999999"], "'--max-restarts' .*is not in the range"),
        (["--standalone", "-m", "--no-python"], "--module and --no-python contradict each other"),
        (
            ["--standalone", "--shutdown-timeout", "soon"],
            "'--shutdown-timeout' .*'soon' is not a valid number",
        ),
        (["--standalone", "--redirect", "3"], "No such option '--redirect'.* '--redirects'"),
    ],
)
def test_a_wrong_flag_is_told_in_one_line(
    understood: Understood, script: Path, arguments: list[str], told: str
) -> None:
    """What is wrong, where, and what was expected; exit code 2."""
    result = CliRunner().invoke(main, ["run", *arguments, str(script)])
    assert result.exit_code == 2
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)
    assert re.search(told, result.stderr)
    assert not understood.command


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (
            "missing.py",
            "'missing.py' does not exist; expected a Python script (for a module use -m, for other programs",
        ),
        (".", "'.' is a folder"),
    ],
)
def test_a_missing_script_is_told_in_one_line(understood: Understood, program: str, told: str) -> None:
    """Before anything is started or joined, and with the flags that may have been forgotten."""
    result = CliRunner().invoke(main, ["run", "--standalone", program])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert told in result.stderr


# --- In processes of their own ------------------------------------------------------------------------------


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_an_unreachable_endpoint_is_told_after_its_timeout(script: Path, nobody: str) -> None:
    """With the address, for how long it was tried, why it failed, and what to look at."""
    told = refusal(
        rallypoint(
            *["run", "--rdzv-endpoint", nobody, "--rdzv-id", "x", "--rdzv-conf", "read_timeout=0.5"],
            *["--log-level", "error", str(script)],
        )
    )
    assert told.startswith(f"no rendezvous service answered at {nobody} within 0.5 s: ")
    assert "Connection refused" in told
    assert told.endswith("is it running, and is --rdzv-endpoint right?")


def test_what_the_workers_print_is_all_there_is_on_stdout(tmp_path: Path) -> None:
    """Logs go to stderr. Workers inherit the environment as it was: what tames gRPC in the agent stays there."""
    script = tmp_path / "show.py"
    script.write_text(
        "import os; print(os.environ.get('MARK'), [k for k in os.environ if k.startswith('GRPC_')])"
    )
    arguments = ["run", "--standalone", "--nproc_per_node=2", "--log-format", "json", str(script)]
    result = rallypoint(*arguments, environment={"MARK": "yes"})
    assert (result.returncode, result.stdout) == (0, "yes []\n" * 2)
    assert all(line.startswith("{") for line in result.stderr.splitlines())
