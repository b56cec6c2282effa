"""Background tasks end on request, and their errors are reported."""

from __future__ import annotations

import asyncio

from rallypoint.agent.job.sync import Background
from support.waiting import until


async def test_an_exception_of_a_task_is_reported() -> None:
    """No code awaits the task, so its error would be lost."""
    errors: list[BaseException] = []

    async def fail() -> None:
        raise ZeroDivisionError

    Background(errors.append).begin(fail())
    await until(lambda: bool(errors), "the error")
    assert isinstance(errors[0], ZeroDivisionError)


async def test_the_end_waits_for_all_tasks() -> None:
    """It waits for slow tasks; cancellation is no error, but an exception after it is one."""
    errors: list[BaseException] = []
    ended: list[str] = []
    background = Background(errors.append)

    async def stubborn() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            ended.append("stubborn")

    async def clumsy() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            raise ZeroDivisionError

    background.begin(stubborn())
    background.begin(clumsy())
    await asyncio.sleep(0)
    await background.end()
    assert ended == ["stubborn"]
    assert [type(error) for error in errors] == [ZeroDivisionError]
