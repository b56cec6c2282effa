"""A torchrun command line has the same meaning for `rallypoint run`; docs/torchrun.md explains each difference."""

from __future__ import annotations

import ast
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest

from integration.torchrun_cases import CASES, Case
from integration.torchrun_twice import LAUNCHERS, Seen, see

# Each case takes a second or two, but on a busy machine the first may wait long.
pytestmark = [pytest.mark.torch, pytest.mark.integration, pytest.mark.timeout(600)]

PAGE = Path(__file__).parents[2] / "docs" / "torchrun.md"

DIFFERENCES: Mapping[str, frozenset[str]] = {
    "MASTER_ADDR": frozenset(),
    "COLUMNS": frozenset({"a terminal for several"}),
    "FORCE_COLOR": frozenset({"a terminal for several"}),
    "PYTHONFAULTHANDLER": frozenset(),
    "RALLYPOINT_*": frozenset(),
    "TORCHELASTIC_RUN_ID": frozenset({"standalone with what it overrules"}),
    "TORCHELASTIC_TIMER_FILE": frozenset(),
    "TORCHELASTIC_USE_AGENT_STORE": frozenset(),
    "TTY_INTERACTIVE": frozenset({"a terminal for several"}),
    "stdout.log": frozenset({"redirects by rank"}),
    "stderr.log": frozenset({"redirects by rank", "tee by rank and redirects"}),
    "failure.json": frozenset({"a worker that fails"}),
    "terminals": frozenset({"a terminal for several"}),
    "reply.json": frozenset({"a reply file of a worker without a record"}),
    "exit code 1, here 0": frozenset({"numa-binding"}),
    "exit code 1, here 2": frozenset(
        {
            "nproc-per-node gpu",
            "no-python beside module",
            "virtual-local-rank without enough devices",
            "a script that is missing",
            "a value that makes no sense",
        }
    ),
}
"""Every difference, with the cases that show it; empty: any case may. The page has all, with the reason."""


@pytest.fixture(scope="module", autouse=True)
def torch() -> None:
    """Skip all tests without torch."""
    pytest.importorskip("torch")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[tuple[str, str], Future[Seen]]]:
    """All cases under both launchers, two at a time: they are independent, and torchrun is slow."""
    folder = tmp_path_factory.mktemp("cases")
    with ThreadPoolExecutor(2) as pool:
        yield {
            (case.name, launcher): pool.submit(see, case, launcher, folder / f"{number}.{launcher}")
            for number, case in enumerate(CASES)
            for launcher in LAUNCHERS
            if case.since <= _torch_version()
        }
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def found() -> set[str]:
    """The differences found so far."""
    return set()


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.name))
def test_a_command_line_means_the_same(
    runs: Mapping[tuple[str, str], Future[Seen]], found: set[str], case: Case
) -> None:
    """Workers have the same environment, arguments and interpreter; users see the same console, files and exit code."""
    if case.since > _torch_version():
        pytest.skip("torchrun has these flags since torch {}.{}".format(*case.since))
    torchs, ours = (runs[case.name, launcher].result() for launcher in ("torchrun", "rallypoint"))
    differences = dict(_differences(torchs, ours))
    found.update(differences)
    unknown = {
        label: detail
        for label, detail in differences.items()
        if label not in DIFFERENCES or (DIFFERENCES[label] and case.name not in DIFFERENCES[label])
    }
    assert not unknown, f"torchrun:\n{torchs.said}\nrallypoint:\n{ours.said}"
    expected = {label for label, cases in DIFFERENCES.items() if case.name in cases}
    assert expected <= differences.keys()


def test_the_differences_are_those_of_the_page(found: set[str]) -> None:
    """The page gives a reason for each, and has no outdated one."""
    assert found == DIFFERENCES.keys()
    section = PAGE.read_text().partition("## Differences")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \|([^|]+)\|([^|]+)\|([^|]+)\|$", section, re.MULTILINE)
    assert sorted(label for label, *_ in rows) == sorted(DIFFERENCES)
    assert all(cell.strip() for _, *cells in rows for cell in cells)


def test_every_flag_of_torchruns_is_one_here() -> None:
    """`rallypoint run` has every flag of torchrun's own parser, with all its names."""
    from torch.distributed.run import get_args_parser

    from rallypoint.cli.run import run

    here = {name for parameter in run.params for name in parameter.opts}
    theirs = {name for action in get_args_parser()._actions for name in action.option_strings}
    assert {name.replace("_", "-") if name[1] == "-" else name for name in theirs} - here == {"-h", "--help"}


def test_every_flag_of_newer_torchruns_is_one_here() -> None:
    """The flags of 2.14 are checked under an older torch; RALLYPOINT_TORCH_WHEELS names further wheels to read."""
    from rallypoint.cli.run import run

    here = {name for parameter in run.params for name in parameter.opts}
    newer = {"--log-line-prefix-template", "--print-completion"}
    for wheel in os.environ.get("RALLYPOINT_TORCH_WHEELS", "").split(":"):
        newer |= _flags_in(wheel) if wheel else set()
    assert newer - here == set()


def _flags_in(wheel: str) -> set[str]:
    """Return the flags of torchrun in a wheel, with dashes."""
    with zipfile.ZipFile(wheel) as opened:
        tree = ast.parse(opened.read("torch/distributed/run.py"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    added = [call for call in calls if getattr(call.func, "attr", "") == "add_argument"]
    names = [each.value for call in added for each in call.args if isinstance(each, ast.Constant)]
    return {f"--{name[2:].replace('_', '-')}" for name in map(str, names) if name.startswith("--")}


def test_every_flag_of_torchruns_is_in_the_table() -> None:
    """A flag without a case would be untested."""
    from torch.distributed.run import get_args_parser

    tried = {_long(flag) for case in CASES for flags in (case.flags, *case.nodes) for flag in flags}
    tried |= {
        f"--{name.removeprefix('PET_').lower().replace('_', '-')}"
        for case in CASES
        for name in case.environment
    }
    theirs = {
        action.option_strings[-1].replace("_", "-")
        for action in get_args_parser()._actions
        if action.option_strings
    }
    # Since 2.14; the completion script depends on the program's own flags.
    theirs.discard("--print-completion")
    assert theirs - tried == {"--help"}


def _torch_version() -> tuple[int, int]:
    major, minor, *_ = version("torch").split(".")
    return int(major), int(minor)


def _long(flag: str) -> str:
    short = {"-m": "--module", "-r": "--redirects", "-t": "--tee"}
    return short.get(flag, flag.partition("=")[0].replace("_", "-"))


def _differences(torchs: Seen, ours: Seen) -> Iterator[tuple[str, object]]:
    """Yield the differences, each with its name on the page, and with the values for a failure message."""
    if torchs.exit_codes != ours.exit_codes:
        theirs, here = torchs.exit_codes[0], ours.exit_codes[0]
        yield f"exit code {theirs}, here {here}", (torchs.exit_codes, ours.exit_codes)
        if not (torchs.workers and ours.workers):
            return  # one refused and the other did not: that is the difference
    for stream in ("stdout", "stderr"):
        if getattr(torchs, stream) != getattr(ours, stream):
            yield stream, (getattr(torchs, stream), getattr(ours, stream))
    if torchs.workers.keys() != ours.workers.keys():
        yield "workers", (set(torchs.workers), set(ours.workers))
    for name in torchs.workers.keys() & ours.workers.keys():
        before, after = torchs.workers[name], ours.workers[name]
        yield from _of_values(before.environment, after.environment)
        yield from _of_values(before.rest, after.rest)
    for file in torchs.files.keys() | ours.files.keys():
        if torchs.files.get(file) != ours.files.get(file):
            yield Path(file).name, (file, torchs.files.get(file), ours.files.get(file))


def _of_values(theirs: Mapping[str, object], here: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name in theirs.keys() | here.keys():
        if theirs.get(name) != here.get(name):
            label = "RALLYPOINT_*" if name.startswith("RALLYPOINT_") else name
            yield label, (theirs.get(name), here.get(name))
