"""`rallypoint agent logs` shows all output that it received, however the stream ends."""

from __future__ import annotations

import pytest

from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.cli.agent import ByteCount, _print_logs
from rallypoint.rpc.endpoint import CallTarget, SettingError
from submission.fake_agents import agents, piece, refusal


async def test_a_line_without_an_end_is_shown_though_the_agent_is_lost(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The last output of a worker before its host was lost is the most useful."""
    async with agents("a") as ((fake,), (remote,)):
        fake.output.put_nowait(piece(b"whole\nlast words", 16))
        fake.output.put_nowait(refusal("NO_JOB"))
        with pytest.raises(SettingError, match="NO_JOB"):
            await _print_logs(
                pb.StreamLogsRequest(follow=True), CallTarget(remote.endpoint, None, 1.0), prefixed=True
            )
    assert capfd.readouterr().out == "[0]: whole\n[0]: last words\n"


async def test_lost_output_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    """Rotated away, or of an attempt that is no longer kept: the reader must not take the rest for the whole."""
    async with agents("a") as ((fake,), (remote,)):
        for offset, lost in ((110, 100), (120, -1), (130, 0)):
            later = piece(b"some line\n", offset, rank=3)
            later.lost_bytes = lost
            fake.output.put_nowait(later)
        fake.output.put_nowait(None)
        await _print_logs(pb.StreamLogsRequest(), CallTarget(remote.endpoint, None, 1.0), prefixed=False)
    shown = capfd.readouterr()
    assert shown.out == 3 * "some line\n"
    assert shown.err.splitlines() == [
        "100 bytes of rank 3's output are no longer available",
        "whole attempts of rank 3's output are no longer available",
    ]


@pytest.mark.parametrize(
    ("size", "bytes_"), [("7", 7), ("64KiB", 65536), ("1MB", 10**6), ("2GiB", 2 << 30), ("1G", 10**9)]
)
def test_a_size_is_bytes_or_has_a_unit(size: str, bytes_: int) -> None:
    """The same units as for `--log-max-size`."""
    assert ByteCount().convert(size, None, None) == bytes_
