"""Run a replica with one line of the product changed, or over a network that holds back its writes to etcd.

    planted.py [--plant NAME] --held FILE PROGRAM ARGUMENTS…

For tests only: they show that the checkers find the errors of such a replica, and none of the product over the same
network. A plant names the line; if the product no longer has that line, the replica does not start.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import runpy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType
from typing import Any

# Interval at which a held write checks if it may continue, seconds.
_LOOK = 0.02
# Time after which the sender of a held write gets an error, seconds.
_SILENCE = 0.2


@dataclass(frozen=True, slots=True)
class Plant:
    """A line of a module, and its replacement."""

    module: str
    line: str
    changed: str


PLANTS: Mapping[str, Plant] = {
    # A commit is accepted even if another replica owns the shard by then.
    "no-fence": Plant(
        "rallypoint.rendezvous.journal.etcd.fence",
        "[CreateRevision(location.owner_key, self.revision), ModRevision(head_key, self.head_revision)],",
        "[ModRevision(head_key, self.head_revision)],",
    ),
    # A commit is accepted even if others were committed since it was sent.
    "no-head": Plant(
        "rallypoint.rendezvous.journal.etcd.fence",
        "[CreateRevision(location.owner_key, self.revision), ModRevision(head_key, self.head_revision)],",
        "[CreateRevision(location.owner_key, self.revision)],",
    ),
    # A write is acknowledged as soon as it is sent to etcd.
    "tell-before-commit": Plant(
        "rallypoint.rendezvous.journal.etcd.journal",
        "        await durable\n",
        "        durable.add_done_callback(lambda done: done.cancelled() or done.exception())\n",
    ),
    # Changes of a run are published before they are committed; stores and states wait.
    "run-told-before-commit": Plant(
        "rallypoint.rendezvous.journal.commit_loop",
        "                await self._journal.append(entries)\n",
        "                self._sent = asyncio.ensure_future(self._journal.append(entries))\n"
        "                if not hasattr(self, 'data'):  # only runs have it\n                    await self._sent\n",
    ),
    # A replica ignores the deadline of its session, and answers until etcd reports the session as lost.
    "session-ignored": Plant(
        "rallypoint.etcd.session", "        if self._clock() >= self._deadline:\n", "        if False:\n"
    ),
}


class Held:
    """A network that holds writes back while a test wants it to, and delivers all of them later.

    The sender of a held write gets an error of unknown outcome. The test writes the mode to a file: "hold" new writes,
    let them through and "keep" the held ones, or let them through and "pass" on the held ones. A file beside it has
    the number of held writes, and of those delivered.
    """

    def __init__(self, file: Path) -> None:
        """Read the mode from `file`."""
        self._file = file
        self.held = self.delivered = 0
        self._late: set[asyncio.Task[None]] = set()

    @property
    def mode(self) -> str:
        """The present mode."""
        return self._file.read_text().strip()

    def hold(self, send: Any) -> None:
        """Hold a write back; `send` sends it."""
        self.held += 1
        self._write_counts()
        task = asyncio.create_task(self._deliver(send))
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _deliver(self, send: Any) -> None:
        while self.mode != "pass":  # noqa: ASYNC110 (another process writes the mode)
            await asyncio.sleep(_LOOK)
        try:
            await send()
        finally:
            self.delivered += 1
            self._write_counts()

    def _write_counts(self) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_text(f"{self.held} {self.delivered}")
        fresh.replace(self._file.with_suffix(".count"))


def changed_module(name: str) -> tuple[ModuleSpec, CodeType]:
    """Return a plant's module, and its code with the line changed.

    Raises:
        SystemExit: The product has no such line, or more than one.
    """
    planted = PLANTS[name]
    spec = importlib.util.find_spec(planted.module)
    assert spec, f"plant {name}: there is no module {planted.module}"
    assert spec.origin
    source = Path(spec.origin).read_text()
    if source.count(planted.line) != 1:
        raise SystemExit(f"plant {name}: {planted.module} has not one line {planted.line.strip()!r}")
    return spec, compile(source.replace(planted.line, planted.changed), spec.origin, "exec")


def plant(name: str) -> None:
    """Replace a module of the product by one with a changed line."""
    planted = PLANTS[name]
    spec, code = changed_module(name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[planted.module] = module
    exec(code, module.__dict__)  # noqa: S102 (the product's own source)
    parent, _, child = planted.module.rpartition(".")
    setattr(sys.modules[parent], child, module)


def hold_writes(file: Path) -> None:
    """Hold back the journal's writes from this process to etcd, in the mode that a file has."""
    from rallypoint.etcd.client import EtcdClient
    from rallypoint.etcd.errors import EtcdUnavailable
    from rallypoint.etcd.values import Put, Txn

    held = Held(file)
    transact = EtcdClient.transact

    async def late(self: EtcdClient, txn: Txn) -> Any:
        if held.mode == "hold" and any(
            isinstance(each, Put) and b"/shards/" in each.key for each in txn.then
        ):
            held.hold(lambda: transact(self, txn))
            await asyncio.sleep(_SILENCE)
            raise EtcdUnavailable("no answer came")
        return await transact(self, txn)

    EtcdClient.transact = late  # type: ignore[method-assign]


def main() -> None:
    """Run the program in this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plant", choices=sorted(PLANTS))
    parser.add_argument("--held", type=Path, required=True)
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.plant:
        plant(options.plant)
    hold_writes(options.held)
    sys.argv = [options.program, *options.arguments]
    runpy.run_path(options.program, run_name="__main__")


if __name__ == "__main__":
    main()
