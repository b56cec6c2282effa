"""The C header of the examples, and the C code of docs/timer-socket.md, compile, and an agent understands them."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.timer_host import TimerHost, answer, asked, finished
from support.waiting import until

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(COMPILER is None, reason="there is no C compiler here"),
]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "timer-socket.md"
HEADER = ROOT / "examples" / "clients" / "worker" / "rallypoint_worker.h"

# Executes each line of its input, and prints the result.
MAIN = """
#include <stdio.h>

int main(void) {
  char what[32], scope[300];
  double seconds;
  unsigned long number;
  int link = rp_connect("RALLYPOINT_TIMER_SOCKET", SOCK_SEQPACKET, 0.05), failed = link < 0;
  static struct rp_timers timers;
  struct table table;
  while (!failed && scanf("%31s", what) == 1) {
    if (!strcmp(what, "acquire") && scanf("%lu %lf %299s", &number, &seconds, scope) == 3)
      rp_acquire(&timers, number, seconds, scope);
    else if (!strcmp(what, "release") && scanf("%lu", &number) == 1)
      rp_release(&timers, number);
    else if (!strcmp(what, "progress") && scanf("%lu", &number) == 1)
      rp_progress(&timers, number);
    else if (!strcmp(what, "table"))
      failed = table_open(&table, link);
    else if (!strcmp(what, "table-acquire") && scanf("%lf %299s", &seconds, scope) == 2)
      failed = table_acquire(&table, seconds, scope) < 0;
    else if (!strcmp(what, "table-release") && scanf("%lu", &number) == 1)
      table_release(&table, (int)number);
    else if (!strcmp(what, "table-progress") && scanf("%lu", &number) == 1)
      table_progress(&table, number);
    else if (!strcmp(what, "table-churn") && scanf("%lu", &number) == 1)
      while (number--) table_release(&table, table_acquire(&table, 60, number % 2 ? "churn" : "another"));
    else if (!strcmp(what, "reconnect")) {
      close(link);
      link = rp_connect("RALLYPOINT_TIMER_SOCKET", SOCK_SEQPACKET, 0.05);
      failed = link < 0 || table_send(&table, link);
    } else
      failed = 1;
    puts(failed ? "failed" : "done");
    fflush(stdout);
  }
  return failed;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled header and code of the page, unchanged."""
    folder = tmp_path_factory.mktemp("c")
    blocks = re.findall(r"^```c\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    (folder / "worker.c").write_text(f'#define _GNU_SOURCE\n#include "{HEADER}"\n' + blocks[0] + MAIN)
    compiled = subprocess.run(
        [COMPILER or "cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", "-o", "worker", "worker.c"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert compiled.returncode == 0, compiled.stderr
    return folder / "worker"


class Host(TimerHost):
    """An agent's socket, and a worker written in C."""

    worker: asyncio.subprocess.Process

    async def say(self, *lines: str) -> None:
        """Send commands to the worker, and wait until it has executed them."""
        for line in lines:
            await answer(self.worker, line)
            assert await asked(self.worker) == "done", line


@pytest.fixture
async def host(tmp_path: Path, program: Path) -> AsyncIterator[Host]:
    host = Host(tmp_path / "s", base_rank=3)
    async with host.listening():
        host.worker = await host.run(program)
        yield host
        await finished(host.worker)
        await host.shows()
    assert host.expired == []


async def test_timers_are_sent_with_messages(host: Host) -> None:
    """They are started, restarted and ended, with the requested duration."""
    await host.say("acquire 1 60.5 train.c#12", "acquire 2 5 save")
    await host.shows("save", "train.c#12")
    assert [after for _, after, _ in host.timers.held.values()] == [60.5, 5.0]
    await host.say("acquire 1 70 train.c#12", "release 2", "release 99")
    await host.shows("train.c#12")
    await until(lambda: [after for _, after, _ in host.timers.held.values()] == [70.0])


async def test_a_timer_that_learns_is_sent_with_messages(host: Host) -> None:
    """Its completion is sent too."""
    await host.say("acquire 1 0 learned")
    await host.shows("learned")
    assert host.timers.learned_as["0@1", "learned"] == "learned"
    await host.say("release 1")
    await until(lambda: host.timers.completed == [("0@1", "learned")])


async def test_progress_is_sent_with_a_message(host: Host) -> None:
    """It has the step, under the worker's rank."""
    await host.say("progress 7")
    await until(lambda: [step[:3] for step in host.timers.steps] == [("0@1", 3, 7)])


async def test_timers_are_kept_in_a_table(host: Host) -> None:
    """They are kept in addition to the timers of messages."""
    await host.say(
        "acquire 1 60 message", "table", "table-acquire 60.5 train.c#12", "table-acquire 0.09 short"
    )
    await host.shows("message", "short", "train.c#12")
    assert sorted(after for _, after, _ in host.timers.held.values()) == [0.09, 60.0, 60.5]
    await host.say("table-release 0", "table-acquire 7 save")
    await host.shows("message", "save", "short")
    await host.say("table-release 0", "table-release 1", "release 1")
    await host.shows()


async def test_progress_is_kept_in_a_table(host: Host) -> None:
    """It is kept like the timers."""
    await host.say("table", "table-progress 8")
    await until(lambda: [step[:3] for step in host.timers.steps] == [("0@1", 3, 8)])


async def test_a_table_can_be_written_fast(host: Host) -> None:
    """At any speed, the agent ends up with the timers that are held."""
    await host.say("table", "table-acquire 60 kept", "table-churn 300000", "table-acquire 60 last")
    await host.shows("kept", "last")


async def test_a_table_is_brought_along_to_a_new_connection(host: Host) -> None:
    """It brings all its timers."""
    await host.say("table", "table-acquire 60 kept")
    await host.shows("kept")
    await host.say("reconnect", "table-acquire 60 more")
    await host.shows("kept", "more")
