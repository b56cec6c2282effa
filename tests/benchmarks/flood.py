"""`flood`: workers print 10,000 lines per second each; the console shows them with prefixes."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.clients.flooding import Flooded, FloodOrder, lines
from benchmarks.figures import Figure
from benchmarks.processes import RALLYPOINT, BenchmarkError, our_server, running, tail
from benchmarks.session import Session
from benchmarks.trials import in_turns

SIZES = (64,)

_RATE = 10_000.0  # lines per second and worker
_SECONDS = 10
_TIMEOUT = 300.0  # seconds
_LOOK = 0.1  # seconds between two looks at the agent's memory
# A heartbeat every second; the lease expires when three are missed: after 3 s instead of the default 15 s.
_CONF = "keep_alive_interval=1,keep_alive_max_attempt=3"

# The least program with output in files: it starts the workers, and waits for them.
_BARE = (
    "import os, subprocess, sys\n"
    "folder, count, *command = sys.argv[1:]\n"
    "def start(rank):\n"
    "    with open(f'{folder}/{rank}.out', 'wb') as out:\n"
    "        return subprocess.Popen(command, stdout=out, env=os.environ | {'RANK': str(rank)})\n"
    "workers = [start(rank) for rank in range(int(count))]\n"
    "sys.exit(max(worker.wait() for worker in workers))\n"
)


@dataclass(frozen=True, slots=True)
class _Measured:
    """One flood.

    Attributes:
        rate: lines per second of all workers, from the start of the first to the end of the last.
        behind: seconds from the last worker's end to its last line on the console.
        cpu: processors that the agent kept busy, from its first line on the console to the last.
        growth: largest growth of the agent's memory, in MB, after its first line on the console.
    """

    rate: float
    behind: float = 0.0
    cpu: float = 0.0
    growth: float = 0.0


def flood(session: Session) -> Iterator[Figure]:
    """Measure; see docs/benchmarks.md."""
    for workers in session.sizes_or(SIZES):
        variants: dict[str, Callable[[], _Measured]] = {
            "floor": partial(_floor, session, workers),
            "ours": partial(_ours, session, workers),
            "ours rotating": partial(
                _ours, session, workers, "--log-max-size", "4MiB", "--log-keep-files", "1000"
            ),
        }
        if session.torch is not None:
            variants["torch"] = partial(_torch, session, workers)
        found = in_turns(session, f"flood n={workers}", variants, _show)
        if not found.keys() >= {"ours", "floor", "ours rotating"}:
            continue
        ours, torch = found["ours"], found.get("torch")
        for name, variant in (("lines", "ours"), ("lines.rotating", "ours rotating")):
            peer = torch.rate if torch is not None and variant == "ours" else None
            yield Figure(f"flood.{name}", workers, found[variant].rate, "lines/s", found["floor"].rate, peer)
        for name, unit in (("behind", "s"), ("cpu", "processors"), ("growth", "MB")):
            peer = getattr(torch, name) if torch is not None else None
            yield Figure(f"flood.{name}", workers, getattr(ours, name), unit, peer=peer)


def _show(it: _Measured) -> str:
    return (
        f"{it.rate:,.0f} lines/s, console {it.behind:.2f} s behind, "
        f"agent {it.cpu:.2f} processors and {it.growth:+.1f} MB"
    )


def _floor(session: Session, workers: int) -> _Measured:
    with tempfile.TemporaryDirectory(dir=session.folder, prefix="flood-") as name:
        folder = Path(name)
        (folder / "go").touch()
        command = [sys.executable, "-c", _BARE, name, str(workers), *_worker(sys.executable, folder)]
        log = session.folder / "flood-floor.log"
        with running(command, log) as process:
            try:
                process.wait(_TIMEOUT)
            except subprocess.TimeoutExpired:
                raise BenchmarkError(f"no end within {_TIMEOUT:g} s: {tail(log)}") from None
        return _Measured(_rate(_results(folder, workers)))


def _ours(session: Session, workers: int, *more: str) -> _Measured:
    log = session.folder / "flood-ours.log"
    with (
        our_server(session.folder, "memory") as server,
        tempfile.TemporaryDirectory(dir=session.folder, prefix="flood-") as name,
    ):
        folder = Path(name)
        command = [
            *(str(RALLYPOINT), "run", "--insecure", "--rdzv-endpoint", server.endpoint, "--rdzv-id", "flood"),
            *("--rdzv-conf", _CONF, "--nproc-per-node", str(workers), "--tee", "3", "--log-dir", name, *more),
            *("--log-format", "json", "--no-python", *_worker(sys.executable, folder)),
        ]
        measured = _flooded(command, log, folder, workers)
        _check_files(folder, workers)
        said = [
            json.loads(line).get("event") for line in log.read_text().splitlines() if line.startswith("{")
        ]
        if "lease lost, joining again" in said or said.count("starting workers") != 1:
            raise BenchmarkError(f"the agent lost its lease: {tail(log)}")
        return measured


def _torch(session: Session, workers: int) -> _Measured:
    with tempfile.TemporaryDirectory(dir=session.folder, prefix="flood-") as name:
        folder, python = Path(name), str(session.torch)
        command = [
            *(python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)),
            *("--tee", "3", "--log-dir", name, "--no-python", *_worker(sys.executable, folder)),
        ]
        return _flooded(command, session.folder / "flood-torch.log", folder, workers)


def _worker(python: str, folder: Path) -> list[str]:
    order = FloodOrder(str(folder), int(_RATE * _SECONDS), _RATE)
    return [python, "-S", "-m", "benchmarks.clients.flooding", json.dumps(asdict(order))]


def _flooded(command: list[str], log: Path, folder: Path, workers: int) -> _Measured:
    """Read an agent's console to its end, and measure."""
    expected = workers * int(_RATE * _SECONDS)
    with running(command, log, subprocess.PIPE) as process:
        assert process.stdout is not None
        console = process.stdout.fileno()
        seen, last = 0, time.monotonic()
        began = spent = memory = most = looked = 0.0
        deadline = last + _TIMEOUT
        while time.monotonic() < deadline:
            readable, _, _ = select.select([console], [], [], _LOOK)
            data = os.read(console, 1 << 20) if readable else None
            if data == b"":
                break
            now = time.monotonic()
            if data:
                if not seen:
                    began, spent, memory = now, _processor_time(process.pid), _memory(process.pid)
                seen, last = seen + data.count(b"\n"), now
            if seen and now > looked + _LOOK:
                looked, most = now, max(most, _memory(process.pid))
            if seen == expected and not (folder / "go").exists():
                busy = (_processor_time(process.pid) - spent) / (last - began)
                ended = last
                (folder / "go").touch()
        if process.wait(_TIMEOUT) != 0 or seen != expected:
            raise BenchmarkError(
                f"{seen} of {expected} lines were seen; exit code {process.poll()}: {tail(log)}"
            )
        results = _results(folder, workers)
        behind = ended - max(result.ended for result in results)
        return _Measured(_rate(results), behind, busy, (most - memory) / 1e6)


def _results(folder: Path, workers: int) -> list[Flooded]:
    return [Flooded(**json.loads((folder / f"{rank}.json").read_text())) for rank in range(workers)]


def _rate(results: list[Flooded]) -> float:
    seconds = max(result.ended for result in results) - min(result.began for result in results)
    return len(results) * _RATE * _SECONDS / seconds


def _check_files(folder: Path, workers: int) -> None:
    (attempt,) = folder.glob("*/attempt_0")
    count = int(_RATE * _SECONDS)
    for rank in range(workers):
        place = attempt / str(rank)
        files = [*sorted(place.glob("stdout.log.*")), place / "stdout.log"]
        if b"".join(file.read_bytes() for file in files) != lines(rank, 0, count):
            raise BenchmarkError(f"the files of rank {rank} are not what it printed")


def _processor_time(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
