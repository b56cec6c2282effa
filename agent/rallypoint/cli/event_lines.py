"""Events as lines: for people, and for programs."""

from __future__ import annotations

from google.protobuf.json_format import MessageToJson

from rallypoint.cli.console import printable
from rallypoint.cli.moments import show_moment, show_span
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

_SPAN_WIDTH = 9  # "-12m34s", and "59.999s" with its sign
_KIND_WIDTH = max(map(len, pb.EventKind.keys())) - len("EVENT_KIND_")


def unix_seconds(event: pb.Event) -> float:
    """When it happened, by the service's clock."""
    return event.time.ToNanoseconds() / 1e9


class EventLines:
    """Writes a line for each event, with the time that passed since the one before it."""

    def __init__(self) -> None:
        """Nothing came before the first."""
        self._before: float | None = None

    def line(self, event: pb.Event) -> str:
        """When, how long after the line before, what kind, what happened and why."""
        now = unix_seconds(event)
        span = "" if self._before is None else show_span(now - self._before)
        self._before = now
        if span and not span.startswith("-"):
            span = f"+{span}"
        kind = pb.EventKind.Name(event.kind).removeprefix("EVENT_KIND_") if _known(event) else "?"
        # What operators do is all that somebody must answer for; who caused the rest, its sentence says.
        by = f" ({event.actor})" if event.actor.startswith("operator ") else ""
        sentence = printable(f"{event.detail}{by}")
        return f"{show_moment(now)}  {span:>{_SPAN_WIDTH}}  {kind:<{_KIND_WIDTH}}  {sentence}"


def json_line(event: pb.Event) -> str:
    """An event as the protocol's JSON, on one line."""
    return MessageToJson(event, indent=None, always_print_fields_with_no_presence=True)


def _known(event: pb.Event) -> bool:
    return event.kind in pb.EventKind.values()
