"""What may name a run, a node, a worker or a scope."""

from __future__ import annotations

from rallypoint.timer.refusals import InvalidField

MAX_NAME_BYTES = 256
# Twice what a worker may name: room for what its agent adds to tell equal scopes apart.
MAX_SCOPE_BYTES = 512


def check_name(field: str, value: str, limit: int = MAX_NAME_BYTES) -> None:
    """Refuses a name that is empty or too long.

    Args:
        field: what it is the value of, for the refusal.
        value: the name.
        limit: most bytes of UTF-8.

    Raises:
        InvalidField: it is.
    """
    if not value:
        raise InvalidField(field, "must not be empty")
    # No character takes more than four bytes: the usual short name is not encoded just to be measured.
    if len(value) * 4 > limit and len(value.encode()) > limit:
        raise InvalidField(field, f"must have at most {limit} bytes of UTF-8")
