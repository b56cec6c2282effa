"""Temporary folders of a killed agent are removed with its workers; those of a living agent stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.agent.spawner.client import Spawner
from support.mortal import mortal
from support.processes import fresh_marker, gone, stop_and_kill
from support.waiting import wait_until

pytestmark = pytest.mark.integration

AGENT = """
import asyncio, os, sys
from pathlib import Path
from rallypoint.agent.spawner.client import Spawner
from rallypoint.agent.spawner.protocol import WorkerSpec

async def main():
    sleep = WorkerSpec(0, ["sleep", "60"], dict(os.environ))
    spawner = Spawner.start()
    for name in ("first", os.fsdecode(b"caf\\xe9")):
        folder = Path(sys.argv[1], name)
        (folder / "below").mkdir(parents=True)
        (folder / "below" / "link").symlink_to(sys.argv[2])
        spawner.register_cleanup(folder)
    await spawner.wait_started(spawner.submit([sleep], lambda how: None))
    print(spawner._handle.pid, spawner.pid, flush=True)
    while not spawner.dead:
        await asyncio.sleep(0.01)
    await spawner.close()
    print("buried", flush=True)
    spawner = spawner.renew()
    await spawner.wait_started(spawner.submit([sleep], lambda how: None))
    print("renewed", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


class Agent:
    """A program with a spawner and folders, which the test may kill."""

    def __init__(self, marker: str, folders: Path, kept: Path) -> None:
        self.process = subprocess.Popen(
            mortal(sys.executable, "-c", AGENT, str(folders), str(kept)),
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "MARKER": marker},
        )
        guard, spawner = map(int, self.hear().split())
        self.pids = {"agent": self.process.pid, "guard": guard, "spawner": spawner}

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    with fresh_marker() as marker:
        agent = Agent(marker, tmp_path / "folders", tmp_path / "kept")
        try:
            yield agent
        finally:
            agent.process.kill()
            agent.process.communicate()
            wait_until(lambda: gone(marker), "the end of everything")


@pytest.mark.parametrize(
    "victims", [("agent",), ("agent", "spawner"), ("agent", "guard"), ("spawner", "agent")], ids="+".join
)
def test_the_folders_of_a_killed_agent_are_removed(
    agent: Agent, tmp_path: Path, victims: tuple[str, ...]
) -> None:
    """The process that kills the tree removes its folders (one has a non-UTF-8 name), but not the target of a link."""
    # All stop before the first is killed, so none sees another die: a clean-up that has begun can't be handed on.
    stop_and_kill(agent.pids[name] for name in victims)
    wait_until(lambda: list((tmp_path / "folders").iterdir()) == [], "the removal of the folders")
    assert (tmp_path / "kept" / "file").exists()


@pytest.mark.parametrize("victim", ["spawner", "guard"])
def test_the_folders_of_an_agent_that_lives_stay_and_the_next_spawner_has_them(
    agent: Agent, tmp_path: Path, victim: str
) -> None:
    """The death of a spawner removes nothing that the agent needs; the next spawner knows the folders too."""
    os.kill(agent.pids[victim], signal.SIGKILL)
    assert agent.hear() == "buried"
    assert len(list((tmp_path / "folders").iterdir())) == 2
    assert agent.hear() == "renewed"
    agent.process.kill()
    wait_until(lambda: list((tmp_path / "folders").iterdir()) == [], "the removal of the folders")


async def test_closing_removes_nothing(tmp_path: Path) -> None:
    """An agent that ends normally removes its folders itself."""
    async with Spawner.start() as spawner:
        spawner.register_cleanup(tmp_path / "folder")
        (tmp_path / "folder").mkdir()
    assert (tmp_path / "folder").exists()
    spawner.register_cleanup(tmp_path / "more")  # no effect and no error after close
