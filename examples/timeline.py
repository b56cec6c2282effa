"""The report of a demonstration: faults, the process that noticed each, and the time of each recovery."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

_WIDTH = 118
_HEADINGS = ("at", "noticed", "workers", "epoch", "down")
_COLUMN = 9
# Sizes in the picture, in pixels. Colours by the part of a recovery; the first is also that of the training.
_PICTURE, _LABELS, _ROW, _BAR = 820, 440, 30, 14
_COLOURS = {
    "training": "#4c9f70",
    "until it was noticed": "#c0392b",
    "until workers were started": "#e67e22",
    "until the next epoch was done": "#f4d06f",
}


@dataclass(frozen=True, slots=True)
class Recovery:
    """One fault and its consequences. Times are Unix seconds.

    Attributes:
        fault: the injected fault.
        noticed_by: the process that noticed it.
        detail: its message.
        injected: time of the fault.
        noticed: time when it was noticed.
        down_since: time from which training was interrupted.
        workers_back: time when the last worker of the next round was started; None if all ran on.
        trained: time when the first epoch after it was done.
        rounds: numbers of the round before and after.
        workers: their number before and after.
        restarts: number of restarts used after it.
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
        """Seconds from the interruption of training to the end of the next epoch."""
        return self.trained - self.down_since

    @property
    def parts(self) -> list[tuple[str, float, float]]:
        """The colour of each part of the picture's bar, and its begin and end in seconds since the fault."""
        training, unnoticed, without_workers, starting = _COLOURS.values()
        noticed, trained = self.noticed - self.injected, self.trained - self.injected
        back = noticed if self.workers_back is None else self.workers_back - self.injected
        first = training if self.down_since >= self.noticed else unnoticed
        return [(first, 0, noticed), (without_workers, noticed, back), (starting, back, trained)]

    @property
    def without_workers(self) -> float:
        """The part of `down` until the last worker was started."""
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
        """Write it as JSON."""
        content = {
            "run_id": self.run_id,
            "accuracy": self.accuracy,
            "seconds": round(self.ended - self.began, 3),
            "down": round(sum(recovery.down for recovery in self.recoveries), 3),
            "faults": [recovery.as_figures(self.began) for recovery in self.recoveries],
        }
        path.write_text(json.dumps(content, indent=2) + "\n")

    def draw(self, path: Path) -> None:
        """Write a picture as SVG: the run with its gaps, and each recovery with its parts."""
        total = self.ended - self.began
        longest = max(recovery.trained - recovery.injected for recovery in self.recoveries)
        per_run, per_recovery = (_PICTURE - 20) / total, (_PICTURE - _LABELS - 70) / longest
        training = next(iter(_COLOURS.values()))
        drawn = [
            _text(10, 22, f"{total:.1f} s of training; below, from each fault to the next epoch"),
            _bar(training, 10, 32, total * per_run),
        ]
        for number, recovery in enumerate(self.recoveries):
            at = 10 + (recovery.injected - self.began) * per_run
            drawn.append(_text(at, 64, recovery.fault[0]))
            y = 82 + number * _ROW
            label = re.sub(r" \(pid \d+\)|[,;].*", "", recovery.fault)
            drawn.append(_text(10, y + 12, label))
            for colour, begin, end in recovery.parts:
                drawn.append(_bar(colour, at + begin * per_run, 32, (end - begin) * per_run))
                drawn.append(_bar(colour, _LABELS + begin * per_recovery, y, (end - begin) * per_recovery))
            seconds = recovery.as_figures(self.began)["epoch_after"]
            drawn.append(_text(_LABELS + seconds * per_recovery + 6, y + 12, f"{seconds:.2f} s"))
        x, y = 10, 92 + len(self.recoveries) * _ROW
        for name, colour in _COLOURS.items():
            drawn += [_bar(colour, x, y, _BAR), _text(x + 20, y + 12, name)]
            x += 40 + 7 * len(name)
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_PICTURE}" height="{y + 26}" '
            'font-family="sans-serif" font-size="13">\n'
            f'<rect width="100%" height="100%" fill="white"/>\n{"".join(drawn)}</svg>\n'
        )

    def __str__(self) -> str:
        """Return the table as text, with a legend."""
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


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y}">{escape(text)}</text>\n'


def _bar(colour: str, x: float, y: float, width: float) -> str:
    return f'<rect fill="{colour}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}"/>\n'


def _row(cells: Iterable[str], text: str) -> str:
    return "".join(f"{cell:>{_COLUMN}}  " for cell in cells) + text
