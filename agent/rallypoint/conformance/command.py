"""`rallypoint conformance`: check an agent in any language against the rules of docs/protocol.md."""

from __future__ import annotations

import signal

import click

from rallypoint.rpc.endpoint import SettingError
from rallypoint.serving.options import Seconds, SettingRefused


@click.command()
@click.option(
    "--client",
    default="",
    metavar="COMMAND",
    help="Command line of the client, with {address}, {run_id}, {node_id} and {worker}.",
)
@click.option("--rule", "rules", multiple=True, metavar="ID", help="Only scenarios for this rule.")
@click.option("--scenario", "names", multiple=True, metavar="NAME", help="Only this scenario.")
@click.option("--list", "list_all", is_flag=True, help="List the rules and the scenarios.")
@click.option(
    "--timeout",
    type=Seconds(1.0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for each expected action of the client.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    metavar="N",
    help="Scenarios that are played at a time.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def conformance(
    *,
    client: str,
    rules: tuple[str, ...],
    names: tuple[str, ...],
    list_all: bool,
    timeout: float,
    jobs: int,
    as_json: bool,
) -> None:
    """Check an agent in any language against the rules of docs/protocol.md.

    Each scenario starts the client once, against a rendezvous service on loopback that plays a script. {worker} is the
    program of one worker; the client must run it and pass its environment on. Exit code 0: no rule was broken; 1: one
    was; 2: the client could not be started.

        rallypoint conformance --client './member {address} {run_id} {node_id} -- {worker}'
    """
    from rallypoint.conformance.client import parse_command  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.conformance.report import chosen_scenarios, play_all  # noqa: PLC0415
    from rallypoint.conformance.rules import RULES  # noqa: PLC0415
    from rallypoint.rpc.loop import run  # noqa: PLC0415

    try:
        scenarios = chosen_scenarios(rules, names)
        words = parse_command(client) if not list_all else []
    except SettingError as error:
        raise SettingRefused(str(error)) from None
    if list_all:
        for rule, text in RULES.items():
            click.echo(f"{rule}  {text}")
        for each in scenarios:
            click.echo(f"{each.name} ({', '.join(each.rules)}): {each.summary}")
        return
    # Ctrl-C ends the clients and their workers; SIGTERM does the same.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        report = run(
            play_all(
                words, scenarios, timeout=timeout, jobs=jobs, progress=lambda line: click.echo(line, err=True)
            )
        )
    except SettingError as error:
        raise SettingRefused(str(error)) from None
    if as_json:
        click.echo(report.to_json())
    else:
        results = report.results()
        for result in results:
            click.echo(result.line())
        counts = {
            status: sum(each.status == status for each in results) for status in ("PASS", "FAIL", "SKIPPED")
        }
        click.echo(", ".join(f"{count} {status}" for status, count in counts.items()))
    if report.failed:
        raise SystemExit(1)
