"""`rallypoint agent stacks`: what workers are doing."""

from __future__ import annotations

import json

import click

from rallypoint.cli.agent_service import agent_options, ranks_option, run_argument
from rallypoint.rpc.endpoint import ClientTLS


@click.command()
@run_argument
@ranks_option
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@agent_options
def stacks(
    *,
    run_id: str,
    ranks: tuple[int, ...],
    agent: str,
    as_json: bool,
    timeout: float,
    tls: ClientTLS | None,
) -> None:
    """Show what the workers of RUN_ID on the agent's host are doing: Python stacks, and what the kernel says.

    Nothing is killed. Workers that use rallypoint.timer write their stacks themselves; of others py-spy reads them,
    if it is installed on the host.
    """
    from google.protobuf.json_format import MessageToDict  # noqa: PLC0415 (slow, and not for --help)

    from rallypoint.agent.v1 import supervisor_service_pb2 as pb  # noqa: PLC0415
    from rallypoint.cli.operator import ask_agent  # noqa: PLC0415

    request = pb.DumpStacksRequest(run_id=run_id, ranks=ranks)
    response = ask_agent(agent, tls, timeout, lambda stub: stub.DumpStacks(request))
    if as_json:
        click.echo(json.dumps(MessageToDict(response, always_print_fields_with_no_presence=True), indent=2))
        return
    for number, worker in enumerate(response.stacks):
        # Names of threads and functions are users' own: nothing in them may move the terminal's cursor.
        text = "\n".join(
            "".join(c if c.isprintable() else " " for c in line) for line in worker.text.split("\n")
        )
        click.echo(("\n" if number else "") + f"=== {text}")
    if not response.stacks:
        click.echo("no workers run")
