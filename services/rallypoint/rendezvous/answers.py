"""Answers to requests that wait: given once, and to nobody who has gone."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from rallypoint.rendezvous.core.refusals import Refused

_T = TypeVar("_T")


def settle(answer: asyncio.Future[_T], outcome: _T | Refused) -> None:
    """Tell who waits for `answer` what came out, or why it was refused."""
    if answer.done():  # its caller has gone
        return
    if isinstance(outcome, Refused):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
