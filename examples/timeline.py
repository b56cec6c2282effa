"""The report of a demonstration: faults, the process that noticed each, and the time of each recovery."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_WIDTH = 118
_HEADINGS = ("at", "noticed", "workers", "epoch", "down")
_COLUMN = 9


@dataclass(frozen=True, slots=True)
class Recovery:
    """One fault and its consequences. Times are Unix seconds.

    Attributes:
        fault: the injected fault.
        noticed_by: who noticed it.
        detail: its message.
        injected: when it was done.
        noticed: when it was noticed.
        down_since: since when training could not go on.
        workers_back: when the last worker of the next round was started; None if all ran on.
        trained: when the first epoch after it was done.
        rounds: numbers of the round before and after.
        workers: how many there were before and after.
        restarts: how many were used up after it.
    """

    fault: str
    noticed_by: str
    detail: str
    injected: float
    noticed: float
    down_since: float
    workers_back: float | None
    trained: float
    rounds: tuple[int, int]
    workers: tuple[int, int]
    restarts: int

    @property
    def down(self) -> float:
        """Seconds from when training could not go on to the end of the next epoch."""
        return self.trained - self.down_since

    @property
    def without_workers(self) -> float:
        """The part of them until the last worker was started."""
        return 0.0 if self.workers_back is None else self.workers_back - self.down_since

    def as_figures(self, began: float) -> dict[str, Any]:
        """The same for programs, in seconds: `at` since the beginning, fields with `_after` since the fault."""
        back = None if self.workers_back is None else round(self.workers_back - self.injected, 3)
        return {
            "fault": self.fault,
            "noticed_by": self.noticed_by,
            "detail": self.detail,
            "at": round(self.injected - began, 3),
            "noticed_after": round(self.noticed - self.injected, 3),
            "workers_back_after": back,
            "epoch_after": round(self.trained - self.injected, 3),
            "down": round(self.down, 3),
            "rounds": self.rounds,
            "workers": self.workers,
            "restarts": self.restarts,
        }


@dataclass(slots=True)
class Timeline:
    """A run and its faults. Times are Unix seconds."""

    run_id: str
    began: float
    ended: float = 0.0
    detail: str = ""
    accuracy: float = 0.0
    recoveries: list[Recovery] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Writes it as JSON."""
        content = {
            "run_id": self.run_id,
            "accuracy": self.accuracy,
            "seconds": round(self.ended - self.began, 3),
            "down": round(sum(recovery.down for recovery in self.recoveries), 3),
            "faults": [recovery.as_figures(self.began) for recovery in self.recoveries],
        }
        path.write_text(json.dumps(content, indent=2) + "\n")

    def __str__(self) -> str:
        """The table for people, with a legend."""
        down = [recovery.down for recovery in self.recoveries]
        without_workers = sum(recovery.without_workers for recovery in self.recoveries)
        return "\n".join(
            [
                _row(_HEADINGS, "fault, and who noticed it"),
                *(line for recovery in self.recoveries for line in self._lines(recovery)),
                "",
                "at       when it was done, since the start",
                "noticed  until it was noticed, by whom the line below names",
                "workers  until every worker of the next round was started; -: none was stopped",
                "epoch    until the next epoch was done, which takes all workers",
                "down     for how long training could not go on, to the end of that epoch",
                "",
                f"Held-out accuracy {self.accuracy:.2f}: {self.detail}.",
                f"Down for {sum(down):.2f} s of {self.ended - self.began:.2f} s "
                f"({' + '.join(f'{each:.2f}' for each in down)}), of which {without_workers:.2f} s until workers "
                "were started;",
                "the rest is their own start, their checkpoint, and one epoch each.",
            ]
        )

    def _lines(self, recovery: Recovery) -> list[str]:
        told = recovery.as_figures(self.began)
        names = ("at", "noticed_after", "workers_back_after", "epoch_after", "down")
        figures = ["-" if told[name] is None else f"{told[name]:.2f} s" for name in names]
        (before, after), (fewer, more) = recovery.rounds, recovery.workers
        texts = [
            recovery.fault,
            f"   {recovery.noticed_by}: {recovery.detail}",
            f"   round {before} with {fewer} workers -> round {after} with {more}; restarts used: {recovery.restarts}",
        ]
        width = _WIDTH - len(_row(_HEADINGS, ""))
        wrapper = textwrap.TextWrapper(
            width, subsequent_indent="   ", break_on_hyphens=False
        )  # names have hyphens
        first, *others = (line for text in texts for line in wrapper.wrap(text))
        return ["", _row(figures, first), *(_row([""] * len(figures), line) for line in others)]


def _row(cells: Iterable[str], text: str) -> str:
    return "".join(f"{cell:>{_COLUMN}}  " for cell in cells) + text
