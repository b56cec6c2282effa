"""A newcomer's first hour: each step with its text, typed into terminals; the page consists of both."""

from __future__ import annotations

import asyncio
from pathlib import Path

from first_hour.page import shortened
from first_hour.terminals import Hosts, Terminal, hosts, output

_ROOT = Path(__file__).parents[2]

_TRAIN = """\
import os
import sys
import time

rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
for step in range(int(sys.argv[1])):
    time.sleep(0.5)
    print(f"rank {rank} of {world_size}: step {step}", flush=True)
"""
_CRASH = """\
import os
import time

first_try = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if os.environ["RANK"] == "1" and first_try:
    raise ValueError("a bad batch")
time.sleep(1)
print("rank", os.environ["RANK"], "is done", flush=True)
"""
_HANG = """\
import os
import time

from rallypoint.timer import expires

with expires(after=2):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(3600)
print("done", flush=True)
"""


class Story:
    """The page as it grows."""

    def __init__(self, demo: Path) -> None:
        """Begin; `demo`: the folder in which all commands run."""
        self._demo = demo
        self._parts: list[str] = []

    def text(self, text: str) -> None:
        """Add text."""
        self._parts.append(text.strip("\n"))

    def file(self, name: str, content: str) -> None:
        """Write a file, and show it."""
        (self._demo / name).write_text(content)
        self._parts.append(f"`{name}`:\n\n```python\n{content}```")

    async def run(self, terminal: Terminal, command: str, until: str = "") -> None:
        """Type a command, and show its output when it has ended, or as soon as it has a match of `until`."""
        terminal.type(command)
        await self.shows(terminal, until)

    async def shows(self, terminal: Terminal, until: str = "") -> None:
        """Show further output of a terminal, as `run` does."""
        await (terminal.reaches(until) if until else terminal.returns())
        lines = shortened([line for line in terminal.take() if not line.startswith("WARNING: Location")])
        self._parts.append("\n".join(["```console", *lines, "```"]))

    def page(self) -> str:
        """Return the page so far."""
        return "\n\n".join(self._parts) + "\n"


async def play() -> str:
    """Go through the first hour on two hosts; return the page."""
    async with hosts("host-a", "host-b") as both:
        story = Story(both.demo)
        await asyncio.to_thread(output, "git", "clone", "--quiet", str(_ROOT), str(both.demo / "rallypoint"))
        await _one_host(story, both)
        return story.page()


async def _one_host(story: Story, both: Hosts) -> None:
    installer = await both.terminal("host-a", online=True)
    story.text("""
# The first hour

A tutorial of ten minutes, if you copy the commands: from an empty environment to a job that survives a crash, a
hang and a lost host, and that is protected by certificates. All commands are typed as they stand. The output is that of
two Linux hosts with terminals of 80 columns; `make first-hour` types the commands into such terminals and writes this
page, and a test compares it with the output of the present version. `…` stands for more lines of the same kind.

## Install

Linux, Python 3.11 or newer. Rallypoint needs no torch and no service that runs already. It is not published yet:
install it from a checkout.
""")
    await story.run(installer, "python3 -m venv venv && venv/bin/pip install -qq ./rallypoint")
    first = await both.terminal("host-a")
    await story.run(first, "export PATH=$PWD/venv/bin:$PATH; rallypoint --version")
    story.text("""
## One host

This stands for a training script: it reads its rank from the environment, as under torchrun.
""")
    story.file("train.py", _TRAIN)
    await story.run(first, "rallypoint run --nproc-per-node 2 train.py 3")
    story.text("""
Lines with a time are Rallypoint's own, on stderr, and so is the report of a failure; all others are the workers'.
`--log-level warning` leaves only problems.

## A crash

One of two workers raises an exception when it runs for the first time.
""")
    story.file("crash.py", _CRASH)
    await story.run(first, "rallypoint run --nproc-per-node 2 crash.py; echo exit code $?")
    story.text("""
The job fails with the first failure, and names its log. With `--max-restarts` all workers start again:
""")
    await story.run(first, "rallypoint run --nproc-per-node 2 --max-restarts 1 crash.py")
    story.text("""
## A hang

A worker that does not leave its `expires` block in time is killed, and counts as failed. The report has its stacks.
""")
    story.file("hang.py", _HANG)
    await story.run(first, "rallypoint run --max-restarts 1 hang.py")
    await _two_hosts(story, both, first)


async def _two_hosts(story: Story, both: Hosts, first: Terminal) -> None:
    service, second = await both.terminal("host-a"), await both.terminal("host-b")
    story.text("""
## Two hosts

A rendezvous service holds the membership of jobs. All who use it hold the same secret; here both hosts share a
folder, else copy the file. In a second terminal of the first host:
""")
    for terminal in (service, second):
        terminal.type("export PATH=$PWD/venv/bin:$PATH")
        await terminal.returns()
        terminal.take()
    await story.run(service, "openssl rand -hex 32 > run.secret; chmod 600 run.secret")
    await story.run(service, "export RALLYPOINT_RUN_SECRET_FILE=$PWD/run.secret")
    await story.run(service, "rallypoint serve rendezvous --host 0.0.0.0", until=r"^[^$]*\bready")
    story.text("""
On both hosts the same commands. The first host waits for the second:
""")
    settings = "RALLYPOINT_RUN_SECRET_FILE=$PWD/run.secret RALLYPOINT_RDZV_ENDPOINT=host-a:29400"
    run = "rallypoint run --nnodes 1:2 --rdzv-id job-1 train.py 600"
    await story.run(first, f"export {settings}")
    await story.run(first, "rallypoint run --nnodes 2 --rdzv-id job-0 train.py 3", until="waiting for nodes")
    await story.run(second, f"export {settings}")
    await story.run(second, "rallypoint run --nnodes 2 --rdzv-id job-0 train.py 3")
    await story.shows(first)
    story.text("""
## A lost host

`--nnodes 1:2` lets the job run with one host or with two. The first host waits 30 s for the second before it starts
alone (`last_call_timeout`).
""")
    await story.run(first, run, until="rank 0 of 1: step 1")
    await story.run(second, run, until="rank 1 of 2: step 3")
    story.text("""
The second host joined while the job ran, so all workers started again with two ranks. Its power goes off; on the
first host:
""")
    await both.power_off("host-b")
    await story.shows(first, until="(?s)NODE_LOST.*rank 0 of 1: step 3|lost.*rank 0 of 1: step 3")
    story.text("""
The last heartbeat of the lost host was 15 s old when it was given up. `status` shows the run, `rounds` why each round
ended:
""")
    third = await both.terminal("host-a")
    third.type(f"export PATH=$PWD/venv/bin:$PATH {settings}")
    await third.returns()
    third.take()
    await story.run(third, "rallypoint status job-1")
    await story.run(third, "rallypoint rounds job-1")
    story.text("""
## A requeue

Ctrl-C ends the workers of the host, and the host leaves. Where a scheduler starts the same command again, under the
same id, the job runs on, and its rounds are numbered further:
""")
    first.interrupt()
    await story.shows(first)
    await story.run(first, "rallypoint run --nnodes 1:2 --rdzv-id job-1 train.py 3")
    story.text("""
A run that has succeeded stays closed: the same command once more ends at once with exit code 4.
""")
    await story.run(first, "rallypoint run --nnodes 1:2 --rdzv-id job-1 train.py 3; echo exit code $?")
    story.text("""
A run that has failed is opened again by the next launch. In this first one the number of steps is missing:
""")
    await story.run(first, "rallypoint run --rdzv-id job-2 train.py")
    await story.run(third, "rallypoint status job-2")
    story.text("""
With the number it succeeds, in the second round of the run:
""")
    await story.run(first, "rallypoint run --rdzv-id job-2 train.py 3")
    await story.run(third, "rallypoint rounds job-2")
    await _certificates(story, first, service)


async def _certificates(story: Story, first: Terminal, service: Terminal) -> None:
    story.text("""
## Certificates

A secret protects one installation; with certificates each host and user has an identity. `tls init` makes them for a
trial.
""")
    service.interrupt()
    await service.returns()
    service.take()
    await story.run(service, "unset RALLYPOINT_RUN_SECRET_FILE; rallypoint tls init tls host-a host-b")
    server = "RALLYPOINT_TLS_CERT=tls/server.pem RALLYPOINT_TLS_KEY=tls/server.key"
    await story.run(service, f"export {server} RALLYPOINT_TLS_CLIENT_CA=tls/ca.pem")
    await story.run(service, "rallypoint serve rendezvous --host 0.0.0.0", until=r"^[^$]*\bready")
    await story.run(first, f"unset RALLYPOINT_RUN_SECRET_FILE; export {server} RALLYPOINT_TLS_CA=tls/ca.pem")
    await story.run(first, "rallypoint run --rdzv-id job-3 train.py 3")
    story.text("""
Without a certificate the service refuses:
""")
    await story.run(first, "env -u RALLYPOINT_TLS_CERT -u RALLYPOINT_TLS_KEY rallypoint status")
    story.text("""
Next: [torchrun.md](torchrun.md) if you come from torchrun, [operating.md](operating.md) for services that run for
long, [hangs.md](hangs.md) for timeouts that are learned, and [security.md](security.md) for rights and tokens.
""")
