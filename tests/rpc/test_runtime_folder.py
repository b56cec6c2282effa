"""The folder of this user's sockets: no other user can enter it, and services are found in it by name."""

from __future__ import annotations

import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from rallypoint.rpc import runtime_folder as folders
from rallypoint.rpc.endpoint import RunSecret, SettingError
from rallypoint.rpc.runtime_folder import (
    found_socket,
    new_run_socket,
    open_private,
    role_socket,
    run_socket,
    runtime_folder,
    secret_beside,
    user_secret,
)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the test's own, not created yet; short, as a socket's path must be."""
    made = tmp_path_factory.mktemp("r") / "x"
    monkeypatch.setenv("RALLYPOINT_RUNTIME_DIR", str(made))
    return made


def listening(endpoint: str) -> socket.socket:
    """Return a server of a socket."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(endpoint.removeprefix("unix:"))
    server.listen()
    return server


def test_only_this_user_may_enter_it(folder: Path) -> None:
    assert runtime_folder() == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert runtime_folder() == folder


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_folder_that_others_may_enter_is_refused(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(
        SettingError, match=r"only this user can enter .*remove it, or set RALLYPOINT_RUNTIME_DIR"
    ):
        runtime_folder()


def test_another_users_folder_and_a_link_are_refused(folder: Path, tmp_path: Path) -> None:
    """Another user may have created it in /tmp first."""
    if os.geteuid() == 0:
        folder.mkdir(mode=0o700)
        os.chown(folder, 65534, 65534)
        with pytest.raises(SettingError, match="only this user"):
            runtime_folder()
        folder.rmdir()
    (tmp_path / "private").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "private")
    with pytest.raises(SettingError, match="only this user"):
        runtime_folder()


def test_a_folder_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RALLYPOINT_RUNTIME_DIR", str(tmp_path / "file" / "x"))
    with pytest.raises(SettingError, match=r"can't make .*file/x.*Not a directory"):
        runtime_folder()


def test_the_sessions_folder_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RALLYPOINT_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_folder() == tmp_path / "rallypoint"


def test_a_service_is_found_by_the_run_or_else_by_its_role(folder: Path) -> None:
    own = role_socket("rendezvous")
    assert own == f"unix:{folder}/rendezvous.sock"
    assert found_socket("rendezvous", "train") == own
    with new_run_socket("rendezvous", "train") as first, new_run_socket("rendezvous", "train") as second:
        assert first != second, "two agents of a run on one host"
        assert run_socket("rendezvous", "train") is None, "nobody listens yet"
        with closing(listening(first)):
            assert found_socket("rendezvous", "train") == first
            assert found_socket("timer", "train") == role_socket("timer")
            assert found_socket("rendezvous", "train2") == own
        with closing(listening(second)):
            assert found_socket("rendezvous", "train") == second
    assert list(folder.iterdir()) == []


def test_looking_for_a_service_makes_no_folder(folder: Path) -> None:
    assert run_socket("timer", "train") is None
    assert not folder.exists()


def test_without_a_name_the_only_one_is_found(folder: Path) -> None:
    """A supervisor's own services are found for any run; of the agents of runs, the only one, if no run is named."""
    with new_run_socket("agent", "train") as agent, closing(listening(agent)):
        assert found_socket("agent", "") == agent
        assert found_socket("agent", "train2") == role_socket("agent")
        with new_run_socket("agent", "train2") as another, closing(listening(another)):
            with pytest.raises(SettingError, match=r"2 runs: train, train2; give RUN_ID, or .* unix:/"):
                found_socket("agent", "")
            assert found_socket("agent", "train2") == another
        with new_run_socket("agent", "train") as second, closing(listening(second)):
            assert found_socket("agent", "") in (agent, second), "of one run"
    with new_run_socket("timer", "") as timer, closing(listening(timer)):
        assert found_socket("timer", "train") == timer
    supervisor = role_socket("agent")
    with closing(listening(supervisor)):
        assert found_socket("agent", "") == supervisor
        assert found_socket("rendezvous", "train") == supervisor


def test_a_runs_secret_is_beside_its_socket(folder: Path) -> None:
    """Clients that the service redirects to another host need it; it is deleted with the socket."""
    with new_run_socket("rendezvous", "train", RunSecret("of the run")) as endpoint:
        secret = secret_beside(endpoint)
        assert secret is not None
        assert secret.text == "of the run"
        (file,) = folder.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert secret_beside(f"unix:/tmp/{Path(endpoint).name}") is None
        assert secret_beside("127.0.0.1:1") is None
    assert list(folder.iterdir()) == []


def test_a_folder_too_long_for_sockets_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RALLYPOINT_RUNTIME_DIR", str(tmp_path / ("x" * 80)))
    with (
        pytest.raises(SettingError, match=r"at most 107 bytes: set RALLYPOINT_RUNTIME_DIR to a shorter one"),
        new_run_socket("rendezvous", "train"),
    ):
        pass


def test_a_run_whose_name_looks_like_anothers_socket_is_not_taken_for_it(folder: Path) -> None:
    with new_run_socket("agent", "train.rendezvous.b") as other, closing(listening(other)):
        assert run_socket("rendezvous", "train") is None
        assert found_socket("rendezvous", "train") == role_socket("rendezvous")
        assert run_socket("agent", "train.rendezvous.b") == other


@pytest.mark.parametrize("run_id", ["../../etc/x", "a" * 256, "a b", "*", ".", "ü", ""])
def test_any_name_of_a_run_stays_in_the_folder(folder: Path, run_id: str) -> None:
    with new_run_socket("rendezvous", run_id) as endpoint, closing(listening(endpoint)):
        assert Path(endpoint.removeprefix("unix:")).parent == folder
        assert run_socket("rendezvous", run_id) == endpoint
        assert run_socket("rendezvous", "another") is None


def test_sockets_of_agents_that_were_killed_go_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an agent that is about to serve there stay."""
    monkeypatch.setattr(folders, "_STARTING", 0.0)
    runtime_folder()
    dead, alive = folder / "run-a.timer.1.sock", folder / "run-b.timer.2.sock"
    listening(f"unix:{dead}").close()
    with closing(listening(f"unix:{alive}")):
        os.utime(dead, (1, 1))
        os.utime(alive, (1, 1))
        with new_run_socket("timer", "c"):
            assert [path.name for path in folder.iterdir()] == [alive.name]


def test_all_processes_of_a_user_have_one_secret(folder: Path) -> None:
    """Any process may create it: no later one replaces it."""
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: user_secret(), range(32)))
    assert len(found) == 1
    (secret,) = found
    assert len(secret.text) == 64
    assert secret.text not in repr(secret)
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("umask", [0, 0o022, 0o777])
def test_a_private_file_is_private_before_it_has_content(tmp_path: Path, umask: int) -> None:
    """A new one is, and one that others could read before; if another user owns it, only its content is changed."""
    paths = [tmp_path / "new", tmp_path / "old"]
    paths[1].write_text("old")
    paths[1].chmod(0o644)
    before = os.umask(umask)
    try:
        for path in paths:
            with open(path, "w", opener=open_private) as file:
                assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
    finally:
        os.umask(before)
    with pytest.MonkeyPatch.context() as patch:
        paths[1].chmod(0o644)
        patch.setattr(os, "geteuid", lambda: -1)
        os.close(open_private(paths[1], os.O_RDONLY))
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o600, 0o644]
