"""A disk that is full or fails breaks the journal for good; all acknowledged entries are there afterwards."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.rendezvous.journal.journal import JournalError
from rendezvous.journal.entries import record
from rendezvous.journal.files import append, killed, recover, refused, reopen
from support.waiting import PATIENCE

# Appends until it fails, tries again after `mend`, and dies. Prints how far it got.
UNTIL_IT_FAILS = """
async def main():
    journal = SqliteJournal(path)
    await journal.open()
    broken = None
    for revision in range(1, 10_000):
        if revision == BREAK_AT:
            damage()
        try:
            await journal.append([record(revision, padding=PADDING)])
        except JournalError as error:
            print(revision)
            print(error)
            broken = error
            break
    mend()
    try:
        await journal.append([change("k", b"x")])
    except JournalError as error:
        print("still broken" if error is broken else error)
    await journal.close()
    print("closed", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def script(*, padding: int, break_at: int = 0, damage: str = "pass", mend: str = "pass") -> str:
    """Return the script with a given fault."""
    head = (
        f"BREAK_AT, PADDING = {break_at}, {padding}\ndef damage():\n    {damage}\ndef mend():\n    {mend}\n"
    )
    return head + UNTIL_IT_FAILS + "asyncio.run(main())\n"


def check(path: Path, lines: list[str], why: str, *, least: int = 1) -> None:
    """Check the output of a process that met a fault, and the journal that it left."""
    failed_at, message, after, end = lines
    assert message.startswith(f"can't write the journal {path}: {why}")
    assert message.endswith("so the service must start again and read it")
    assert (after, end) == ("still broken", "closed")
    acknowledged = list(range(1, int(failed_at)))
    assert len(acknowledged) >= least
    recovered = recover(path)
    # The failed entry may or may not be there; the acknowledged ones must be.
    assert [each.revision for each in recovered.records] in (acknowledged, [*acknowledged, int(failed_at)])
    assert list(recovered.store_entries) == []


def test_a_file_size_limit_is_an_error_and_loses_nothing_acknowledged(path: Path) -> None:
    """A process without room stays broken, also when there is room again; the next one has all acked entries."""
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, ({}, resource.RLIM_INFINITY))"
    code = script(
        padding=5000, break_at=1, damage=limit.format(100_000), mend=limit.format("resource.RLIM_INFINITY")
    )
    check(path, killed(code, path), "disk I/O error (SQLITE_IOERR_WRITE)", least=3)


# ---- a small file system


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """The path of a journal on a file system of 2 MiB."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if mount is None or umount is None:
        pytest.skip("mount is not installed")
    folder = tmp_path / "small"
    folder.mkdir()
    command = [mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if mounted.returncode:
        pytest.skip(f"may not mount a tmpfs: {mounted.stderr.strip()}")
    yield folder / "rendezvous.db"
    subprocess.run([umount, "--lazy", str(folder)], timeout=PATIENCE, check=True)


def test_a_full_disk_is_an_error_and_loses_nothing_acknowledged(small: Path) -> None:
    """The journal can be read when there is no room at all; with room again it goes on."""
    ballast = small.with_name("ballast")
    code = script(padding=5000, mend=f"Path({str(ballast)!r}).unlink()")
    ballast.write_bytes(b"x" * (1 << 20))
    check(small, killed(code, small), "database or disk is full (SQLITE_FULL)", least=35)


async def test_on_a_full_disk_a_journal_is_read_and_takes_nothing(small: Path) -> None:
    """It opens, so that people can inspect it, and its first append reports the cause."""
    await append(small, [record(revision) for revision in range(1, 11)])
    ballast = small.with_name("ballast")
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):  # until there is no more room
        while True:
            file.write(b"x" * 4096)
    assert len((await reopen(small)).records) == 10
    with pytest.raises(JournalError, match=r"disk is full|disk I/O error"):
        await append(small, [record(11, padding=100_000)])
    ballast.unlink()
    await append(small, [record(11)])
    assert len((await reopen(small)).records) == 11


def test_a_read_only_file_system_is_refused_in_one_line(small: Path) -> None:
    """With and without a journal on it."""
    mount = shutil.which("mount")
    assert mount is not None
    for written in (False, True):
        if written:
            subprocess.run([mount, "-o", "remount,rw", str(small.parent)], timeout=PATIENCE, check=True)
            killed(script(padding=5000), small)
        subprocess.run([mount, "-o", "remount,ro", str(small.parent)], timeout=PATIENCE, check=True)
        message = refused(small)
        assert message.startswith(f"can't open the journal {small}: Read-only file system; fix that")


# ---- a disk that fails

# Fails syncs of files of a name, as long as the fault file exists, as the kernel does: the error is reported, and the
# lost data counts as written. Records every failed sync.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int sync_or_fail(const char *call, int fd) {
    char link[64], name[4096];
    const char *end = getenv("SYNC_FAILS_OF"), *fault = getenv("SYNC_FAULT");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, name, sizeof name - 1);
    name[length < 0 ? 0 : length] = 0;
    size_t skip = strlen(name) - strlen(end);
    if (strlen(name) >= strlen(end) && strcmp(name + skip, end) == 0 && access(fault, F_OK) == 0) {
        int log = open(fault, O_WRONLY | O_APPEND);
        if (write(log, "failed;", 7) != 7) abort();
        close(log);
        errno = EIO;
        return -1;
    }
    return ((int (*)(int))dlsym(RTLD_NEXT, call))(fd);
}

int fsync(int fd) { return sync_or_fail("fsync", fd); }
int fdatasync(int fd) { return sync_or_fail("fdatasync", fd); }
"""


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that is loaded before libc."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = tmp_path_factory.mktemp("shim") / "sync.c"
    source.write_text(SHIM)
    library = source.with_suffix(".so")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"],
        timeout=PATIENCE,
        check=True,
    )
    return library


@pytest.mark.parametrize(
    ("of", "padding"),
    [pytest.param("-wal", 100, id="of a commit"), pytest.param(".db", 50_000, id="of the file")],
)
def test_a_sync_that_fails_is_fatal_and_never_tried_again(
    path: Path, tmp_path: Path, shim: Path, of: str, padding: int
) -> None:
    """A second try would succeed without anything being on the disk: the kernel reports such an error once.

    This holds for the log, for which each commit waits, and for the file, when the log is carried over into it.
    """
    fault = tmp_path / "fault"
    code = script(padding=padding, break_at=20, damage=f"Path({str(fault)!r}).touch()", mend="pass").replace(
        "await journal.close()", "pass"
    )
    environment = {"LD_PRELOAD": str(shim), "SYNC_FAILS_OF": of, "SYNC_FAULT": str(fault)}
    lines = killed(code, path, environment)
    assert fault.read_text() == "failed;", "exactly one"
    why = "disk I/O error (SQLITE_IOERR_FSYNC)"
    check(path, lines, why, least=19)


def test_closing_after_a_failed_sync_loses_nothing_acknowledged(
    path: Path, tmp_path: Path, shim: Path
) -> None:
    """With the fault still there, and without: the log is not deleted before the file has its contents."""
    fault = tmp_path / "fault"
    code = script(padding=100, break_at=20, damage=f"Path({str(fault)!r}).touch()")
    environment = {"LD_PRELOAD": str(shim), "SYNC_FAILS_OF": "-wal", "SYNC_FAULT": str(fault)}
    check(path, killed(code, path, environment), "disk I/O error (SQLITE_IOERR_FSYNC)", least=19)
