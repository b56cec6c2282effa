"""A host that lacks a resource gets one line from every command, and no traceback."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from cli.cli_process import RALLYPOINT, clean_environment, refusal
from support.waiting import PATIENCE

pytestmark = pytest.mark.integration

COMMANDS = {
    "run": ["run", "--standalone", "--log-level", "error", "--no-python", "true"],
    "submit": ["submit", "--agents", "127.0.0.1:1", "--insecure", "--no-python", "true"],
    "serve": [
        "serve",
        "rendezvous",
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--insecure",
        "--journal",
        "sqlite:j.db",
    ],
    "serve agent": ["serve", "agent"],
    "status": ["status"],
}


def run(
    command: Sequence[str], cwd: Path, files: int | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; `files`: its limit of open files."""

    def limit() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    return subprocess.run(
        list(command),
        cwd=cwd,
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        preexec_fn=limit,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("files", [10, 32])
def test_too_few_open_files(command: list[str], files: int, tmp_path: Path) -> None:
    """gRPC would abort the process with fewer than about twenty."""
    told = refusal(run([str(RALLYPOINT), *command], tmp_path, files))
    assert told == f"the limit of open files is {files}, of at least 64: raise it (ulimit -n 4096)"


def test_files_that_run_out_later(tmp_path: Path) -> None:
    """Each worker needs a socket of its own."""
    many = ["run", "--standalone", "--log-level", "error", "--nproc-per-node", "40", "--no-python", "true"]
    ended = run([str(RALLYPOINT), *many], tmp_path, 64)
    assert ended.returncode == 3, ended.stderr
    [line] = ended.stderr.splitlines()
    assert line.startswith("Error: this host is not fit to run workers: ")
    assert line.endswith("Too many open files")


def mounted(script: str, *command: str) -> list[str]:
    """Return the command, after a script whose mounts only these processes see."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root can mount")
    return ["unshare", "--mount", "sh", "-c", f'{script} && exec "$@"', "sh", *command]


@pytest.mark.parametrize("command", [COMMANDS["run"], COMMANDS["serve agent"], COMMANDS["status"]], ids=str)
def test_the_folder_of_sockets_can_not_be_made(command: list[str], tmp_path: Path) -> None:
    """Each command uses it, unless it is given addresses."""
    read_only = mounted(f"mount -t tmpfs -o ro none {tmp_path}", str(RALLYPOINT), *command)
    told = refusal(run(read_only, tmp_path, RALLYPOINT_RUNTIME_DIR=str(tmp_path / "x")))
    assert told.endswith("Read-only file system; set RALLYPOINT_RUNTIME_DIR to another one")


def test_no_temporary_file_can_be_written(tmp_path: Path) -> None:
    """Python would use any of its usual folders, and the current one."""
    remount = "mount --bind $folder $folder && mount -o remount,bind,ro $folder"
    folders = {tempfile.gettempdir(), "/tmp", "/var/tmp", "/usr/tmp"}  # noqa: S108 (they become read-only)
    each = f"for folder in {' '.join(folders)}; do if test -d $folder; then {remount}; fi; done"
    told = refusal(run(mounted(f"{each} && cd /proc", str(RALLYPOINT), *COMMANDS["run"]), tmp_path))
    assert "No usable temporary directory found" in told


FILL = "! head -c 1M /dev/zero > filled 2> /dev/null"


@pytest.mark.parametrize("inodes", range(9))
def test_a_full_disk(inodes: int, tmp_path: Path) -> None:
    """Cases: the folder of the logs, sockets or a worker's file can't be made, or (0) a line in a file."""
    fill = f"mount -t tmpfs -o size=64k,nr_inodes={inodes} none {tmp_path}"
    fill += "" if inodes else f" && cd {tmp_path} && {FILL}"
    command = [
        "run",
        "--standalone",
        "--log-level",
        "error",
        "--log-dir",
        str(tmp_path),
        "--no-python",
        "true",
    ]
    full = mounted(fill, str(RALLYPOINT), *command)
    ended = run(full, tmp_path, TMPDIR=str(tmp_path))
    assert "Traceback" not in ended.stderr
    assert ended.returncode in (2, 3)
    # The agent's log may add a line.
    lines = ended.stderr.splitlines()
    assert len(lines) <= 2
    assert all("No space left on device" in line for line in lines)


def test_a_full_disk_of_a_service(tmp_path: Path) -> None:
    """It can't store a journal."""
    filled = f"mount -t tmpfs -o size=64k none {tmp_path} && cd {tmp_path} && {FILL}"
    told = refusal(run(mounted(filled, str(RALLYPOINT), *COMMANDS["serve"]), tmp_path))
    assert told.startswith("can't open the journal j.db: database or disk is full")


@pytest.mark.parametrize(
    ("command", "exit_code", "line"),
    [
        (["run", "--standalone", "--no-python", "true"], 0, "job succeeded"),
        (["run", "--standalone", "--no-python", "sh", "-c", "kill -SEGV $$"], 1, "error job failed"),
        (["run", "--standalone", "--no-python", "./missing"], 2, "Error: Invalid value for PROGRAM"),
        (
            ["run", "--standalone", "--log-dir", "logs", "--no-python", "true"],
            2,
            "Error: cannot make a log directory",
        ),
        (COMMANDS["serve"], 2, "Error: can't open the journal j.db"),
        (["status", "--rdzv-endpoint", "127.0.0.1:1", "--insecure", "--timeout", "1"], 2, "Error: "),
    ],
    ids=str,
)
def test_a_folder_that_is_gone(command: list[str], exit_code: int, line: str, tmp_path: Path) -> None:
    """It is the command's working directory; the command needs it only if an argument refers to it."""
    gone = [
        "sh",
        "-c",
        'mkdir gone && cd gone && rmdir ../gone && exec "$@"',
        "sh",
        str(RALLYPOINT),
        *command,
    ]
    ended = run(gone, tmp_path)
    assert ended.returncode == exit_code, ended.stderr
    assert line in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
