"""A program that launches: its own functions and classes, its signals, and its death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.agent.spawner.spawner import descendants
from support.marks import slow
from support.mortal import mortal
from support.processes import all_there, fresh_marker, gone
from support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.integration

TESTS = Path(__file__).parent.parent
PROGRAM = TESTS / "launcher" / "launching.py"
METHODS = [slow("spawn"), slow("fork"), "forkserver"]


def start(mode: str, folder: Path, method: str, **environment: str) -> subprocess.Popen[str]:
    temporary = folder / "tmp"
    temporary.mkdir()
    search_path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        mortal(sys.executable, str(PROGRAM), mode, str(folder), method),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": search_path, "TMPDIR": str(temporary), **environment},
    )


def wait_for_workers(program: subprocess.Popen[str], folder: Path) -> None:
    def ready() -> bool:
        return len(list(folder.glob("ready.*"))) == 2

    wait_until(lambda: ready() or program.poll() is not None, "both workers")
    if not ready():
        raise AssertionError(program.communicate()[1])


def ran(mode: str, folder: Path, method: str) -> str:
    """Run the program to its end; return its output."""
    with start(mode, folder, method) as program:
        out, err = program.communicate(timeout=PATIENCE * 3)
    assert program.returncode == 0, err
    assert list((folder / "tmp").iterdir()) == [], "nothing is left behind"
    return out


@pytest.fixture
def marker() -> Iterator[str]:
    """A variable in the environment of all processes of a test; those left at the end are killed."""
    with fresh_marker() as marker:
        yield marker


@pytest.mark.parametrize("method", METHODS)
def test_functions_and_classes_of_the_main_module_work(tmp_path: Path, method: str) -> None:
    """It works twice in one program, which never loads gRPC itself."""
    lines = ran("results", tmp_path, method).splitlines()
    name = "__main__" if method == "fork" else "__mp_main__"
    assert [line for line in lines if line != f"{name} prints"] == ["{0: 7, 1: 8}", "False"]
    logs = sorted((tmp_path / "logs").glob("*/attempt_0/*/stdout.log"))
    assert len(logs) == 4 or not logs  # output shown on the console is in no file


def test_a_fork_calls_functions_that_can_not_be_pickled(tmp_path: Path) -> None:
    """A closure works with its variables; changes by the workers are not seen by the program."""
    assert ran("closure", tmp_path, "fork") == "not to be printed twice {0: 1, 1: 1}\n[]\n"


@pytest.mark.slow
def test_forking_beside_threads_is_warned_of(tmp_path: Path) -> None:
    """There is one warning, at the line of the call."""
    assert ran("threads", tmp_path, "fork").splitlines()[-1] == "[('RuntimeWarning', 'launching.py')]"


@pytest.mark.slow
def test_a_main_module_without_a_guard_is_reported(tmp_path: Path) -> None:
    """A worker that imports it does not launch again."""
    with start("unguarded", tmp_path, "spawn") as program:
        _, err = program.communicate(timeout=PATIENCE * 3)
    assert program.returncode == 1
    assert "put the launch under `if __name__ == '__main__':`" in err


@pytest.mark.slow
def test_a_program_from_standard_input_launches_imported_functions(tmp_path: Path) -> None:
    """Workers can't import it, as it is no file; its own functions are refused where they can't work."""
    program = (
        "import sys\n"
        "from launcher import calls\n"
        "from rallypoint.launcher import CallError, LaunchConfig, elastic_launch\n"
        "def own(): return 3\n"
        "def launch(method, function, *args):\n"
        "    config = LaunchConfig(1, 1, 1, start_method=method, log_dir=sys.argv[1])\n"
        "    return elastic_launch(config, function)(*args)\n"
        "print(launch('spawn', calls.leave, 0), launch('forkserver', calls.leave, 0), launch('fork', own))\n"
        "try:\n"
        "    launch('spawn', own)\n"
        "except CallError as error:\n"
        "    print(error)\n"
    )
    search_path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    ran = subprocess.run(
        mortal(sys.executable, "-", str(tmp_path)),
        input=program,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 3,
        env={**os.environ, "PYTHONPATH": search_path, "TMPDIR": str(tmp_path)},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    results, refusal = ran.stdout.splitlines()
    assert results == "{0: None} {0: None} {0: 3}"
    assert refusal.startswith("own is defined where workers can't import it")


@pytest.mark.parametrize("method", METHODS)
def test_ctrl_c_stops_the_workers_and_is_raised(tmp_path: Path, method: str, marker: str) -> None:
    """The workers get SIGINT, the program KeyboardInterrupt, and its handlers are restored."""
    with start("linger", tmp_path, method, MARKER=marker) as program:
        wait_for_workers(program, tmp_path)
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=PATIENCE * 2)
    assert out.splitlines() == ["KeyboardInterrupt ", "restored True"], err
    assert program.returncode == -signal.SIGINT
    assert sorted(path.name for path in tmp_path.glob("SIGINT.*")) == ["SIGINT.0", "SIGINT.1"]
    assert gone(marker)


@pytest.mark.slow
def test_a_signal_without_a_handler_ends_the_program_in_good_order(tmp_path: Path, marker: str) -> None:
    """The workers get SIGTERM; the program can clean up."""
    with start("linger", tmp_path, "spawn", MARKER=marker) as program:
        wait_for_workers(program, tmp_path)
        program.send_signal(signal.SIGTERM)
        out, err = program.communicate(timeout=PATIENCE * 2)
    assert out.splitlines() == ["SystemExit 143", "restored True"], err
    assert program.returncode == 143
    assert len(list(tmp_path.glob("SIGTERM.*"))) == 2
    assert gone(marker)


def test_a_signal_that_the_program_handles_is_handled_once_the_workers_are_gone(tmp_path: Path) -> None:
    """The launch has then failed, and the program goes on."""
    with start("handled", tmp_path, "spawn") as program:
        wait_for_workers(program, tmp_path)
        program.send_signal(signal.SIGTERM)
        out, err = program.communicate(timeout=PATIENCE * 2)
    assert out.splitlines() == ["handler: 15", "failed 143 None", "restored True"], err
    assert program.returncode == 0


@pytest.mark.parametrize("method", METHODS)
def test_users_signals_go_to_the_workers(tmp_path: Path, method: str) -> None:
    """A scheduler warns the program that it started; the workers decide if they stop."""
    with start("linger", tmp_path, method) as program:
        wait_for_workers(program, tmp_path)
        program.send_signal(signal.SIGUSR1)
        wait_until(lambda: len(list(tmp_path.glob("SIGUSR1.*"))) == 2, "the first signal")
        program.send_signal(signal.SIGUSR2)
        wait_until(lambda: len(list(tmp_path.glob("SIGUSR2.*"))) == 2, "the second signal")
        program.send_signal(signal.SIGINT)
        program.communicate(timeout=PATIENCE * 2)


@pytest.mark.parametrize("method", METHODS)
def test_an_agent_that_is_killed_is_an_error_and_leaves_nothing(
    tmp_path: Path, method: str, marker: str
) -> None:
    """The error has the exit of the agent; it is raised once workers and temporary folders are gone."""
    with start("linger", tmp_path, method, MARKER=marker) as program:
        wait_for_workers(program, tmp_path)
        (agent,) = [process.pid for process in descendants(program.pid) if process.parent == program.pid]
        os.kill(agent, signal.SIGKILL)
        out, err = program.communicate(timeout=PATIENCE * 2)
    assert out.splitlines() == ["failed 137 None", "restored True"], err
    wait_until(lambda: gone(marker), "the end of everything")
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("method", METHODS)
def test_nothing_outlives_the_program(tmp_path: Path, method: str, marker: str) -> None:
    """SIGKILL of the launching program ends agent, workers and daemons, and removes temporary folders."""
    with start("tree", tmp_path, method, MARKER=marker) as program:
        wait_until(lambda: all_there(tmp_path, 2), "all parts of the stubborn workers")
        program.kill()
        program.communicate(timeout=PATIENCE)
        wait_until(lambda: gone(marker), "the end of everything")
    # The folder of the call may have been created only now, and belong to the program.
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == []
