"""Files that are read again when they change, such as certificates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from rallypoint.rpc.endpoint import SettingError
from rallypoint.rpc.logs import get_logger

log = get_logger(__name__)

_T = TypeVar("_T")


class LiveFile(Generic[_T]):
    """The content of one file or of several that belong together; the last usable content counts.

    Attributes:
        content: The content.
        changes: How often other content was read.
    """

    def __init__(self, name: str, paths: Sequence[Path], read: Callable[[], _T]) -> None:
        """Read the files.

        Args:
            name: Their content, for the log: "policy", for example.
            paths: Their paths.
            read: Reads all of them; raises SettingError if they are unusable, which is also raised here.
        """
        self._name = name
        self._paths = paths
        self._read = read
        self._seen = self._stamp()
        self.content = read()
        self.changes = 0

    def refresh(self) -> bool:
        """Read the files again if they have changed; return True if their content is used now."""
        if (stamp := self._stamp()) == self._seen:
            return False
        self._seen = stamp
        changed = {"content": self._name, "files": ", ".join(map(str, self._paths))}
        try:
            self.content = self._read()
        except SettingError as error:
            log.warning(
                "files changed and cannot be used; keeping the old content", **changed, cause=str(error)
            )
            return False
        self.changes += 1
        log.info("files changed and were read again", **changed)
        return True

    def _stamp(self) -> Sequence[tuple[int, int, int] | None]:
        """Return a value that differs after a file was written, replaced or removed."""
        return [_file_stamp(path) for path in self._paths]


def _file_stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
