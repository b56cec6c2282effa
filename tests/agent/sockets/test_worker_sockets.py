"""Workers find their agent's sockets with any folder for temporary files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from rallypoint.agent.config.job import JobConfig, Peer
from rallypoint.agent.sockets.watchdog import HostWatchdog
from rallypoint.agent.sockets.worker_sockets import WorkerSockets
from rallypoint.rendezvous.client import HeldLease
from rallypoint.rendezvous.v1.rendezvous_service_pb2 import RunSettings
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import SettingError
from support.host_workers import HostWorkers

NOWHERE = Peer("127.0.0.1:1")


@pytest.fixture
def long_folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put temporary files into a folder whose path has as many bytes as the test's parameter."""
    short = tempfile.mkdtemp(dir="/tmp")
    folder = Path(short, "x" * (request.param - len(short) - 1))
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    shutil.rmtree(short)


def sockets(channel: grpc.aio.Channel) -> WorkerSockets:
    """The sockets of a job whose services get no requests."""
    config = JobConfig("run", "node", "127.0.0.1", RunSettings(), ("true",), {}, NOWHERE, NOWHERE, 2)
    return WorkerSockets(config, channel, HostWatchdog(None, print), HostWorkers(), print)


async def test_the_sockets_are_there_as_long_as_the_job() -> None:
    """The timer sockets start with the lease, when workers can be named; no file is left."""
    async with open_channel(NOWHERE.endpoint) as channel:
        async with sockets(channel) as ours:
            names = ("RALLYPOINT_STORE_SOCKET", "RALLYPOINT_TIMER_SOCKET", "RALLYPOINT_TIMER_STREAM_SOCKET")
            store, timer, stream = (Path(ours.environment[name]) for name in names)
            pipe = ours.environment["TORCHELASTIC_TIMER_FILE"]
            pipes = [Path(pipe.replace("${local_rank}", str(local_rank))) for local_rank in range(2)]
            assert (store.is_socket(), timer.exists(), pipes[0].exists()) == (True, False, False)
            await ours.act_under(HeldLease(7), 1)
            assert timer.is_socket()
            assert stream.is_socket()
            assert [pipe.is_fifo() for pipe in pipes] == [True, True]
            await ours.act_under(HeldLease(9), 1)
            ours.clear("0@1")
        assert not store.parent.exists()


@pytest.mark.parametrize("long_folder", [65, 66, 67, 200], indirect=True)
@pytest.mark.usefixtures("long_folder")
async def test_a_long_path_to_temporary_files_is_no_obstacle() -> None:
    """A socket's path has 107 bytes at most, and some clusters give every job a folder of its own."""
    async with open_channel(NOWHERE.endpoint) as channel, sockets(channel) as ours:
        await ours.act_under(HeldLease(7), 1)
        assert {len(path) <= 107 for name, path in ours.environment.items() if name.endswith("SOCKET")} == {
            True
        }


async def test_an_unwritable_folder_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It includes a remedy."""
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    async with open_channel(NOWHERE.endpoint) as channel:
        with pytest.raises(SettingError, match=r"can't make the workers' sockets: .*set TMPDIR") as caught:
            await sockets(channel).__aenter__()
    assert "\n" not in str(caught.value)
