"""Logs of a whole run, as users find them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from cli.cli_process import RALLYPOINT, clean_environment, rallypoint
from support.mortal import mortal
from support.processes import fresh_marker, gone, living
from support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.integration

_FAILING = """
import os, sys
for number in range(2000):
    print("line", number, "of rank", os.environ["RANK"], file=sys.stderr)
if os.environ["RANK"] == "1":
    raise RuntimeError("no such layer")
import time
time.sleep(600)
"""


# The command; its agent waits for the last lines of a log as long as a busy machine needs.
_RALLYPOINT_WITH_LONG_TIMEOUTS = f"""
import sys
from rallypoint.agent.logs import output
from rallypoint.agent.workers import group
from rallypoint.cli.main import main

output.ROTATION_TIMEOUT = group._LAST_OUTPUT_TIMEOUT = {PATIENCE}
sys.exit(main())
"""


def _run(folder: Path, program: str, *options: str) -> tuple[int, str, Path]:
    script = folder / "worker.py"
    script.write_text(program)
    result = rallypoint(
        *("run", "--standalone", "--nproc-per-node", "2", "--log-dir", str(folder / "logs")),
        *("--redirects", "3", *options, str(script)),
        program=(sys.executable, "-c", _RALLYPOINT_WITH_LONG_TIMEOUTS),
    )
    (run,) = (folder / "logs").iterdir()
    return result.returncode, result.stderr, run


def test_the_report_has_the_last_lines_of_a_rotated_log(tmp_path: Path) -> None:
    """The agent waits for a traceback that is not yet in the file when the worker has ended."""
    code, report, run = _run(tmp_path, _FAILING, "--log-max-size", "16KiB", "--log-keep-files", "2")
    assert code == 1
    assert "reason     RuntimeError: no such layer" in report
    assert 'File "' in report
    place = run / "attempt_0" / "ranks" / "1"
    names = sorted(path.name for path in place.iterdir())
    assert [name.partition(".log")[0] for name in names] == ["stderr"] * 3 + ["stdout"]
    kept = b"".join((place / name).read_bytes() for name in [*names[1:3], names[0]])
    assert kept.endswith(b"RuntimeError: no such layer\n")
    assert kept.startswith(b"line ")


@pytest.mark.slow
def test_only_the_latest_attempts_are_kept(tmp_path: Path) -> None:
    """The last attempt and the last failed one are kept; names of attempts don't change."""
    program = """
import os, sys
sys.exit(int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 4)
"""
    code, _, run = _run(tmp_path, program, "--max-restarts", "4", "--keep-attempts", "1")
    assert code == 0
    assert sorted(path.name for path in run.glob("attempt_*")) == ["attempt_3", "attempt_4"]


def test_filtered_lines_are_in_one_file(tmp_path: Path) -> None:
    """The file has the lines of all workers of the host, with the user's prefix."""
    program = "import os; print('loss of rank', os.environ['RANK']); print('noise')"
    _, _, run = _run(
        tmp_path,
        program,
        "--duplicate-stdout-filters",
        "loss,fatal",
        "--log-line-prefix",
        "${role_name}/${rank} ",
    )
    filtered = (run / "attempt_0" / "filtered_stdout.log").read_text().splitlines()
    assert sorted(filtered) == ["default/0 loss of rank 0", "default/1 loss of rank 1"]
    assert not (run / "attempt_0" / "filtered_stderr.log").exists()


def test_bytes_that_are_no_text_are_kept(tmp_path: Path) -> None:
    """The file has them unchanged, also in a line without an end."""
    program = r"import os; os.write(1, b'\xff\xfe\x00 \r half'); os.write(1, b' a line')"
    _, _, run = _run(tmp_path, program, "--log-max-size", "1MiB")
    for local_rank in range(2):
        content = (run / "attempt_0" / str(local_rank) / "stdout.log").read_bytes()
        assert content == b"\xff\xfe\x00 \r half a line"


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of its own needs root")
def test_a_full_disk_stops_no_worker(tmp_path: Path) -> None:
    """Output that does not fit is dropped; the worker continues, and the log has one line about it."""
    mount = tmp_path / "small"
    mount.mkdir()
    if os.system(f"mount -t tmpfs -o size=256k none {mount} 2>/dev/null") != 0:  # noqa: S605
        pytest.skip("this container may mount nothing")
    try:
        script = tmp_path / "worker.py"
        script.write_text("for number in range(50_000): print('line', number)")
        result = rallypoint(
            *("run", "--standalone", "--log-dir", mount, "--log-max-size", "1MiB", "--redirects", "3"),
            *("--log-format", "json", script),
        )
    finally:
        assert os.system(f"umount {mount}") == 0  # noqa: S605
    said = [json.loads(line) for line in result.stderr.splitlines() if line.startswith("{")]
    dropped = [
        line for line in said if line["event"] == "output of a worker can't be written, and is dropped"
    ]
    assert (result.returncode, len(dropped)) == (0, 1), result.stderr
    assert dropped[0]["reason"] == "No space left on device"
    (lost,) = [line for line in said if line["event"] == "output of a worker is lost"]
    assert 0 < lost["bytes"] < 538_890


def test_the_last_output_of_workers_survives_their_agent(tmp_path: Path) -> None:
    """The agent is killed while output is still in the pipe: it gets into the file, and no process is left."""
    program = """
import os, signal, sys
from pathlib import Path
folder = Path(sys.argv[1])
os.write(1, b"begun\\n")
while not (folder / "go").exists():
    pass
os.write(1, b"last words\\n" * 1000)
(folder / "said").touch()
signal.pause()
"""
    (tmp_path / "worker.py").write_text(program)
    with fresh_marker() as marker:
        agent = subprocess.Popen(
            mortal(
                *(str(RALLYPOINT), "run", "--standalone", "--log-dir", str(tmp_path / "logs")),
                *("--log-max-size", "1MiB", str(tmp_path / "worker.py"), str(tmp_path)),
            ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=clean_environment(MARKER=marker),
        )
        try:
            # Then the copier already ignores SIGHUP, which the kernel sends to a stopped orphaned process group.
            wait_until(lambda: _written(tmp_path) == b"begun\n", "the worker's first words to be in the file")
            (copier,) = [pid for pid in living(marker) if b"copier.py" in _command(pid)]
            os.kill(copier, signal.SIGSTOP)
            (tmp_path / "go").touch()
            wait_until((tmp_path / "said").exists, "the last words")
        finally:
            agent.kill()
            agent.wait()
        # The kernel continues a stopped orphan, unless a subreaper above this test adopts it.
        with suppress(ProcessLookupError):
            os.kill(copier, signal.SIGCONT)
        wait_until(lambda: gone(marker), "the worker to be dead and the copier to be done")
    assert _written(tmp_path) == b"begun\n" + b"last words\n" * 1000


def _written(folder: Path) -> bytes:
    return b"".join(log.read_bytes() for log in folder.glob("logs/*/attempt_0/0/stdout.log"))


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
