"""`rallypoint agent logs`: what workers wrote, and write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from rallypoint.cli.agent_service import agent_options, ranks_option, run_argument
from rallypoint.rpc.endpoint import ClientTLS, SettingError

if TYPE_CHECKING:
    from rallypoint.agent.v1 import supervisor_service_pb2 as pb


_UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{letter}{end}": base**power
    for power, letter in enumerate("KMG", start=1)
    for end, base in (("", 1000), ("B", 1000), ("iB", 1024))
}


class ByteCount(click.ParamType[int]):
    """A size: a number of bytes, or as in 64KiB."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse and check."""
        text = str(value).strip()
        number = text.rstrip("KMGiB")
        factor = _UNITS.get(text[len(number) :].strip())
        if not (number.strip().isascii() and number.strip().isdigit()) or factor is None or len(number) > 15:
            self.fail(f"{text!r} is no size; expected bytes, or as in 64KiB or 1MB", param, ctx)
        return int(number) * factor


@click.command()
@run_argument
@ranks_option
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, over restarts, to the job's end.")
@click.option(
    "--tail",
    type=ByteCount(),
    default="0",
    metavar="SIZE",
    help="Only so much of the end of each stream of the latest attempt, as in 64KiB; without it, all attempts.",
)
@click.option(
    "--stream", type=click.Choice(["stdout", "stderr", "both"]), default="both", help="Which output."
)
@click.option(
    "--no-prefix", is_flag=True, help="Print the bytes as they are, without ranks before the lines."
)
@agent_options
def logs(
    *,
    run_id: str,
    ranks: tuple[int, ...],
    follow: bool,
    tail: int,
    stream: str,
    no_prefix: bool,
    agent: str,
    timeout: float,
    tls: ClientTLS | None,
) -> None:
    """Print what the workers of RUN_ID on the agent's host wrote, stdout to stdout and stderr to stderr.

    Following, it goes on where it was when the connection breaks.
    """
    from rallypoint.agent.v1 import supervisor_service_pb2 as pb  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.rpc.loop import run  # noqa: PLC0415

    request = pb.StreamLogsRequest(run_id=run_id, ranks=ranks, follow=follow, tail_bytes=tail)
    request.stream = {"stdout": pb.LOG_STREAM_STDOUT, "stderr": pb.LOG_STREAM_STDERR}.get(
        stream, pb.LOG_STREAM_UNSPECIFIED
    )
    run(_print_logs(request, agent, tls, timeout, prefixed=not no_prefix))


async def _print_logs(
    request: pb.StreamLogsRequest, endpoint: str, tls: ClientTLS | None, timeout: float, *, prefixed: bool
) -> None:
    from rallypoint.agent.logs.follower import OutputThread  # noqa: PLC0415
    from rallypoint.agent.v1 import supervisor_service_pb2_grpc as pb_grpc  # noqa: PLC0415
    from rallypoint.rpc.channel import open_channel  # noqa: PLC0415
    from rallypoint.submission.following import Lost, Pieces  # noqa: PLC0415
    from rallypoint.submission.output import (  # noqa: PLC0415
        Lines,
        lost_in_words,
    )

    outputs = {1: OutputThread(1), 2: OutputThread(2)}
    lines: Lines[int] = Lines(outputs)
    async with open_channel(endpoint, tls) as channel:
        stub = pb_grpc.SupervisorServiceStub(channel)
        # Who follows waits for an agent that was there; one that never was is told at once.
        pieces = Pieces(stub, request, tls, lambda: timeout if pieces.begun else 0.0)
        try:
            async for piece in pieces.read():
                if piece.lost_bytes:
                    click.echo(lost_in_words(piece), err=True)
                if prefixed:
                    await lines.add(piece.rank, piece.cursor.stream, f"[{piece.rank}]: ".encode(), piece.data)
                else:
                    await outputs[piece.cursor.stream].write(piece.data)
        except Lost as loss:
            raise SettingError(f"{endpoint}: {loss}") from None
        finally:
            for rank in sorted(lines.sources):
                await lines.finish(rank)
            for output in outputs.values():
                await output.close(5.0)
