"""Nothing is acknowledged before it is on the disk: watched at the system calls, and tried by killing."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rendezvous.journal.files import child, kill, recover
from support.waiting import PATIENCE

CALLERS, ROUNDS = 5, 20


@pytest.fixture
def strace() -> str:
    """The system's tracer, if this process may use it."""
    program = shutil.which("strace")
    if program is None:
        pytest.skip("strace is not installed")
    tried = subprocess.run([program, "true"], capture_output=True, text=True, timeout=PATIENCE, check=False)
    if tried.returncode:
        pytest.skip(f"may not trace: {tried.stderr.splitlines()[-1:]}")
    return program


def system_calls(trace: Path) -> Iterator[tuple[str, str]]:
    """Yield the calls of a trace: ("begin", call) and ("end", call), in order of time over all threads."""
    unfinished: dict[str, str] = {}
    for line in trace.read_text(errors="replace").splitlines():
        thread, _, call = line.partition(" ")
        call = call.strip()
        if call.endswith("<unfinished ...>"):
            unfinished[thread] = call.removesuffix("<unfinished ...>")
            yield "begin", unfinished[thread]
        elif resumed := re.match(r"<\.\.\. \w+ resumed>(.*)", call):
            yield "end", unfinished.pop(thread) + resumed[1]
        else:
            yield "begin", call
            yield "end", call


def test_every_acknowledgement_follows_a_sync_that_began_after_its_write(path: Path, strace: str) -> None:
    """Seen by strace: the entry is written to the log, then a sync of the log begins and succeeds, then the ack.

    Several callers append at once, so that commits are shared: none of them returns after a sync that had begun
    before its own entry was written.
    """
    script = f"""
        async def caller(journal, name):
            for revision in range(1, {ROUNDS + 1}):
                await journal.append([record(revision, name)])
                os.write(1, f"ack {{name}} {{revision}}\\n".encode())
        async def main():
            journal = SqliteJournal(path)
            await journal.open()
            await asyncio.gather(*(caller(journal, f"caller{{n}}") for n in range({CALLERS})))
            os.write(1, b"all\\n")
            await journal.close()
        asyncio.run(main())
    """
    trace = path.with_name("trace")
    calls = "trace=write,pwrite64,fsync,fdatasync"
    process = child(script, path, under=[strace, "-f", "-y", "-s", "70000", "-e", calls, "-o", str(trace)])
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0

    written: set[str] = set()  # entries that are in the log
    syncing: set[str] = set()  # those that were in it when the present sync began
    durable: set[str] = set()
    acknowledged = []
    for moment, call in system_calls(trace):
        if call.startswith("pwrite64") and "-wal>" in call and moment == "end":
            # A row is the name of its run, the revision as a number, and the content.
            found = re.findall(r"(caller\d)(?:\\.\d*)?(fact \d+)\\0", call)
            written.update(f"{run} {fact}" for run, fact in found)
        elif re.match("f(data)?sync", call) and "-wal>" in call:
            if moment == "begin":
                syncing = set(written)
            elif call.rstrip().endswith("= 0"):
                durable |= syncing
        elif moment == "begin" and (ack := re.search(r"ack (caller\d+) (\d+)", call)):
            entry = f"{ack[1]} fact {ack[2]}"
            assert entry in durable, f"{entry} was acknowledged before a sync that began after its write"
            acknowledged.append(entry)
    assert len(set(acknowledged)) == len(acknowledged) == CALLERS * ROUNDS


def test_the_folder_that_is_made_for_a_journal_is_synced(path: Path, strace: str) -> None:
    """Otherwise it could be gone after loss of power, with all its contents."""
    place = path.parent / "a" / "b" / "rendezvous.db"
    script = "asyncio.run(SqliteJournal(path).open())"
    trace = path.with_name("trace")
    process = child(script, place, under=[strace, "-f", "-y", "-e", "trace=fsync", "-o", str(trace)])
    process.communicate(timeout=PATIENCE)
    synced = set(re.findall(r"fsync\(\d+<(.*?)>\) += 0", trace.read_text()))
    assert synced >= {str(place.parents[2]), str(place.parents[1])}


@pytest.mark.parametrize("acks", [1, 2, 7, 30, 300])
def test_kill_9_loses_nothing_acknowledged(path: Path, acks: int) -> None:
    """Killed in the middle of appends: all acknowledged entries are there, whole and in order."""
    script = """
        async def main():
            journal = SqliteJournal(path)
            await journal.open()
            for revision in range(1, 1_000_000, 3):
                await journal.append([record(revision + n) for n in range(3)] + [change("k", b"%d" % revision)])
                print(revision, flush=True)
        asyncio.run(main())
    """
    process = child(script, path)
    assert process.stdout is not None
    for _ in range(acks):
        process.stdout.readline()
    lines = kill(process)
    last = int(lines[-1]) if lines else (acks - 1) * 3 + 1
    recovered = recover(path)
    revisions = [each.revision for each in recovered.records]
    assert revisions == list(range(1, len(revisions) + 1))
    assert revisions[-1] >= last + 2
    (entry,) = recovered.store_entries
    assert entry.value is not None
    assert int(entry.value) == revisions[-1] - 2, "a record and its store entries are kept together"


@pytest.mark.slow
def test_killed_again_and_again_it_loses_nothing_acknowledged(path: Path) -> None:
    """Each time at another moment of appending, compacting, forgetting and sweeping; each life goes on from the last.

    Run `a` is compacted all the time and `b` forgotten now and then; a store entry of each has its last revision.
    """
    script = """
        async def main():
            journal = SqliteJournal(path)
            recovered = await journal.open()
            last = {"a": 0, "b": 0}
            for each in [*recovered.checkpoints, *recovered.records]:
                last[each.run_id] = max(last[each.run_id], each.revision)
            print(last["a"], last["b"], flush=True)
            while True:
                for run in last:
                    last[run] += 1
                    entries = [record(last[run], run, padding=2000), change("k", b"%d" % last[run], run_id=run)]
                    if run == "a" and last[run] % 50 == 0:
                        entries.append(checkpoint(last[run], last[run] - 9, run))
                    if run == "b" and last[run] % 70 == 0:
                        entries.append(forgotten(last[run], run))
                    await journal.append(entries)
                print(last["a"], last["b"], flush=True)
        asyncio.run(main())
    """
    rng = random.Random(5)
    acknowledged = {"a": 0, "b": 0}
    for _ in range(12):
        process = child(script, path)
        assert process.stdout is not None
        for _ in range(rng.randrange(1, 100)):
            line = process.stdout.readline()
        *_, last = [line, *kill(process)]
        acknowledged = dict(zip("ab", map(int, last.split()), strict=True))

        recovered = recover(path)
        checkpoints = {each.run_id: each.revision for each in recovered.checkpoints}
        reached = dict(checkpoints)
        reached.update((each.run_id, each.revision) for each in recovered.records)
        values = {each.run_id: int(each.value or b"") for each in recovered.store_entries}
        for run, revision in acknowledged.items():
            assert revision <= reached[run] <= revision + 1, (
                "it was killed before the next line at the latest"
            )
        assert values["a"] == reached["a"]
        assert values.get("b", reached["b"]) == reached["b"], (
            "what was forgotten is gone, what came since is there"
        )
        assert checkpoints.get("a", 0) == reached["a"] // 50 * 50
        assert checkpoints.get("b", 0) == reached["b"] // 70 * 70
        assert ("b" in values) == (reached["b"] % 70 != 0)
    assert min(acknowledged.values()) > 200


# ---- data that a killed process left in the memory of the kernel


class Disk:
    """The durable contents of some files, by the system calls of the processes that write them.

    A sync makes the writes since the sync before durable. One that fails makes nothing durable, and a later sync does
    not write that data either: Linux marks the pages as clean.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, bytearray] = {}
        self._written: dict[str, list[tuple[int, bytes | None]]] = {}
        self.synced_folder = False

    def carry_out(self, call: str) -> None:
        """Process a call of which strace has seen the end, with all strings in hexadecimal."""
        if unlinked := re.match(r'unlink\("(.*?)"\) += 0', call):
            self._files.pop(_plain(unlinked[1]), None)
        match = re.match(r"(\w+)\(\d+<(.*?)>(.*)\) += (-?\d+)", call)
        if match is None:
            return
        name, where, rest, result = match.groups()
        path = _plain(where)
        if path == str(self._folder) and name == "fsync":
            self.synced_folder = result == "0"
        if Path(path).parent != self._folder:
            return
        written = self._written.setdefault(path, [])
        if name == "pwrite64" and int(result) > 0:
            data = re.search(r'"((?:\\x[0-9a-f]{2})*)"', rest)
            assert data is not None
            content = bytes.fromhex(data[1].replace("\\x", ""))
            assert len(content) == int(result), "strace has shown all of it"
            written.append((int(rest.rpartition(",")[2]), content))
        elif name == "ftruncate":
            written.append((int(rest.lstrip(", ")), None))
        elif name in ("fsync", "fdatasync"):
            file = self._files.setdefault(path, bytearray())
            for at, each in written if result == "0" else ():
                if each is None:
                    del file[at:]
                else:
                    file.extend(bytes(max(0, at + len(each) - len(file))))
                    file[at : at + len(each)] = each
            written.clear()

    def after_power_loss(self, folder: Path) -> None:
        """Write the durable contents into another folder."""
        folder.mkdir()
        for path, content in self._files.items():
            (folder / Path(path).name).write_bytes(content)


def _plain(text: str) -> str:
    return re.sub(r"\\x([0-9a-f]{2})", lambda found: chr(int(found[1], 16)), text)


def traced(strace: str, script: str, path: Path, *options: str) -> tuple[list[str], list[str]]:
    """Return the lines that a script prints until it kills itself, and its system calls in the order of their ends."""
    trace = path.parent.with_name(f"trace{len([*path.parent.parent.iterdir()])}")
    calls = "trace=write,pwrite64,ftruncate,unlink,fsync,fdatasync"
    options = ("-f", "-y", "-xx", "-s", "2000000", "-e", calls, *options)
    process = child(script, path, under=[strace, *options, "-o", str(trace)])
    output, _ = process.communicate(timeout=PATIENCE)
    return output.splitlines(), [call for moment, call in system_calls(trace) if moment == "end"]


OPEN_AND_TELL = """
async def main():
    recovered = await SqliteJournal(path).open()
    os.write(1, b"told %d\\n" % len(recovered.records))
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
TOLD = re.compile(r"write\(1<.*\\x74\\x6f\\x6c\\x64\\x20")  # `told ` as strace prints it


@pytest.mark.parametrize("fault", ["a sync failed", "killed before the sync"])
def test_an_unsynced_commit_of_another_process_is_synced_before_it_is_reported(
    path: Path, strace: str, fault: str
) -> None:
    """The commit that was not synced is read and reported: then it must outlive a loss of power at that moment.

    The first process writes its last commit and fails to sync it; or strace kills it in between. A model of the disk
    processes their system calls.
    """
    fails = fault == "a sync failed"
    script = """
        async def main():
            journal = SqliteJournal(path)
            await journal.open()
            for revision in range(1, 4):
                try:
                    await journal.append([record(revision, padding=3000)])
                except JournalError:
                    break
                print(revision, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
    """
    # So many syncs of the log come before that of the third commit: those of the first start, and two.
    counted, calls = traced(strace, script, path)
    assert counted == ["1", "2", "3"]
    before = sum(call.startswith("fdatasync") for call in calls) - 1
    path = path.parent.with_name("again") / path.name
    path.parent.mkdir()
    inject = f"inject=fdatasync:{'error=EIO' if fails else 'signal=KILL'}:when={before + 1}"

    disk = Disk(path.parent)
    lines, calls = traced(strace, script, path, "-e", inject)
    assert lines == ["1", "2"]
    for call in calls:
        disk.carry_out(call)
    disk.synced_folder = False
    lines, calls = traced(strace, OPEN_AND_TELL, path)
    assert lines == ["told 3"], "it is there to be read, and believed"
    for call in calls:
        if TOLD.match(call):
            break
        disk.carry_out(call)
    assert disk.synced_folder
    disk.after_power_loss(path.parent.with_name("after"))
    recovered = recover(path.parent.with_name("after") / path.name)
    assert [each.revision for each in recovered.records] == [1, 2, 3]
