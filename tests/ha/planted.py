"""Runs a replica with one line of the product changed, or over a network that holds back what it writes to etcd.

    planted.py [--plant NAME] --held FILE PROGRAM ARGUMENTS…

Only tests start replicas so: they show that the checkers find what such a replica does wrong, and that the product,
over the same network, does nothing wrong. A plant names the line; where the product no longer has it, nothing starts.
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

# How often what is held back looks whether it may go on, seconds.
_LOOK = 0.02
# After how long whoever wrote what is held back is told that nothing is known of it, seconds.
_SILENCE = 0.2


@dataclass(frozen=True, slots=True)
class Plant:
    """A line of a module, and what it is changed to."""

    module: str
    line: str
    changed: str


PLANTS: Mapping[str, Plant] = {
    # A commit is let in whoever owns the shard by then.
    "no-fence": Plant(
        "rallypoint.rendezvous.journal.etcd.fence",
        "[CreateRevision(location.owner_key, self.revision), ModRevision(head_key, self.head_revision)],",
        "[ModRevision(head_key, self.head_revision)],",
    ),
    # A commit is let in whatever was committed since it was sent.
    "no-head": Plant(
        "rallypoint.rendezvous.journal.etcd.fence",
        "[CreateRevision(location.owner_key, self.revision), ModRevision(head_key, self.head_revision)],",
        "[CreateRevision(location.owner_key, self.revision)],",
    ),
    # A write is acknowledged as soon as it is on its way.
    "tell-before-commit": Plant(
        "rallypoint.rendezvous.journal.etcd.journal",
        "        await durable\n",
        "        durable.add_done_callback(lambda done: done.cancelled() or done.exception())\n",
    ),
    # What happened to a run is told while it is on its way; stores and states wait.
    "run-told-before-commit": Plant(
        "rallypoint.rendezvous.journal.commit_loop",
        "                await self._journal.append(entries)\n",
        "                self._sent = asyncio.ensure_future(self._journal.append(entries))\n"
        "                if not hasattr(self, 'data'):  # only runs have it\n                    await self._sent\n",
    ),
    # A replica answers for as long as nobody tells it that its session is lost.
    "session-ignored": Plant(
        "rallypoint.etcd.session", "        if self._clock() >= self._deadline:\n", "        if False:\n"
    ),
}


class Held:
    """A network that holds writes back while a test wants it to, and delivers them late: all, and in order.

    Whoever sent one is told that nothing is known of it. The test writes to a file what is to be done: "hold" what is
    sent, let it through and "keep" what is held, or let it through and "pass" on what is held. How many were held, and
    how many of them were delivered, stands in a file beside it.
    """

    def __init__(self, file: Path) -> None:
        """Hold what the file says."""
        self._file = file
        self.held = self.delivered = 0
        self._late: set[asyncio.Task[None]] = set()

    @property
    def mode(self) -> str:
        """What is to be done."""
        return self._file.read_text().strip()

    def hold(self, send: Any) -> None:
        """Hold something back; `send` sends it."""
        self.held += 1
        self._say()
        task = asyncio.create_task(self._deliver(send))
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _deliver(self, send: Any) -> None:
        while self.mode != "pass":  # noqa: ASYNC110 (another process says when)
            await asyncio.sleep(_LOOK)
        try:
            await send()
        finally:
            self.delivered += 1
            self._say()

    def _say(self) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_text(f"{self.held} {self.delivered}")
        fresh.replace(self._file.with_suffix(".count"))


def changed_module(name: str) -> tuple[ModuleSpec, CodeType]:
    """A plant's module, and its code with the line changed.

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
    """Have a module with one line changed take the place of the product's."""
    planted = PLANTS[name]
    spec, code = changed_module(name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[planted.module] = module
    exec(code, module.__dict__)  # noqa: S102 (the product's own source)
    parent, _, child = planted.module.rpartition(".")
    setattr(sys.modules[parent], child, module)


def hold_writes(file: Path) -> None:
    """Have a network between this process and etcd that holds the journal's writes back as a file says."""
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
