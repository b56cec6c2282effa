"""The wheel rallypoint-worker, on every Python that it supports, under an agent in another environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.cli_process import rallypoint, refusal
from house.source import ROOT

VERSIONS = ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14")

PROGRAM = """
import importlib, os, pathlib, sys, time
import rallypoint.worker
from rallypoint.timer import expires, progress
from rallypoint.worker import Store, notice, record
from rallypoint.worker.metrics import put, timed

@expires(after=60)
@timed
def exchange(store, rank):
    store.set(f"key/{rank}", os.environ["RANK"])
    return store.get(f"key/{1 - rank}").decode()

@record
def main(mode):
    rank = int(os.environ["RANK"])
    folder = pathlib.Path(rallypoint.worker.__file__).parents[1]
    ours = [path.relative_to(folder.parent).with_suffix("") for path in folder.rglob("*.py")]
    for path in ours:
        if "torch" not in path.parts:  # torch is not installed here
            importlib.import_module(".".join(path.parts).replace(".__init__", ""))
    with expires(after="auto"):
        assert exchange(Store.from_environment(), rank) == str(1 - rank)
    progress(3)
    put("loss", 0.5)
    assert notice() is None
    others = {name.split(".")[0] for name in sys.modules} & {"grpc", "google", "click"}
    print(f"python {sys.version_info[0]}.{sys.version_info[1]}, {len(ours)} files, {others or 'none'} of the agent's")
    if rank == 0 and mode == "raise":
        raise ValueError("no data")
    with expires(after=0.5 if rank == 0 else 600):
        time.sleep(600 if mode != "end" else 0)

main(sys.argv[1])
"""


def build(project: Path, folder: Path) -> Path:
    """Build the wheel of a project, as `make wheel` does, without network; return its path."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel rallypoint-worker."""
    return build(ROOT / "worker", tmp_path_factory.mktemp("wheel"))


def interpreters() -> Iterator[tuple[str, str | None]]:
    """Yield each version with its interpreter here: on the path, or of pyenv or uv; None if there is none."""
    homes = [Path.home() / ".pyenv/versions", Path.home() / ".local/share/uv/python"]
    for version in VERSIONS:
        name = f"python{version}"
        found = [path for home in homes for path in home.glob(f"*{version}[.-]*/bin/{name}")]
        yield version, next(map(str, found), shutil.which(name))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, id=each[0], marks=pytest.mark.slow if each[0] != VERSIONS[0] else ())
        for each in interpreters()
    ],
)
def python(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with nothing but the wheel."""
    version, interpreter = request.param
    if interpreter is None:
        pytest.skip(f"no Python {version} here")
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([interpreter, "-m", "venv", "--without-pip", folder], check=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / f"lib/python{version}/site-packages")
    return folder / "bin/python"


def run(python: Path, tmp_path: Path, mode: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a job of two workers on that interpreter."""
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    return rallypoint("run", "--nproc-per-node=2", f"--python={python}", *flags, program, mode)


@pytest.mark.integration
def test_a_program_uses_all_that_we_have_for_workers(python: Path, tmp_path: Path) -> None:
    """Store, timers, progress, measurements, notices; `--run-path` too. Every module can be imported."""
    result = run(python, tmp_path, "end", "--run-path")
    assert result.returncode == 0, result.stderr
    (line,) = set(result.stdout.splitlines())
    (library,) = python.parents[1].glob("lib/python*")
    assert line.startswith(f"{library.name.replace('python', 'python ')}, ")
    assert line.endswith(", none of the agent's")
    assert "rallypoint-worker" not in result.stderr


@pytest.mark.integration
def test_an_exception_and_a_hang_are_reported_from_any_python(python: Path, tmp_path: Path) -> None:
    """The report has the traceback of `record`, and the stacks of the worker's own handler."""
    raised = run(python, tmp_path, "raise")
    assert raised.returncode == 1
    assert 'raise ValueError("no data")' in raised.stderr
    hung = run(python, tmp_path, "hang")
    assert hung.returncode == 1
    assert "train.py" in hung.stderr
    assert "in main" in hung.stderr


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The interpreter of an environment without any package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    return tmp_path / "bare/bin/python"


@pytest.mark.integration
def test_a_python_without_the_wheel_runs_programs_that_do_not_need_it(bare: Path, tmp_path: Path) -> None:
    """One line names the package; `--run-path` needs it, and is refused."""
    program = tmp_path / "train.py"
    program.write_text("import sys; print(sys.executable)")
    result = rallypoint("run", "--python", bare, program)
    assert result.stdout == f"{bare}\n"
    (notice,) = [line for line in result.stderr.splitlines() if "rallypoint-worker" in line]
    assert f"{bare} (Python 3." in notice
    assert "install the package rallypoint-worker" in refusal(
        rallypoint("run", "--python", bare, "--run-path", program)
    )


@pytest.mark.parametrize(
    ("python", "reason"),
    [
        ("missing/python", "is not a program; expected a Python interpreter"),
        ("", "is a folder; expected an interpreter, as in"),
        ("program.py", "is not a program"),
        ("/bin/true", "is not a Python interpreter"),
        ("/bin/ls", "is not a Python interpreter"),
    ],
)
def test_an_invalid_interpreter_is_refused(tmp_path: Path, python: str, reason: str) -> None:
    """The refusal is one line, before the job begins; from the environment as well."""
    program = tmp_path / "program.py"
    program.write_text("")
    path = str(tmp_path / python)
    assert f"--python: {path!r} {reason}" in refusal(rallypoint("run", "--python", path, program))
    by_variable = {"RALLYPOINT_PYTHON": path}
    assert f"--python: {path!r} {reason}" in refusal(rallypoint("run", program, environment=by_variable))
    assert rallypoint("run", "--no-python", "/bin/true", environment=by_variable).returncode == 0


def test_both_wheels_fit_into_one_environment_in_one_version(wheel: Path, tmp_path: Path) -> None:
    """Other versions are refused, and so are the remains of an installation after one was uninstalled."""
    whole, site = build(ROOT, tmp_path), tmp_path / "site"
    with zipfile.ZipFile(whole) as archive:
        archive.extractall(site)
    with zipfile.ZipFile(wheel) as archive:
        shared = [name for name in archive.namelist() if ".dist-info" not in name and "LICENSE" not in name]
        assert [name for name in shared if archive.read(name) != (site / name).read_bytes()] == []
        archive.extractall(site)
    # Without `site`, so that the editable installation of these tests is not found.
    program = (sys.executable, "-S", "-m", "rallypoint")
    libraries = next(path for path in sys.path if path.endswith("site-packages"))
    here = {"PYTHONPATH": f"{site}:{libraries}"}
    command = ("run", "--no-python", "/bin/true")
    assert rallypoint(*command, environment=here, program=program).returncode == 0
    (own,) = site.glob("rallypoint_worker-*.dist-info")
    other = own.rename(site / "rallypoint_worker-0.0.9.dist-info")
    reason = refusal(rallypoint(*command, environment=here, program=program))
    assert "rallypoint-worker 0.0.9 are installed in one environment" in reason
    shutil.rmtree(other)
    for name in shared:
        (site / name).unlink()
    reason = refusal(rallypoint(*command, environment=here, program=program))
    assert "the module rallypoint.rpc" in reason
    assert "is missing, perhaps because rallypoint-worker was uninstalled" in reason
