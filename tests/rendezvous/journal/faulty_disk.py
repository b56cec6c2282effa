"""A disk under SQLite that loses unsynced data, tears, lies, fills up and fails, all by one random stream.

SQLite's own file layer still reads and writes real files: they are the view of the kernel, for every process. Writes,
truncations and syncs of SQLite pass through here, so the durable part of each file is known at every moment.
`cut_power` leaves only that part in the files, with some of the rest, page by page or torn within one.

Creation and removal of files are durable at once. If SQLite is part of the interpreter, this layer can't be used.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rallypoint.rendezvous.journal import sqlite_reading

_OK, _FULL, _IOERR_WRITE, _IOERR_FSYNC = 0, 13, 10 | 3 << 8, 10 | 4 << 8
_IOERR_TRUNCATE, _IOERR_DELETE = 10 | 6 << 8, 10 | 10 << 8
_SECTOR = 512

_POINTER = ctypes.c_void_p
# SQLite keeps the pointer to the name: it must be passed on, and not a copy of the text.
_OPEN = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER, _POINTER, ctypes.c_int, _POINTER)
_DELETE = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, ctypes.c_char_p, ctypes.c_int)
_CLOSE = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER)
_WRITE = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER, ctypes.c_int, ctypes.c_int64)
_TRUNCATE = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, ctypes.c_int64)
_SYNC = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, ctypes.c_int)


class _Vfs(ctypes.Structure):
    """The beginning of sqlite3_vfs."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("file_bytes", ctypes.c_int),
        ("longest_path", ctypes.c_int),
        ("next", _POINTER),
        ("name", ctypes.c_char_p),
        ("data", _POINTER),
        ("open", _POINTER),
        ("delete", _POINTER),
    )


class _Methods(ctypes.Structure):
    """sqlite3_io_methods of version 3."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("close", _POINTER),
        ("read", _POINTER),
        ("write", _POINTER),
        ("truncate", _POINTER),
        ("sync", _POINTER),
        ("others", _POINTER * 13),
    )


class _File(ctypes.Structure):
    _fields_ = (("methods", ctypes.POINTER(_Methods)),)


@dataclass(slots=True)
class _Image:
    """A file: its durable contents, and the later writes that are not synced."""

    durable: bytearray
    # (offset, data), or (size, None) of a truncation.
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)

    def apply(self, offset: int, data: bytes | None) -> None:
        """Make a change durable."""
        if data is None:
            del self.durable[offset:]
            return
        if len(self.durable) < offset:
            self.durable.extend(bytes(offset - len(self.durable)))
        self.durable[offset : offset + len(data)] = data

    def flush(self) -> None:
        """Make all changes durable."""
        for change in self.pending:
            self.apply(*change)
        self.pending.clear()

    def lose(self, chance: random.Random) -> None:
        """Make some of the pending changes durable, and drop the rest."""
        share = chance.choice([0.0, 0.5, 1.0])
        for offset, data in self.pending:
            if data is None or len(data) <= _SECTOR or chance.random() < 0.7:
                if chance.random() < share:
                    self.apply(offset, data)
            else:
                for at in range(0, len(data), _SECTOR):  # torn
                    if chance.random() < share:
                        self.apply(offset + at, data[at : at + _SECTOR])
        self.pending.clear()


class FaultyDisk:
    """The faults of the files of one SQLite database.

    Attributes:
        dead: No write reaches the files any more: the process was killed.
        lying: Syncs do nothing, and return success.
        full: Writes that would make a file longer fail.
        struck: The armed fault has happened.
    """

    def __init__(self, chance: random.Random) -> None:
        self.dead = self.lying = self.full = self.struck = False
        self._chance = chance
        self._images: dict[str, _Image] = {}
        self._due: tuple[int, str] | None = None

    def arm(self, after: int, fault: str) -> None:
        """Cause a fault after so many writes, truncations and syncs: "kill", "full", or "sync" that fails."""
        self._due = after, fault

    def mend(self) -> None:
        """Clear all faults, for the next process."""
        self.dead = self.lying = self.full = self.struck = False
        self._due = None

    def cut_power(self) -> None:
        """Keep only durable contents in the files; to be called when no process has them open."""
        for name, image in self._images.items():
            image.lose(self._chance)
            if Path(name).exists():
                Path(name).write_bytes(image.durable)

    # ---- called by SQLite

    def knows(self, name: str) -> bool:
        """Return True if it has a file of that name, and not a folder."""
        return name in self._images

    def opened(self, name: str) -> None:
        """A file was opened, and perhaps made."""
        if name not in self._images:
            self._images[name] = _Image(bytearray(Path(name).read_bytes()))

    def removed(self, name: str) -> None:
        """A file was removed."""
        self._images.pop(name, None)

    def _strike(self, kind: str) -> bool:
        """Count an operation; return True if this sync is to fail."""
        if self._due is None:
            return False
        left, fault = self._due
        if left > 0 or (fault == "sync" and kind != "sync"):
            self._due = max(0, left - 1), fault
            return False
        self._due, self.struck = None, True
        self.dead = self.dead or fault == "kill"
        self.full = self.full or fault == "full"
        return fault == "sync"

    def write(self, name: str, offset: int, data: bytes, through: Callable[[int], int]) -> int:
        """Write; `through` writes so many bytes of it for real."""
        self._strike("write")
        image = self._images[name]
        longer = offset + len(data) > Path(name).stat().st_size
        if self.dead:
            return _IOERR_WRITE
        if self.full and longer:
            return _FULL
        image.pending.append((offset, data))
        return through(len(data))

    def truncate(self, name: str, size: int, through: Callable[[], int]) -> int:
        """Truncate; `through` does it for real."""
        self._strike("truncate")
        if self.dead:
            return _IOERR_TRUNCATE
        self._images[name].pending.append((size, None))
        return through()

    def sync(self, name: str) -> int:
        """Sync. A failed sync reports its lost writes once, and marks them clean, as kernels do."""
        failing = self._strike("sync")
        if self.dead:
            return _IOERR_FSYNC
        if failing:
            self._images[name].lose(self._chance)
            return _IOERR_FSYNC
        if not self.lying:
            self._images[name].flush()
        return _OK


def sqlite_library() -> Any:
    """Return the SQLite library of this interpreter; None: it is built in."""
    try:
        library = ctypes.CDLL("libsqlite3.so.0")
    except OSError:
        return None
    import sqlite3  # must be loaded before the search

    library.sqlite3_libversion.restype = ctypes.c_char_p
    mapped = Path("/proc/self/maps").read_text()
    same = library.sqlite3_libversion().decode() == sqlite3.sqlite_version
    return library if same and mapped.count("libsqlite3.so") else None


@contextmanager
def under_sqlite(disk: FaultyDisk, folder: Path) -> Iterator[None]:
    """Let SQLite write the files of a folder through a disk."""
    library = sqlite_library()
    assert library is not None, "asked before"
    library.sqlite3_vfs_find.restype = ctypes.POINTER(_Vfs)
    vfses = [library.sqlite3_vfs_find(name).contents for name in (None, b"unix-none")]
    before = [(vfs, vfs.open, vfs.delete) for vfs in vfses]
    layer = _Layer(disk, str(folder))
    migration: Any = sqlite_reading
    migration.os = _Os(disk)
    try:
        for vfs in vfses:
            layer.cover(vfs)
        yield
    finally:
        migration.os = os
        for vfs, open_, delete in before:
            vfs.open, vfs.delete = open_, delete


class _Os:
    """The product's own writes and syncs, in the place of the module `os`."""

    def __init__(self, disk: FaultyDisk) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pwrite(self, file: int, data: bytes, offset: int) -> int:
        name = os.readlink(f"/proc/self/fd/{file}")
        written = len(data)
        if self._disk.write(name, offset, data, lambda _: os.pwrite(file, data, offset) - written):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return written

    def fsync(self, file: int) -> None:
        name = os.readlink(f"/proc/self/fd/{file}")
        if self._disk.knows(name) and self._disk.sync(name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))


class _Layer:
    """Replaces some functions of SQLite's file layer."""

    def __init__(self, disk: FaultyDisk, folder: str) -> None:
        self._disk = disk
        self._folder = folder
        # By the address of SQLite's file: its name, and its own methods.
        self._files: dict[int, tuple[str, _Methods]] = {}
        self._kept: list[Any] = []  # the targets of C pointers
        self._close = _CLOSE(self._on_close)
        self._write = _WRITE(self._on_write)
        self._truncate = _TRUNCATE(self._on_truncate)
        self._sync = _SYNC(lambda file, _flags: self._disk.sync(self._files[file][0]))

    def cover(self, vfs: _Vfs) -> None:
        """Replace its functions."""
        open_, delete = _OPEN(vfs.open), _DELETE(vfs.delete)

        def on_open(own: int, at: int | None, file: int, flags: int, out: int | None) -> int:
            code = open_(own, at, file, flags, out)
            if (
                code == _OK
                and at is not None
                and (name := ctypes.string_at(at).decode()).startswith(self._folder)
            ):
                self._take(file, name)
            return int(code)

        def on_delete(own: int, name: bytes, sync: int) -> int:
            if name.decode().startswith(self._folder):
                if self._disk.dead:
                    return _IOERR_DELETE
                self._disk.removed(name.decode())
            return int(delete(own, name, sync))

        functions = _OPEN(on_open), _DELETE(on_delete)
        self._kept.append(functions)
        vfs.open, vfs.delete = (ctypes.cast(each, _POINTER).value for each in functions)

    def _take(self, address: int, name: str) -> None:
        self._disk.opened(name)
        file = _File.from_address(address)
        own = file.methods.contents
        covered = _Methods.from_buffer_copy(own)
        for member in ("close", "write", "truncate", "sync"):
            setattr(covered, member, ctypes.cast(getattr(self, f"_{member}"), _POINTER).value)
        self._kept.append(covered)
        self._files[address] = name, own
        file.methods = ctypes.pointer(covered)

    def _on_close(self, file: int) -> int:
        _, own = self._files.pop(file)
        return int(_CLOSE(own.close)(file))

    def _on_write(self, file: int, data: int, count: int, offset: int) -> int:
        name, own = self._files[file]
        through = _WRITE(own.write)
        return self._disk.write(
            name, offset, ctypes.string_at(data, count), lambda first: int(through(file, data, first, offset))
        )

    def _on_truncate(self, file: int, size: int) -> int:
        name, own = self._files[file]
        return self._disk.truncate(name, size, lambda: int(_TRUNCATE(own.truncate)(file, size)))
