"""The rules of the house: allowed imports, and names that the repository must not contain."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TREES = (ROOT / "services", ROOT / "agent")


def _modules() -> Iterator[tuple[str, Path]]:
    for tree in TREES:
        for path in sorted(tree.rglob("*.py")):
            parts = path.relative_to(tree).with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__"), path


def _imports(path: Path) -> set[str]:
    """Return the names that a file imports, anywhere in it: modules, and their members as `module.member`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


IMPURE = {"asyncio", "os", "random", "secrets", "socket", "subprocess", "threading", "time", "uuid"}


ALSO_PURE = {"rallypoint.timer.core.progress"}
"""Cores by another name."""


def test_cores_import_the_standard_library_and_each_other_only() -> None:
    """A core decides; clock, randomness and all other inputs are arguments."""
    modules = dict(_modules())
    assert modules.keys() >= ALSO_PURE
    cores = [module for module in modules if "core" in module.split(".") or module in ALSO_PURE]
    assert len(cores) > 3
    assert [(core, name) for core in cores for name in _impurities(core, modules)] == []


def _impurities(module: str, modules: dict[str, Path]) -> set[str]:
    """Return the imports of a module, direct or through our other modules, that are not pure standard library."""
    found: set[str] = set()
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        current = waiting.pop()
        if current in seen or current not in modules:
            continue
        seen.add(current)
        for name in _imports(modules[current]):
            root = name.split(".")[0]
            if root == "rallypoint":
                waiting.append(name if name in modules else name.rpartition(".")[0])
            elif root in IMPURE or root not in sys.stdlib_module_names:
                found.add(name)
    return found


def test_services_never_import_the_agent() -> None:
    """A service works without agents; agents use it through its client."""
    ours = (
        "rallypoint.agent",
        "rallypoint.launcher",
        "rallypoint.worker",
        "rallypoint.cli",
        "rallypoint.torch",
    )
    wrong = [
        f"{module} imports {name}"
        for module, path in _modules()
        if path.is_relative_to(ROOT / "services")
        for name in _imports(path)
        if name.startswith(ours)
    ]
    assert not wrong


def test_the_agent_reaches_services_through_their_clients() -> None:
    """From rendezvous and timer, an agent imports the client, the worker side, the contract, its limits and values."""
    allowed = (
        "rallypoint.rendezvous.base.limits",
        "rallypoint.rendezvous.client",
        "rallypoint.rendezvous.core.state.",
        "rallypoint.rendezvous.store.client",
        "rallypoint.rendezvous.v1",
        "rallypoint.timer.client.client",
        "rallypoint.timer.worker.process",
        "rallypoint.timer.worker.table",
        "rallypoint.timer.worker.wire",
        "rallypoint.timer.v1",
    )
    wrong = [
        f"{module} imports {name}"
        for module, path in _modules()
        if module.startswith(("rallypoint.agent", "rallypoint.worker"))
        for name in _imports(path)
        if name.startswith(("rallypoint.rendezvous", "rallypoint.timer")) and not name.startswith(allowed)
    ]
    assert not wrong


def test_the_journal_and_the_api_share_no_message() -> None:
    """Each may change alone: a journal outlives the version that wrote it, and no client reads one."""
    for path in (ROOT / "protos/rallypoint").rglob("*.proto"):
        imported = re.findall(r'^import .*"rallypoint/(\w+)/', path.read_text(), re.MULTILINE)
        packages = {path.relative_to(ROOT / "protos/rallypoint").parts[0], *imported}
        assert "journal" not in packages or packages == {"journal"}, path


# The generated code, the codecs and layouts on it, and tests that write bytes which the codecs do not write.
_NAMES_JOURNAL_MESSAGES = (
    "services/rallypoint/journal/v1/",
    "services/rallypoint/rendezvous/journal/",
    "tests/compat/",
    "tests/rendezvous/journal/",
    "tests/simulation/replicas/tap.py",
    "tests/integration/test_introspection.py",
    "tests/house/test_house.py",
)


def test_only_the_journal_knows_its_messages_and_no_others() -> None:
    """All other code has facts and snapshots of the core, and bytes. Imports by a name in a string are found too."""
    paths = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    texts = {path: (ROOT / path).read_text() for path in paths.stdout.split() if (ROOT / path).is_file()}
    outside = [path for path in texts if not path.startswith(_NAMES_JOURNAL_MESSAGES)]
    assert [
        path for path in outside if re.search(r"rallypoint([./]| import )journal|journal_pb2", texts[path])
    ] == []
    neutral = ("services/rallypoint/rendezvous/journal/", "services/rallypoint/rendezvous/base/")
    api = re.compile(r"rallypoint\.(rendezvous|timer|agent)\.v1|_service_pb2")
    assert [path for path, text in texts.items() if path.startswith(neutral) and api.search(text)] == []


@pytest.mark.parametrize(
    "statement",
    [
        "from rallypoint.timer import expires",
        "import rallypoint.worker",
        "import rallypoint.launcher",
        "import rallypoint.worker.call, rallypoint.agent.spawner.forkserver",
    ],
)
def test_modules_of_a_worker_load_no_grpc(statement: str) -> None:
    """A training process forks; gRPC in it would crash the children."""
    program = (
        f"{statement}; import sys; print([m for m in sys.modules if m.split('.')[0] in {{'grpc', 'google'}}])"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_no_slow_module_is_loaded_before_workers_start() -> None:
    """Every module that `rallypoint run` loads delays the start of every job; some take longer than all of ours."""
    slow = ["prometheus_client", "psutil", "rich", "sqlite3", "tomllib", "urllib.request"]
    program = (
        "import rallypoint.cli.run, rallypoint.launcher.launch; import sys; "
        f"print([name for name in {slow} if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_the_repository_names_no_registry_and_no_path_of_a_machine() -> None:
    """The committed files build on any machine."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    forbidden = ["py" + "pi.org", "npm" + "js", "/wo" + "rk/", "/ro" + "ot/"]
    wrong: list[str] = []
    for name in tracked.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and path.suffix not in {".gz", ".png"}:
            text = path.read_text(errors="replace")
            wrong.extend(f"{name} names {word}" for word in forbidden if word in text)
    assert not wrong
