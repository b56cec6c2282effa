"""Real etcd members on loopback, for tests: they die with the process that started them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.mortal import mortal
from support.ports import free_port
from support.waiting import PATIENCE

ETCD = os.environ.get("RALLYPOINT_TEST_ETCD") or shutil.which("etcd")
"""The etcd that tests run: set the variable to try another version."""

NEEDS_ETCD = pytest.mark.skipif(ETCD is None, reason="needs the etcd command (apt install etcd-server)")

PATIENT = f"attempt-timeout={PATIENCE:g}&request-timeout={PATIENCE:g}"
"""Query of an etcd URL, with long timeouts for tests that are not about missing replies."""


@dataclass(frozen=True)
class EtcdTLS:
    """TLS files of a member, for its clients; with `client_ca` it requires client certificates."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


@dataclass
class EtcdMember:
    """One member of a cluster. Its ports and its data stay the same over restarts."""

    folder: Path
    name: str = "only"
    tls: EtcdTLS | None = None
    extra: Sequence[str] = ()
    client_port: int = field(default_factory=free_port)
    peer_port: int = field(default_factory=free_port)
    metrics_port: int = field(default_factory=free_port)
    initial_cluster: str = ""
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """The address for clients: host:port."""
        return f"127.0.0.1:{self.client_port}"

    @property
    def peer(self) -> str:
        """Its entry in --initial-cluster."""
        return f"{self.name}=http://127.0.0.1:{self.peer_port}"

    @property
    def log(self) -> Path:
        """The file with its standard output and standard error."""
        return self.folder / f"{self.name}.log"

    def start(self) -> None:
        """Start it, and don't wait for it."""
        if ETCD is None:
            pytest.skip("needs the etcd command (apt install etcd-server)")
        assert self.process is None
        self.folder.mkdir(parents=True, exist_ok=True)
        scheme = "http" if self.tls is None else "https"
        client_url, peer_url = f"{scheme}://{self.endpoint}", f"http://127.0.0.1:{self.peer_port}"
        command = [ETCD, "--name", self.name, "--data-dir", str(self.folder / f"{self.name}.etcd")]
        command += ["--listen-client-urls", client_url, "--advertise-client-urls", client_url]
        command += ["--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url]
        command += ["--initial-cluster", self.initial_cluster or self.peer]
        command += ["--listen-metrics-urls", f"http://127.0.0.1:{self.metrics_port}", "--logger", "zap"]
        if self.tls is not None:
            command += ["--cert-file", str(self.tls.certificate), "--key-file", str(self.tls.key)]
            if self.tls.client_ca is not None:
                command += ["--client-cert-auth", "--trusted-ca-file", str(self.tls.client_ca)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                mortal(*command, *self.extra), stderr=log, stdout=log, env=environment
            )

    def healthy(self) -> bool:
        """Return True if it has a leader and commits."""
        url = f"http://127.0.0.1:{self.metrics_port}/health"
        with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(url, timeout=5) as answer:
            return bool(json.load(answer)["health"] == "true")
        return False

    def metric(self, name: str) -> float:
        """Return the value of one of its metrics."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(f"{name} "):
                    return float(line.rpartition(" ")[2])
        raise AssertionError(f"etcd has no metric {name}")

    def wait(self) -> None:
        """Wait until it is healthy."""
        began = time.monotonic()
        while not self.healthy():
            assert self.process is not None
            if self.process.poll() is not None or time.monotonic() - began > PATIENCE:
                raise AssertionError(f"etcd is not healthy: {self.log.read_text()[-2000:]}")
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, such as SIGSTOP or SIGCONT; after SIGSTOP, return when it has stopped."""
        assert self.process is not None
        self.process.send_signal(number)
        if number is signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        """Kill it, if it runs; keep its data."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def restart(self) -> None:
        """Kill it, start it again, and wait until it is healthy."""
        self.kill()
        self.start()
        self.wait()


class EtcdCluster:
    """Members of one cluster, running and healthy."""

    def __init__(
        self, folder: Path, size: int = 1, *, tls: EtcdTLS | None = None, extra: Sequence[str] = ()
    ) -> None:
        self.members = [EtcdMember(folder, f"m{index}", tls, extra) for index in range(size)]
        for member in self.members:
            member.initial_cluster = ",".join(each.peer for each in self.members)

    def start(self) -> None:
        """Start all members and wait until they are healthy."""
        for member in self.members:
            member.start()
        for member in self.members:
            member.wait()

    def stop(self) -> None:
        """Kill all members."""
        for member in self.members:
            member.kill()

    @property
    def endpoints(self) -> str:
        """The client addresses of all members: host:port,host:port."""
        return ",".join(member.endpoint for member in self.members)

    @property
    def url(self) -> str:
        """The etcd URL of the cluster."""
        return f"etcd://{self.endpoints}"


@contextlib.contextmanager
def etcd_cluster(
    folder: Path, size: int = 1, *, tls: EtcdTLS | None = None, extra: Sequence[str] = ()
) -> Iterator[EtcdCluster]:
    """Run a cluster until the block ends. Skips the test if etcd is not installed."""
    for attempt in range(3):
        # Another process may take a port between the check and the start: then retry with others.
        cluster = EtcdCluster(folder / f"cluster{attempt}", size, tls=tls, extra=extra)
        try:
            cluster.start()
        except AssertionError as error:
            cluster.stop()
            if "address already in use" not in str(error) or attempt == 2:
                raise
            continue
        break
    try:
        yield cluster
    finally:
        cluster.stop()
