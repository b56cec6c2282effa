"""The report of a failure at the end of a run, for people."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, tzinfo

from rallypoint.agent.failures.failure import WorkerFailure, short_end, signal_name

_MOST_OTHERS = 8  # workers that are listed; a host may have hundreds

# A log may hold escape sequences; in a report they would only move the reader's cursor.
_HARMLESS = {code: "?" for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}


def render(
    failure: WorkerFailure, zone: tzinfo | None = None, *, others: Sequence[WorkerFailure] = ()
) -> str:
    """Return the report of a failure as text.

    Args:
        zone: time zone for its time; None for this host's.
        others: the other failures of its round on this host, in order of time.
    """
    when = datetime.fromtimestamp(failure.time, UTC).astimezone(zone)
    how = (
        f"killed by {signal_name(-failure.exit_code)} (signal {-failure.exit_code})"
        if failure.exit_code < 0
        else str(failure.exit_code)
    )
    rows = [
        ("rank", f"{failure.rank} (local rank {failure.local_rank}, role {failure.role})"),
        ("host", failure.host),
        ("pid", str(failure.pid) if failure.pid else "never started"),
        ("exit code", how),
        ("time", f"{when:%Y-%m-%d %H:%M:%S}.{when.microsecond // 1000:03} {when:%Z (UTC%z)}"),
        ("reason", failure.message),
    ]
    if failure.log_file:
        rows.append(("log", failure.log_file))
    if failure.core_file:
        rows.append(("core dump", failure.core_file))
    report = "\n".join(f"  {name:<9}  {value}" for name, value in rows)
    if others:
        report += f"\n\n  {_describe_others(failure, others)}"
    if failure.traceback:
        report += "\n\n" + "\n".join(f"  {line}".rstrip() for line in failure.traceback.splitlines())
    return report.translate(_HARMLESS)


def _describe_others(first: WorkerFailure, others: Sequence[WorkerFailure]) -> str:
    """The workers that failed after it, most likely because of it, in one line."""
    count, plural = len(others), "s" if len(others) > 1 else ""
    here = all(other.at is not None and other.host == first.host for other in others)
    listed = []
    for other in others[:_MOST_OTHERS]:
        how = short_end(other.exit_code) if other.pid else "never started"
        # Clocks of two hosts may be minutes apart: their difference would mean nothing.
        later = f", {other.at - first.at:+.3f} s" if other.at is not None and first.at is not None else ""
        listed.append(f"rank {other.rank} ({how}{later})")
    more = f" and {count - _MOST_OTHERS} more" if count > _MOST_OTHERS else ""
    where = "" if here and first.at is not None else f" on {others[0].host}"
    return f"{count} more worker{plural} failed after it{where}: {', '.join(listed)}{more}"
