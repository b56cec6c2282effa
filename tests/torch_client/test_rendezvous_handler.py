"""torch's documentation of a RendezvousHandler holds for ours, on a real service."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from google.protobuf.json_format import Parse

from cli.cli_process import clean_environment, rallypoint
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from support.ports import free_port
from support.processes import modules_after
from support.waiting import PATIENCE, wait_until
from torch_client.torchrun_job import is_alive
from torture.mortal_server import MortalServer

pytestmark = [pytest.mark.torch, pytest.mark.integration, pytest.mark.timeout(300)]

FUNCTION_WORKERS = Path(__file__).with_name("function_workers.py")


@pytest.fixture(scope="module", autouse=True)
def api() -> Any:
    """torch's interface."""
    return pytest.importorskip("torch.distributed.elastic.rendezvous.api")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalServer]:
    """A rendezvous service over SQLite."""
    server = MortalServer(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.close()


class Handlers:
    """Handlers of one run; each is used by its own thread, as by a torchrun."""

    def __init__(self, api: Any, endpoint: str, run_id: str, nodes: tuple[int, int]) -> None:
        self._api = api
        self._endpoint = endpoint
        self._run_id = run_id
        self._nodes = nodes
        self._threads = ThreadPoolExecutor(8)
        self._companions: dict[Any, int] = {}
        self.made: list[Any] = []

    def make(self, **conf: Any) -> Any:
        """Return a handler, created as torch creates it."""
        from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

        parameters = self._api.RendezvousParameters(
            "rallypoint",
            conf.pop("endpoint", self._endpoint),
            conf.pop("run_id", self._run_id),
            *conf.pop("nodes", self._nodes),
            conf.pop("local_addr", None),
            **{"insecure": True, "last_call_timeout": "0.1", **conf},
        )
        before = children()
        handler = get_rendezvous_handler(parameters)
        self.made.append(handler)
        (self._companions[handler],) = children() - before
        return handler

    def companion(self, handler: Any) -> int:
        """Return the process id of the node of a handler."""
        return self._companions[handler]

    def status(self) -> pb.Run:
        """Return the run from the service."""
        shown = rallypoint("status", self._run_id, "--rdzv-endpoint", self._endpoint, "--insecure", "--json")
        return Parse(shown.stdout, pb.GetRunResponse()).run

    def next(self, handler: Any) -> Future[Any]:
        """Call `next_rendezvous` in another thread."""
        return self._threads.submit(handler.next_rendezvous)

    def form(self, *handlers: Any) -> list[Any]:
        """Form one round of them all."""
        return [joining.result(PATIENCE) for joining in [self.next(handler) for handler in handlers]]

    def close(self) -> None:
        """Shut all down."""
        for handler in self.made:
            handler.shutdown()
        self._threads.shutdown()


@pytest.fixture
def handlers(
    api: Any, server: MortalServer, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Handlers]]:
    """Make handlers of a run of this test's own, for so many nodes."""
    made: list[Handlers] = []

    def make(least: int, most: int) -> Handlers:
        made.append(Handlers(api, server.endpoint, request.node.name, (least, most)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def waits(handler: Any) -> bool:
    """Return True if torch's agent would restart its workers now."""
    return bool(handler.num_nodes_waiting())


def test_a_round(handlers: Callable[..., Handlers]) -> None:
    """Ranks, size and the workers' address are the same for all; no node waits, and nothing is closed."""
    run = handlers(2, 2)
    one, two = run.make(local_addr="127.0.0.1"), run.make()
    infos = run.form(one, two)
    assert sorted(info.rank for info in infos) == [0, 1]
    assert {info.world_size for info in infos} == {2}
    first, second = (info.bootstrap_store_info for info in infos)
    assert first == second
    assert first.master_addr == "127.0.0.1"
    for handler in (one, two):
        assert handler.get_backend() == "rallypoint"
        assert handler.get_run_id() == "test_a_round"
        assert not handler.use_agent_store
        assert not handler.is_closed()
        assert handler.num_nodes_waiting() == 0


def test_the_store_of_a_round(handlers: Callable[..., Handlers]) -> None:
    """All calls of torch's agent and torch's helpers work, from both nodes; and torch's own error comes in time."""
    from datetime import timedelta

    from torch.distributed import DistStoreError
    from torch.distributed.elastic.utils.store import barrier, synchronize

    run = handlers(2, 2)
    one, two = (info.store for info in run.form(run.make(), run.make()))
    one.set("text", "a")
    one.multi_set(["x", "y"], [b"1", "2"])
    assert two.multi_get(["text", "x", "y"]) == [b"a", b"1", b"2"]
    assert (one.add("sum", 2), two.add("sum", 3)) == (2, 5)
    assert two.check(["text"])
    assert not two.check(["text", "none"])
    assert two.compare_set("text", "a", "b") == b"b"
    assert one.delete_key("text")
    assert one.num_keys() == 3
    with pytest.raises(DistStoreError):
        one.wait(["none"], timedelta(seconds=0.1))
    one.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(DistStoreError):
        one.get("none")
    one.set_timeout(timedelta(seconds=PATIENCE))
    with ThreadPoolExecutor(2) as threads:
        synced = [
            threads.submit(synchronize, store, b"%d" % rank, rank, 2, "data")
            for rank, store in enumerate((one, two))
        ]
        assert [each.result(PATIENCE) for each in synced] == [[b"0", b"1"]] * 2
        for met in [threads.submit(barrier, store, 2, "meet") for store in (one, two)]:
            met.result(PATIENCE)


def test_a_newcomer_waits(handlers: Callable[..., Handlers]) -> None:
    """The agents of the round see it, and all form the next. No failure is counted."""
    run = handlers(1, 3)
    one, two = run.make(), run.make()
    run.form(one)
    joining = run.next(two)
    wait_until(lambda: waits(one), "the newcomer to be seen")
    assert one.num_nodes_waiting() == 1
    infos = [*run.form(one), joining.result(PATIENCE)]
    assert sorted(info.rank for info in infos) == [0, 1]
    assert not waits(one)
    assert run.status().restart_count == 0


def test_a_lost_node_is_noticed(handlers: Callable[..., Handlers]) -> None:
    """torch's own handlers never notice. The others form a round without it, with another port."""
    run = handlers(1, 2)
    one, two = run.make(), run.make()
    before = run.form(one, two)[0]
    os.kill(run.companion(two), signal.SIGKILL)
    wait_until(lambda: waits(one), "the loss to be seen")
    (after,) = run.form(one)
    assert (after.rank, after.world_size) == (0, 1)
    assert before.bootstrap_store_info != after.bootstrap_store_info


def test_a_call_without_a_reason_is_a_failure_of_its_workers(handlers: Callable[..., Handlers]) -> None:
    """torch's agent calls for the next round for two reasons, and this is the other one."""
    run = handlers(2, 2)
    one, two = run.make(), run.make()
    run.form(one, two)
    again = run.next(one)
    wait_until(lambda: waits(two), "the failure to be seen")
    infos = [*run.form(two), again.result(PATIENCE)]
    assert sorted(info.rank for info in infos) == [0, 1]
    assert run.status().restart_count == 1


def test_closing(handlers: Callable[..., Handlers], api: Any) -> None:
    """All nodes notice: those with workers, those that wait, and those that come later."""
    run = handlers(1, 1)
    one, spare = run.make(), run.make()
    run.form(one)
    joining = run.next(spare)
    one.set_closed()
    one.set_closed()
    with pytest.raises(api.RendezvousClosedError):
        joining.result(PATIENCE)
    for handler in (one, spare):
        wait_until(handler.is_closed, "the end to be known")
    wait_until(lambda: waits(one), "the agent to be stopped")
    for handler in (one, run.make()):
        with pytest.raises(api.RendezvousClosedError, match="closed"):
            handler.next_rendezvous()


def test_a_spare_is_let_go_at_the_end(handlers: Callable[..., Handlers], api: Any) -> None:
    """It is no failure that a spare never ran, as in torch."""
    run = handlers(1, 1)
    one, spare = run.make(), run.make()
    run.form(one)
    joining = run.next(spare)
    wait_until(
        lambda: pb.NODE_STATE_SPARE in [node.state for node in run.status().nodes], "the spare to wait"
    )
    assert one.shutdown()
    with pytest.raises(api.RendezvousGracefulExitError, match="succeeded"):
        joining.result(PATIENCE)


def test_too_few_nodes(handlers: Callable[..., Handlers], api: Any) -> None:
    """The error comes within the time for joining."""
    with pytest.raises(api.RendezvousTimeoutError):
        handlers(2, 2).make(join_timeout="1").next_rendezvous()


def test_other_settings(handlers: Callable[..., Handlers], api: Any) -> None:
    """A node with other settings than the run's is refused, and the message has both values."""
    run = handlers(1, 1)
    run.form(run.make())
    with pytest.raises(api.RendezvousStateError, match=r"join_timeout.*60"):
        run.make(join_timeout="60").next_rendezvous()


def test_no_service(handlers: Callable[..., Handlers], api: Any) -> None:
    """The error comes within the time for a first reply."""
    run = handlers(1, 1)
    handler = run.make(endpoint=f"127.0.0.1:{free_port()}", read_timeout="1")
    with pytest.raises(api.RendezvousConnectionError, match="within 1 s"):
        handler.next_rendezvous()


def test_a_run_secret(api: Any, tmp_path: Path) -> None:
    """A file has it, as for `rallypoint run`; a node with another secret is refused, with a reason."""
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("a secret of the whole job")
    wrong.write_text("the secret of another job")
    server = MortalServer(tmp_path / "server", flags=("--no-insecure", "--run-secret-file", str(right)))
    server.start()
    run = Handlers(api, server.endpoint, "run", (1, 1))
    try:
        node = run.make(insecure=False, run_secret_file=str(right))
        assert run.form(node)[0].world_size == 1
        stranger = run.make(insecure=False, run_secret_file=str(wrong), read_timeout="1")
        with pytest.raises(api.RendezvousConnectionError, match="secret"):
            stranger.next_rendezvous()
    finally:
        run.close()
        server.close()


def test_no_service_at_the_end(api: Any, tmp_path: Path) -> None:
    """`shutdown` waits for it until its timeout, and reports it; a second call does nothing."""
    server = MortalServer(tmp_path)
    server.start()
    run = Handlers(api, server.endpoint, "run", (1, 1))
    try:
        handler = run.make(close_timeout="1")
        run.form(handler)
        process = run.companion(handler)
        server.kill()
        began = time.monotonic()
        assert not handler.shutdown()
        assert time.monotonic() - began >= 1
        assert not handler.shutdown()
        assert not is_alive(process)
        assert not Path(os.environ["RALLYPOINT_STORE_SOCKET"]).parent.exists()
    finally:
        run.close()
        server.close()


def test_shutdown(handlers: Callable[..., Handlers], api: Any) -> None:
    """It ends the process of the node; afterwards the rendezvous is closed to the handler, but not to others."""
    run = handlers(1, 2)
    one, two = run.make(), run.make()
    run.form(one, two)
    process = run.companion(one)
    assert one.shutdown()
    assert one.shutdown()
    assert not is_alive(process)
    assert one.is_closed()
    assert one.num_nodes_waiting() == 0
    with pytest.raises(api.RendezvousClosedError):
        one.next_rendezvous()
    assert not two.is_closed()
    assert not waits(two)


@pytest.mark.parametrize("joined", [False, True])
def test_shutdown_while_nothing_runs(handlers: Callable[..., Handlers], api: Any, joined: bool) -> None:
    """Before the first round, or after a wait that failed, no message to the others is needed."""
    handler = handlers(2, 2).make(join_timeout="1")
    if joined:
        with pytest.raises(api.RendezvousTimeoutError):
            handler.next_rendezvous()
    assert handler.shutdown()


def test_an_error_of_the_agent_is_no_end_of_the_run(handlers: Callable[..., Handlers]) -> None:
    """The others form a round without it."""
    run = handlers(1, 2)
    one, two = run.make(), run.make()
    run.form(one, two)
    try:
        raise RuntimeError("disk full")
    except RuntimeError:
        assert one.shutdown()
    wait_until(lambda: waits(two), "the others to notice")
    assert not two.is_closed()
    assert run.form(two)[0].world_size == 1


def test_the_process_of_the_node_is_killed(handlers: Callable[..., Handlers], api: Any) -> None:
    """The agent ends, with its workers: they have no node any more."""
    run = handlers(1, 1)
    handler = run.make()
    handler.next_rendezvous()
    os.kill(run.companion(handler), signal.SIGKILL)

    def ended() -> bool:
        try:
            return waits(handler)
        except api.RendezvousConnectionError as error:
            return "ended with -9" in str(error)

    wait_until(ended, "the loss to be noticed")
    with pytest.raises(api.RendezvousConnectionError):
        handler.next_rendezvous()


def test_a_round_that_ends_during_the_rank_assignment(handlers: Callable[..., Handlers], api: Any) -> None:
    """torch's agent can't handle an error of the store there. It gets ranks, and restarts at once."""
    from torch.distributed.elastic.agent.server.api import _RoleInstanceInfo

    run = handlers(1, 3)
    nodes = [run.make() for _ in range(3)]
    infos = run.form(*nodes)
    first, second, third = (
        infos[rank].store for rank in sorted(range(3), key=lambda index: infos[index].rank)
    )
    lost = next(node for node, info in zip(nodes, infos, strict=True) if info.store is third)
    for rank, store in enumerate((first, second)):
        store.set(f"torchelastic/role_info/{rank}", _RoleInstanceInfo("default", rank, 4).serialize())
    with ThreadPoolExecutor(2) as threads:
        infos_of_all = threads.submit(
            first.multi_get, [f"torchelastic/role_info/{rank}" for rank in range(3)]
        )
        ranks_of_second = threads.submit(second.get, "torchelastic/assigned_ranks/1")
        os.kill(run.companion(lost), signal.SIGKILL)
        assert len(infos_of_all.result(PATIENCE)) == 3
        assert ranks_of_second.result(PATIENCE) == b"[4, 12, 4, 12]"
    first.multi_set([f"torchelastic/assigned_ranks/{rank}" for rank in range(3)], ["[]"] * 3)
    for node in nodes:
        if node is not lost:
            assert waits(node)


MISTAKES = [
    ({"run_id": "none"}, "which run is this"),
    ({"endpoint": ""}, "where is the rendezvous service"),
    ({"endpoint": "host:port"}, "port 'port'"),
    ({"endpoint": "other.invalid:29400", "insecure": "0"}, None),
    ({"join_timeot": "1"}, "'join_timeot' is not a setting"),
    ({"join_timeout": "soon"}, "is not a number of seconds"),
    ({"store_type": "file"}, "store_type=file"),
    ({"local_world_size": "0"}, "local_world_size='0'"),
    ({"run_secret_file": "/no/such/file"}, "No such file"),
    ({"tls_ca": "/no/such/file"}, "contradict"),
    ({"tls_ca": "/no/such/file", "insecure": "0"}, "/no/such/file"),
]


@pytest.mark.parametrize(("conf", "text"), MISTAKES, ids=[str(conf) for conf, _ in MISTAKES])
def test_a_mistake(handlers: Callable[..., Handlers], conf: dict[str, str], text: str | None) -> None:
    """The error is one line, before anything runs."""
    with pytest.raises(ValueError, match=re.escape(text) if text else None) as caught:
        handlers(1, 1).make(read_timeout="1", **conf)
    assert "\n" not in str(caught.value)


def test_every_setting_of_torchs_is_one_here(handlers: Callable[..., Handlers]) -> None:
    """These are all keys that torch's backends read from `--rdzv-conf`, and all of ours."""
    run = handlers(1, 1)
    torchs = (
        "join_timeout=60 last_call_timeout=1 close_timeout=5 heartbeat_timeout=5 keep_alive_interval=1 "
        "keep_alive_max_attempt=3 read_timeout=60 is_host=0 use_libuv=1 store_type=tcp timeout=900"
    )
    ours = (
        "confirm_timeout=60 disconnect_grace=2 exit_barrier_timeout=300 scale_up_policy=delayed scale_up_delay=1 "
        "rank_policy=topology restart_window=60 max_restarts_per_node=3 restart_backoff=1 topology=hall/rack "
        "role=trainer local_world_size=8 node_id=me"
    )
    conf = dict(pair.split("=") for pair in f"{torchs} {ours}".split())
    assert run.form(run.make(**conf))[0].world_size == 1
    (node,) = run.status().nodes
    assert (node.node_id, node.local_world_size, node.role) == ("me", 8, "trainer")


def test_forks_of_the_agent(server: MortalServer) -> None:
    """Function workers with `start_method="fork"` return their values, and gRPC is in no process of torch's."""
    command = [sys.executable, str(FUNCTION_WORKERS), server.endpoint, "fork"]
    ended = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "returned [0, 1], without gRPC"


def test_a_killed_agent_takes_the_process_of_its_node_along(server: MortalServer) -> None:
    """This holds although its forks live on, with all that they inherited."""
    command = [sys.executable, str(FUNCTION_WORKERS), server.endpoint, "linger"]
    with subprocess.Popen(command, env=clean_environment(), stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        companion, worker = (int(word) for word in agent.stdout.readline().split())
        try:
            agent.kill()
            agent.wait(PATIENCE)
            wait_until(lambda: not is_alive(companion), "the process of the node to end")
            assert is_alive(worker)
        finally:
            os.kill(worker, signal.SIGKILL)


def test_every_torchrun_loads_little(api: Any) -> None:
    """Every torchrun loads the plug-in, with any backend: it costs no import but its own."""
    loaded = modules_after(
        "import torch.distributed.elastic.rendezvous as rendezvous; "
        "assert 'rallypoint' in rendezvous.rendezvous_handler_registry._registry"
    )
    ours = {name for name in loaded if name.partition(".")[0] in ("rallypoint", "grpc", "google")}
    assert ours == {"rallypoint", "rallypoint.torch"}


def children() -> set[int]:
    """Return the processes that this one has started, without zombies."""
    found = psutil.Process().children()
    return {process.pid for process in found if process.status() != psutil.STATUS_ZOMBIE}
