"""`rallypoint serve rendezvous --journal etcd://…`: several processes, one service."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from cli.cli_process import RALLYPOINT, clean_environment, rallypoint, refusal
from rallypoint.rendezvous.cluster.replica import Replicas
from support.etcd_server import NEEDS_ETCD, EtcdCluster, EtcdMember, etcd_cluster
from support.marks import slow
from support.mortal import mortal
from support.ports import free_port
from support.server_info import info_at
from support.waiting import wait_until

pytestmark = [NEEDS_ETCD, pytest.mark.integration]

PATIENCE = 90.0
TTL = 5

WORKER = """
import os, pathlib, time
where = pathlib.Path(os.environ["WHERE"])
(where / f"started-{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
while not (where / "end").exists():
    time.sleep(0.05)
"""


class Process:
    """A `serve rendezvous` process, and its log."""

    def __init__(self, log: Path, journal: str, *flags: str, **environment: str) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._log = log
        command = [str(RALLYPOINT), "serve", "rendezvous", "--port", str(self.port), "--journal", journal]
        command += ["--log-format", "json", "--lease-ttl", str(TTL), *flags]
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                mortal(*command), stderr=stderr, env=clean_environment(**environment)
            )

    def records(self) -> list[dict[str, Any]]:
        """Return its log records."""
        lines = self._log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def has_logged(self, event: str) -> bool:
        """Return True if it has logged this event."""
        return any(record["event"] == event for record in self.records())

    def listed(self, *flags: str) -> dict[str, Any]:
        """Return its list of all replicas; empty while it can't reply."""
        told = rallypoint("replicas", "--rdzv-endpoint", self.address, "--json", *flags)
        return dict(json.loads(told.stdout)) if told.returncode == 0 else {}

    def end(self, number: signal.Signals) -> int:
        """Send a signal, and wait for its exit."""
        self.process.send_signal(number)
        return self.process.wait(timeout=PATIENCE)


Serve = Callable[..., Process]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start replicas; end them after the test."""
    started: list[Process] = []

    def start(journal: str, *flags: str, **environment: str) -> Process:
        started.append(Process(tmp_path / f"serve{len(started)}.log", journal, *flags, **environment))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


@contextmanager
def agent(where: Path, *endpoints: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run an agent with two workers that exit when the test creates a file."""
    script = where / "worker.py"
    script.write_text(WORKER)
    command = [str(RALLYPOINT), "run", "--rdzv-endpoint", ",".join(endpoints), "--rdzv-id", "digits"]
    command += ["--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "3"]
    command += ["--log-dir", str(where / "logs"), str(script)]
    with (where / "agent.log").open("wb") as log:
        process = subprocess.Popen(
            mortal(*command), stderr=log, stdout=log, env=clean_environment(WHERE=str(where))
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_replica_describes_itself_as_one_of_several(etcd: EtcdCluster, serve: Serve) -> None:
    """It uses the name that the others see, so that clients expect redirects."""
    replica = serve(f"{etcd.url}/described?shards=1")
    wait_until(lambda: bool(replica.listed()), "the replica")
    found = asyncio.run(info_at(replica.address))
    assert [*found.capabilities] == ["health", "reflection", "replicas"]
    assert [each["instance"] for each in replica.listed()["replicas"]] == [found.instance]
    [ready] = [record for record in replica.records() if record["event"] == "ready"]
    assert ready["capabilities"] == [*found.capabilities]


@pytest.mark.slow
def test_an_agents_run_survives_the_death_of_its_owner(
    etcd: EtcdCluster, serve: Serve, tmp_path: Path
) -> None:
    """After SIGKILL, and after a drain, the next replica owns the run, and no worker is started again."""
    journal = f"{etcd.url}/survival?shards=4"
    replicas = [serve(journal, "--replica-name", name) for name in "abc"]
    wait_until(lambda: all(each.has_logged("session with etcd") for each in replicas), "sessions")
    with agent(tmp_path, *(each.address for each in replicas)) as process:
        wait_until(lambda: len(list(tmp_path.glob("started-*"))) == 2, "workers")
        for number in (signal.SIGKILL, signal.SIGTERM):
            place = replicas[0].listed("--run", "digits")["run"]
            owner = next(each for each in replicas if each.address == place["ownerAddress"])
            owner.end(number)
            replicas.remove(owner)

            def taken_over(before: str = place["ownerAddress"]) -> bool:
                run = replicas[0].listed("--run", "digits").get("run", {})
                return run.get("ownerAddress", "") not in ("", before)

            wait_until(taken_over, "another owner")
        (left,) = replicas
        wait_until(lambda: _connected(left), "the node to be back")
        (tmp_path / "end").touch()
        assert process.wait(timeout=PATIENCE) == 0, (tmp_path / "agent.log").read_text()
    assert sorted(path.name for path in tmp_path.glob("started-*")) == ["started-0-0", "started-1-0"]
    kinds = [event["kind"] for event in _events(left)]
    assert kinds.count("EVENT_KIND_ROUND_FROZEN") == 1
    assert kinds[-1] == "EVENT_KIND_RUN_CLOSED"
    assert left.end(signal.SIGTERM) == 0


def _connected(replica: Process) -> bool:
    told = rallypoint("status", "digits", "--rdzv-endpoint", replica.address, "--json")
    nodes = json.loads(told.stdout)["run"]["nodes"] if told.returncode == 0 else []
    return bool(nodes) and all(node["connected"] for node in nodes)


def _events(replica: Process) -> list[dict[str, Any]]:
    told = rallypoint("events", "digits", "--rdzv-endpoint", replica.address, "--json")
    assert told.returncode == 0, told.stderr
    return [json.loads(line) for line in told.stdout.splitlines()]


def test_a_wrong_password_ends_it_with_a_clear_line(serve: Serve, tmp_path: Path) -> None:
    """A retry would not help: without the line, only waiting clients would show it."""
    with ExitStack() as stack:
        cluster = stack.enter_context(etcd_cluster(tmp_path / "etcd"))
        for line in ("user add root:right", "user grant-role root root", "auth enable"):
            _etcdctl(cluster.members[0], *line.split())
        process = serve(
            f"etcd://root@{cluster.endpoints}/x",
            RALLYPOINT_ETCD_PASSWORD="wrong",  # noqa: S106
        )
        assert process.process.wait(timeout=PATIENCE) == 2
        line = (tmp_path / "serve0.log").read_text().splitlines()[-1]
        assert line.startswith(f"Error: etcd://root@{cluster.endpoints}/x refuses us: ")
        assert "wrong" not in line.replace("root@", "")
        right = serve(f"etcd://root@{cluster.endpoints}/x", RALLYPOINT_ETCD_PASSWORD="right")  # noqa: S106
        wait_until(lambda: right.has_logged("session with etcd"), "a session with the right password")


def _etcdctl(member: EtcdMember, *arguments: str) -> None:
    subprocess.run(
        ["etcdctl", f"--endpoints={member.endpoint}", *arguments],
        env=clean_environment(ETCDCTL_API="3"),
        check=True,
        capture_output=True,
        timeout=PATIENCE,
    )


def test_a_start_without_etcd_is_logged_once_and_ends_at_ctrl_c(serve: Serve) -> None:
    """It is not ready, does not exit and does not fill the log; Ctrl-C ends it at once."""
    process = serve(f"etcd://127.0.0.1:{free_port()}/x")
    event = "no session with etcd: runs wait until there is one"
    wait_until(lambda: process.has_logged(event), "a line about it")
    assert process.end(signal.SIGINT) == 0
    assert [record["event"] for record in process.records()].count(event) == 1


def test_an_address_that_others_can_not_reach_is_reported(serve: Serve) -> None:
    """The default is for one machine: clients on others that follow it connect to themselves."""
    journal = f"etcd://127.0.0.1:{free_port()}/x"
    event = "this replica is advertised on loopback: only clients of this machine can reach it"
    silent = serve(journal, "--advertise", "10.0.0.7:29400")
    warned = serve(journal)
    wait_until(lambda: warned.has_logged(event), "a line about it")
    (record,) = (each for each in warned.records() if each["event"] == event)
    assert record["address"] == warned.address
    assert "--advertise HOST:PORT" in record["advice"]
    wait_until(
        lambda: silent.has_logged("no session with etcd: runs wait until there is one"), "a line after it"
    )
    assert not silent.has_logged(event)


def test_the_shown_default_is_the_effective_one() -> None:
    """The settings are not imported for the help page."""
    shown = next(
        line for line in rallypoint("serve", "rendezvous", "--help").stdout.split("--") if "lease-ttl" in line
    )
    assert f"default: ({Replicas().lease_ttl})" in " ".join(shown.split())


MISTAKES: list[tuple[Any, str]] = [
    (["--journal", "etcd://"], "--journal: etcd URL 'etcd://' has an empty host"),
    (
        ["--journal", "etcd://127.0.0.1:1/x?shards=0"],
        "--journal: shards='0', expected one number from 1 to 4096",
    ),
    (
        ["--journal", "etcd://127.0.0.1:1/x", "--advertise", "0.0.0.0:1"],
        "--advertise 0.0.0.0:1 is not an address",
    ),
    (
        ["--journal", "etcd://127.0.0.1:1/x", "--advertise", "nonsense"],
        "--advertise: endpoint 'nonsense' has no port",
    ),
    (["--journal", "etcd://127.0.0.1:1/x", "--replica-name", "a/b"], "--replica-name 'a/b' is not valid"),
    (["--journal", "memory", "--replica-name", "a"], "--replica-name is for replicas over --journal etcd://"),
    (["--journal", "memory", "--lease-ttl", "10"], "--lease-ttl is for replicas over --journal etcd://"),
    (["--journal", "etcd:/me:hidden@a"], "--journal: 'etcd:***@a' is not the URL of an etcd cluster"),
    (["--journal", "memory", "--advertise", "a:1"], "--advertise is for replicas over --journal etcd://"),
]


@pytest.mark.parametrize(("flags", "told"), [*MISTAKES[:3], *(slow(*mistake) for mistake in MISTAKES[3:])])
def test_flags_that_make_no_sense_are_refused(flags: list[str], told: str) -> None:
    """The refusal is one line, with exit code 2."""
    result = rallypoint("serve", "rendezvous", "--port", "0", "--log-level", "error", *flags)
    assert refusal(result).startswith(told)
