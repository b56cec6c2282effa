"""One host, one command: workers have the environment that torchrun sets, and their output is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.cli_process import rallypoint
from integration.scene import WORKER

pytestmark = pytest.mark.integration

# The variables of torchrun 2.13, on one host with two workers; and ours.
SAME_FOR_ALL = {
    "GROUP_RANK": "0",
    "ROLE_NAME": "trainer",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "digits",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "OMP_NUM_THREADS": "1",
    "RALLYPOINT_RUN_ID": "digits",
    "RALLYPOINT_NODE": "here",
    "RALLYPOINT_ROUND": "1",
}


def test_a_standalone_run_is_complete(tmp_path: Path) -> None:
    """The environment, the output on the console and in files, and the exit code are correct."""
    (tmp_path / "finish").touch()
    result = rallypoint(
        *["run", "--standalone", "--nproc-per-node", "2", "--rdzv-id", "digits", "--node-id", "here"],
        *[
            "--role",
            "trainer",
            "--max-restarts",
            "3",
            "--log-dir",
            str(tmp_path / "logs"),
            str(WORKER),
            str(tmp_path),
            "wait",
        ],
    )
    assert result.returncode == 0
    seen = sorted(
        (json.loads(line) for line in result.stdout.splitlines()), key=lambda fields: fields["rank"]
    )
    assert [fields["event"] for fields in seen] == ["started", "started"]
    (run,) = (tmp_path / "logs").iterdir()
    assert run.name.startswith("digits_")
    for rank, fields in enumerate(seen):
        environment = fields["environment"]
        assert {name: environment.get(name) for name in SAME_FOR_ALL} == SAME_FOR_ALL
        assert [environment[name] for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")] == [str(rank)] * 3
        folder = run / "attempt_0" / str(rank)
        assert environment["TORCHELASTIC_ERROR_FILE"] == str(folder / "error.json")
        assert json.loads((folder / "stdout.log").read_text()) == fields
        assert (folder / "stderr.log").read_text() == ""
    ports = {fields["environment"]["MASTER_PORT"] for fields in seen}
    assert len(ports) == 1
    assert 0 < int(ports.pop()) < 65536
    assert len({fields["environment"]["RALLYPOINT_FENCING_TOKEN"] for fields in seen}) == 1
    for socket in ("RALLYPOINT_STORE_SOCKET", "RALLYPOINT_TIMER_SOCKET"):
        assert not Path(seen[0]["environment"][socket]).exists()  # gone with the agent


@pytest.mark.parametrize(
    ("program", "reason", "code"),
    [
        (("sh", "-c", "kill -9 $$"), "killed by SIGKILL", -9),
        (("no-such-program",), "'no-such-program' is not a program in PATH", None),
        (("true",), None, None),
    ],
)
def test_the_platform_reads_the_first_failure(
    tmp_path: Path, program: tuple[str, ...], reason: str | None, code: int | None
) -> None:
    """The agent writes it into the platform's TORCHELASTIC_ERROR_FILE, in place, since that file may be a mount."""
    reply = tmp_path / "reply.json"
    reply.write_text("of an earlier attempt")
    before = reply.stat().st_ino
    result = rallypoint(
        *("run", "--standalone", "--log-dir", str(tmp_path / "logs"), "--no-python", *program),
        environment={"TORCHELASTIC_ERROR_FILE": str(reply)},
    )
    if reason is None:
        assert (result.returncode, reply.read_text()) == (0, "of an earlier attempt")
        return
    assert result.returncode == (1 if code else 2)
    message = json.loads(reply.read_text())["message"]
    assert message["message"].startswith(reason) or reason in message["message"]
    assert message.get("errorCode") == code
    assert reply.stat().st_ino == before
