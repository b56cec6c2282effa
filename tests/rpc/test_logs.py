"""Logs are one JSON object a line except at a terminal, from any library, and cost nothing until set up."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from rallypoint.rpc.logs import configure_logs, get_logger
from rallypoint.serving.server import Server
from serving.conftest import SERVICE
from support.processes import modules_after
from support.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("logging_restored")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def objects(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def fail(text: str) -> None:
    raise RuntimeError(text)


def test_an_event_is_one_json_object_with_its_fields() -> None:
    stream = io.StringIO()
    configure_logs(stream=stream)
    get_logger("rallypoint.x", run_id="r1").bind(node_id="n1").info(
        "node lost", reason="no heartbeat", after=15.5
    )
    [line] = objects(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", line.pop("timestamp"))
    assert line == {
        "event": "node lost",
        "level": "info",
        "logger": "rallypoint.x",
        "run_id": "r1",
        "node_id": "n1",
        "reason": "no heartbeat",
        "after": 15.5,
    }


def test_fields_cannot_forge_the_event_and_need_not_be_json() -> None:
    stream = io.StringIO()
    configure_logs(stream=stream)
    get_logger("rallypoint.x").info("said", level="fake", text='two\nlines "quoted"', path={1, 2}.__class__)
    [line] = objects(stream)
    assert (line["level"], line["text"], line["path"]) == ("info", 'two\nlines "quoted"', "<class 'set'>")


def test_a_traceback_stays_within_its_line() -> None:
    stream = io.StringIO()
    configure_logs(stream=stream)
    try:
        fail("on purpose")
    except RuntimeError as error:
        get_logger("rallypoint.x").exception("failed")
        later = error
    get_logger("rallypoint.x").exception("failed", error=later)
    first, second = objects(stream)
    for line in (first, second):
        assert line["level"] == "error"
        assert "RuntimeError: on purpose" in line["exception"]
        assert "in fail" in line["exception"]


def test_logs_of_libraries_and_warnings_come_out_alike() -> None:
    stream = io.StringIO()
    configure_logs(stream=stream)
    logging.getLogger("some.library").warning("%d of %d", 1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old way", UserWarning, stacklevel=1)
    library, warning = objects(stream)
    assert (library["event"], library["logger"]) == ("1 of 2", "some.library")
    assert "old way" in warning["event"]


def test_the_level_holds_for_all() -> None:
    stream = io.StringIO()
    configure_logs("warning", stream=stream)
    for name in ("rallypoint.x", "some.library"):
        get_logger(name).info("not shown")
        get_logger(name).warning("shown")
    assert [line["event"] for line in objects(stream)] == ["shown", "shown"]


def test_configuring_again_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logs(stream=first)
    configure_logs(stream=second)
    get_logger("rallypoint.x").info("once")
    assert first.getvalue() == ""
    assert len(objects(second)) == 1


@pytest.mark.parametrize(
    ("format", "stream", "json_expected", "colour_expected"),
    [
        ("auto", io.StringIO, True, False),
        ("auto", Terminal, False, True),
        ("json", Terminal, True, False),
        ("human", io.StringIO, False, False),
        ("human", Terminal, False, True),
    ],
)
def test_format(
    format: str,
    stream: type[io.StringIO],
    json_expected: bool,
    colour_expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = stream()
    configure_logs(format=format, stream=out)
    get_logger("rallypoint.x").info("node lost", node_id="n1")
    text = out.getvalue()
    assert text.startswith("{") == json_expected
    assert ("\x1b[" in text) == colour_expected
    assert "node lost" in text
    assert "n1" in text


def test_a_line_for_people_is_one_line() -> None:
    """The time, the level unless it is info, and unambiguous fields; a sentence replaces all fields."""
    out = io.StringIO()
    configure_logs(format="human", stream=out)
    log = get_logger("rallypoint.x", run_id="r 1")
    log.info("node lost", reason="no\nheartbeat", after=15.5, empty="", quoted='a"b')
    log.warning("bad", path="/x")
    log.info("waiting", here=1, sentence="waiting for nodes: 1 of 2 here\x1b[2J")
    logging.getLogger("some.library").error("two\nlines")
    assert [line[9:] for line in out.getvalue().splitlines()] == [
        r"""node lost run_id='r 1' reason='no\nheartbeat' after=15.5 empty='' quoted='a"b'""",
        "warning bad run_id='r 1' path=/x",
        "waiting for nodes: 1 of 2 here [2J",
        "error some.library: two lines",
    ]
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in out.getvalue().splitlines())


def test_a_sentence_is_not_for_programs() -> None:
    stream = io.StringIO()
    configure_logs(stream=stream)
    get_logger("rallypoint.x").info("waiting", here=1, sentence="waiting for nodes: 1 of 2 here")
    [line] = objects(stream)
    assert (line["event"], line["here"], "sentence" in line) == ("waiting", 1, False)


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    configure_logs(stream=out)
    get_logger("rallypoint.x").error("node lost")
    assert "\x1b[" not in out.getvalue()


@pytest.mark.parametrize("settings", [{"level": "loud"}, {"format": "xml"}])
def test_invalid_settings_are_refused(settings: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="is none of"):
        configure_logs(**settings)  # type: ignore[arg-type]


def test_noise_of_grpc_is_left_out_and_its_bugs_are_not() -> None:
    stream = io.StringIO()
    configure_logs(stream=stream)
    failed_write = type("ExecuteBatchError", (grpc.aio.InternalError,), {})
    noise = logging.getLogger("grpc._cython.cygrpc")
    noise.error("client gone", exc_info=failed_write('Failed "execute_batch": (...)'))
    noise.debug("[_cygrpc] Loaded running loop")
    logging.getLogger("asyncio").error(
        "Exception in callback %s", "PollerCompletionQueue._handle_events(<_UnixSelectorEventLoop>)"
    )
    noise.error("a bug", exc_info=failed_write("Failed grpc_call_start_batch: 8"))
    logging.getLogger("asyncio").error("Task exception was never retrieved")
    assert [line["event"] for line in objects(stream)] == ["a bug", "Task exception was never retrieved"]


async def test_clients_that_go_are_no_errors_where_the_program_has_logs_of_its_own(
    serve: Callable[..., Awaitable[Server]],
    connect: Callable[..., grpc.aio.Channel],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An embedded server is an example. A handler's bug is still logged."""

    async def write_on(requests: AsyncIterator[bytes], context: Any) -> None:
        while True:
            await context.write(bytes(300_000))

    server = await serve({"Write": grpc.stream_stream_rpc_method_handler(write_on)})
    calls: list[Any] = [connect(server).stream_stream(f"/{SERVICE}/Write")() for _ in range(20)]
    for call in calls:
        await call.read()
    for call in calls:
        call.cancel()
    async with asyncio.timeout(PATIENCE):
        await server.idle()
    failed_write = type("ExecuteBatchError", (grpc.aio.InternalError,), {})
    error = failed_write("Failed grpc_call_start_batch: 8")
    logging.getLogger("grpc._cython.cygrpc").error("a bug", exc_info=error)
    logging.getLogger("asyncio").error("Exception in callback PollerCompletionQueue._handle_events()")
    assert [each.message for each in caplog.records if each.levelno >= logging.ERROR] == ["a bug"]


def test_without_set_up_events_read_well_in_any_logging(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("rallypoint.x", run_id="r1").warning("node lost", reason="100% silent")
    assert caplog.messages == ["node lost run_id='r1' reason='100% silent'"]


def test_modules_that_a_command_line_loads_first_are_light() -> None:
    loaded = modules_after("import rallypoint.rpc.logs, rallypoint.serving.options")
    assert loaded.isdisjoint({"grpc", "asyncio", "rich"})
