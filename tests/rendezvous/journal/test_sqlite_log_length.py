"""The log of a SQLite journal is carried over before it grows long, also if several processes wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rendezvous.journal.files import killed, recover

LIFE = """
    async def main():
        journal = SqliteJournal(path)
        await journal.open()
        await journal.append([change("key", bytes(10 << 20))])
        await journal.append([change("last", b"")])
        os.kill(os.getpid(), signal.SIGKILL)
    asyncio.run(main())
"""


@pytest.mark.slow
def test_servers_that_never_live_long_keep_the_log_short(path: Path) -> None:
    """None of them writes enough to shorten it by itself; each carries over the log of the one before."""
    for _ in range(5):
        killed(LIFE, path)
    assert path.with_name(path.name + "-wal").stat().st_size < 32 << 20
    assert len(recover(path).store_entries) == 2
