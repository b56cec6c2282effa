"""Checks of fields that every service receives: names, sentences and numbers."""

from __future__ import annotations

from rallypoint.rpc.errors import invalid

NAME_BYTES = 256
SENTENCE_BYTES = 1024
PATH_BYTES = 4096


def name(field: str, value: str) -> None:
    """Check a name: not empty, at most 256 bytes, no control characters.

    Raises:
        ServiceError: INVALID_ARGUMENT, naming the field.
    """
    if not value:
        raise invalid(field, "must not be empty")
    text(field, value, NAME_BYTES)


def text(field: str, value: str, most_bytes: int) -> None:
    """Check a text that is shown in logs and on terminals.

    Raises:
        ServiceError: INVALID_ARGUMENT, naming the field.
    """
    if len(value.encode()) > most_bytes:
        raise invalid(field, f"must have at most {most_bytes} bytes, not {len(value.encode())}")
    if not value.isprintable():
        raise invalid(field, "must not have control characters")


def count(field: str, value: int, least: int, most: int) -> None:
    """Check a number.

    Raises:
        ServiceError: INVALID_ARGUMENT, naming the field.
    """
    if not least <= value <= most:
        raise invalid(field, f"must be from {least} to {most}, not {value}")
