"""The command runs the requested benchmarks, writes the figures, reports failures, and leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import __main__ as command
from benchmarks.figures import Figure
from benchmarks.processes import BenchmarkError
from benchmarks.session import Session
from support.marks import slow
from support.processes import fresh_marker, gone
from support.waiting import wait_until

TESTS = Path(__file__).parent.parent
KEYS = {"name", "n", "value", "unit", "floor", "peer", "note", "ratio_to_floor", "ratio_to_peer"}
JOURNALS = ("memory", "sqlite")
STORM = (
    "lost",
    "ranks",
    "final",
    "ranks.same-messages",
    "final.same-messages",
    "memory",
    "cpu",
    "cpu.same-messages",
)
BLOCK = (
    "raised",
    *(
        f"{pace}.{quantity}"
        for pace in ("back-to-back", "slept", "computed")
        for quantity in ("median", "p99", "longest")
    ),
)

# The figures of each benchmark at size 8.
FIGURES = {
    "rendezvous": [f"rendezvous.{journal}.{what}" for journal in JOURNALS for what in STORM],
    "security": [
        "security.socket",
        *(f"security.{kind}{what}" for kind in ("tls", "tokens") for what in ("", ".cpu")),
    ],
    "fanout": [f"fanout.{journal}.{what}" for journal in JOURNALS for what in ("first", "last")],
    "failover": [f"failover.{journal}.{what}" for journal in JOURNALS for what in ("told", "replaced")],
    "heartbeat": ["heartbeat.burst", "heartbeat.paced", "heartbeat.burst.fleet", "heartbeat.paced.fleet"],
    "store": [
        f"store.{journal}.{what}"
        for journal in JOURNALS
        for what in ("set", "get", "add", "waited.first", "waited.last")
    ],
    "journal": ["journal.sqlite"],
    "etcd": ["etcd.states", "etcd.joined.ranks", "etcd.joined.final"],
    "expires": [f"expires.{scope}.{what}" for scope in ("default", "explicit") for what in BLOCK],
    "reap": ["reap.p50", "reap.p99", "reap.max"],
    "watchdog": ["watchdog.late.p50", "watchdog.late.p99", "watchdog.late.max", "watchdog.cpu"],
    "timer-requests": ["timer-requests.rate", "timer-requests.cpu"],
}
# The benchmarks of whole agents; test_agents.py runs them, shortened.
OF_AGENTS = ("launch", "restart", "newcomer", "idle")
NAMES = [*FIGURES, *OF_AGENTS, "flood"]
NAMES[NAMES.index("journal") : NAMES.index("journal")] = ["torch-store", "torch-handlers"]  # need torch


def _command(folder: Path, *arguments: str) -> list[str]:
    places = ["--folder", str(folder / "work"), "--json", str(folder / "bench.json")]
    return [sys.executable, "-m", "benchmarks", "--no-peer", "--trials", "1", *places, *arguments]


def _environment(**more: str) -> Mapping[str, str]:
    return os.environ | {"PYTHONPATH": str(TESTS)} | more


def _figures(folder: Path) -> list[dict[str, Any]]:
    figures: list[dict[str, Any]] = json.loads((folder / "bench.json").read_text())
    return figures


@pytest.mark.integration
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "expires" else [pytest.mark.slow]) for name in FIGURES]
)
def test_each_benchmark_measures_ours_beside_its_floor(name: str, tmp_path: Path) -> None:
    """Every figure is there, is a number, and has a floor; no call is lost."""
    done = subprocess.run(
        _command(tmp_path, "--only", name, "--n", "8"),
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = _figures(tmp_path)
    assert sorted(figure["name"] for figure in figures) == sorted(FIGURES[name])
    for figure in figures:
        assert set(figure) == KEYS
        assert figure["name"] in done.stdout
        assert figure["unit"] in done.stdout
        if figure["name"].endswith((".lost", ".raised")):
            assert figure["value"] == 0
        # So few nodes fit into memory that the server already has.
        elif not figure["name"].endswith(".memory"):
            assert figure["ratio_to_floor"] == pytest.approx(figure["value"] / figure["floor"])
            assert figure["value"] > 0, figure


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--only", "rendevous"], f"no benchmark 'rendevous'; there are {', '.join(NAMES)}"),
        (["--n", "many"], "'many' is no number from 2 to 100000"),
        (["--n", "1"], "'1' is no number from 2 to 100000"),
        (["--trials", "0"], "0 is not in the range 1<=x<=100"),
        (["--torch", "/nowhere/python"], "'/nowhere/python' does not exist"),
        (["--folder", "/dev/null/work"], "cannot make the folder /dev/null/work"),
    ],
)
def test_an_invalid_argument_is_reported_before_any_measurement(arguments: list[str], sentence: str) -> None:
    """A benchmark takes minutes, so a mistyped name fails at once, and the error lists the names."""
    result = CliRunner().invoke(command.main, arguments)
    assert result.exit_code in {1, 2}
    assert sentence in result.output


def test_names_and_sizes_come_one_by_one_or_as_a_list(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`make bench ONLY="fanout store" N="8 16"` passes one argument each."""
    seen: list[tuple[str, tuple[int, ...]]] = []

    def note(name: str) -> Any:
        def measure(session: Session) -> Iterator[Figure]:
            seen.append((name, session.sizes))
            yield Figure(name, 8, 1.0, "s")

        return measure

    monkeypatch.setattr(command, "BENCHMARKS", {name: note(name) for name in FIGURES})
    places = ["--no-peer", "--folder", str(tmp_path), "--json", str(tmp_path / "bench.json")]
    result = CliRunner().invoke(
        command.main, [*places, "--only", "fanout store", "--only", "journal", "--n", "8,16", "--n", "32"]
    )
    assert result.exit_code == 0
    assert seen == [(name, (8, 16, 32)) for name in ("fanout", "store", "journal")]


def test_a_failure_sets_the_exit_code_and_keeps_the_other_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A lost call makes the command fail, but the other figures are kept."""

    def lossy(session: Session) -> Iterator[Figure]:
        yield Figure("storm.lost", 8, 3, "calls")
        session.fail("3 streams lost")
        raise BenchmarkError("no server")

    def fine(_: Session) -> Iterator[Figure]:
        yield Figure("fine", 8, 1.0, "s")

    monkeypatch.setattr(command, "BENCHMARKS", {"lossy": lossy, "fine": fine})
    places = ["--no-peer", "--folder", str(tmp_path), "--json", str(tmp_path / "bench.json")]
    result = CliRunner().invoke(command.main, places)
    assert result.exit_code == 1
    assert "FAILED: 3 streams lost" in result.output
    assert "FAILED: lossy: no server" in result.output
    assert [figure["name"] for figure in _figures(tmp_path)] == ["storm.lost", "fine"]


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGINT, slow(signal.SIGKILL)])
def test_no_process_outlives_the_command(number: signal.Signals, tmp_path: Path) -> None:
    """An interrupted benchmark leaves no server behind; after Ctrl-C the figures so far are kept."""
    with fresh_marker() as marker:
        process = subprocess.Popen(
            _command(tmp_path, "--only", "rendezvous", "--n", "16", "--trials", "100"),
            env=_environment(BENCHMARK_MARKER=marker),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        with process, process.stderr:
            assert "rendezvous n=16 floor 1/100" in process.stderr.readline()
            wait_until(lambda: not gone(marker, besides=process.pid), "processes that are measured")
            process.send_signal(number)
            said = process.stderr.read()
            code = process.wait(timeout=20)
        wait_until(lambda: gone(marker), "everybody to be gone")
    if number == signal.SIGINT:
        assert code == 130
        assert "interrupted" in said
        assert _figures(tmp_path) == []
