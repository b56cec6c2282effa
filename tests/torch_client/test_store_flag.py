"""`rallypoint run --store rallypoint`: the host of rank 0 dies, and torch's store does not."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch")

from cli.cli_process import RALLYPOINT, clean_environment
from support.processes import fresh_marker, living
from support.waiting import wait_until
from torture.mortal_server import MortalServer

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

WORKER = Path(__file__).with_name("store_worker.py")
PATIENCE = 120.0
# Seconds for which the round outlives its first node: time for the other node to call the store.
GRACE = "10"


@contextmanager
def agent(
    folder: Path, endpoint: str, name: str, store: str, marker: str
) -> Iterator[subprocess.Popen[bytes]]:
    """An agent with one worker; both are killed at the end."""
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(str(RALLYPOINT), "run", "--rdzv-endpoint", endpoint, "--insecure", "--rdzv-id", "job"),
                *("--nnodes", "1:2", "--node-id", name, "--store", store, "--log-dir", str(folder / "logs")),
                *(
                    "--rdzv-conf",
                    f"disconnect_grace={GRACE},last_call_timeout=5",
                    str(WORKER),
                    str(folder),
                    name,
                ),
            ],
            env=clean_environment(MARKER=marker, PYTHONPATH=str(Path(__file__).parents[1])),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def notes(folder: Path, name: str) -> list[str]:
    path = folder / name
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("store", ["rallypoint", "tcp"])
def test_the_host_of_rank_0_dies_with_its_agent(tmp_path: Path, server: MortalServer, store: str) -> None:
    """The other worker goes on calling the store in the same round, and both stores serve the next round."""
    with ExitStack() as stack:
        marker = stack.enter_context(fresh_marker())
        agents = {
            name: stack.enter_context(agent(tmp_path, server.endpoint, name, store, f"{marker}{name}"))
            for name in ("a", "b")
        }

        def logs() -> str:
            return "\n".join((tmp_path / f"{name}.log").read_text(errors="replace") for name in agents)

        def both_train() -> bool:
            assert all(each.poll() is None for each in agents.values()), logs()
            return all(any("of 2" in line for line in notes(tmp_path, name)) for name in agents)

        wait_until(both_train, "both workers train", PATIENCE)
        (first,) = [name for name in agents if any("rank 0 of 2" in line for line in notes(tmp_path, name))]
        (other,) = agents.keys() - {first}
        agents[first].send_signal(signal.SIGKILL)
        wait_until(lambda: not living(f"{marker}{first}"), "nothing of the first host is alive", PATIENCE)
        before = len(notes(tmp_path, other))
        wait_until(lambda: len(notes(tmp_path, other)) > before + 5, "the other worker goes on", PATIENCE)
        after = notes(tmp_path, other)[before:]
        if store == "rallypoint":
            # Its first call may have begun before; no later one did.
            assert [line.split()[0] for line in after[:5]] == ["counted"] * 5
        else:
            assert any(line.startswith("lost") for line in notes(tmp_path, other))
        wait_until(
            lambda: any("rank 0 of 1" in line for line in notes(tmp_path, other)), "it trains alone", PATIENCE
        )
        (tmp_path / "finish").touch()
        assert agents[other].wait(PATIENCE) == 0, logs()
