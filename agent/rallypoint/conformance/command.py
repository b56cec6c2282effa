"""`rallypoint conformance`: check an agent, or a worker, in any language against the rules of the pages in docs."""

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
    help="Command line of the client, with {address}, {run_id}, {node_id} and {worker}; see above for others.",
)
@click.option(
    "--worker", default="", metavar="COMMAND", help="Command line of a worker, instead of a client."
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
    worker: str,
    rules: tuple[str, ...],
    names: tuple[str, ...],
    list_all: bool,
    timeout: float,
    jobs: int,
    as_json: bool,
) -> None:
    """Check an agent, or the sockets of a worker, in any language.

    Agents: the rules of docs/protocol.md. Each scenario starts the client once, against a rendezvous service on
    loopback that plays a script. {worker} is the program of one worker; the client must run it and pass its environment
    on. With {ca}, a file with the certificate of the service's authority, the connection is TLS. {addresses} in place
    of {address} is a list of replicas, and {timer} the address of a timer service: each brings rules of its own.

        rallypoint conformance --client './member {address} {run_id} {node_id} -- {worker}'

    Workers: the rules of docs/timer-socket.md and docs/store-socket.md. Each scenario starts the worker once, with an
    agent's sockets that play a script. The worker carries out the steps that it reads from its standard input.

        rallypoint conformance --worker ./worker

    Exit code 0: no rule was broken; 1: one was; 2: the program could not be started.
    """
    from rallypoint.conformance.client import parse_command  # noqa: PLC0415 (gRPC is not for --help)
    from rallypoint.conformance.report import AGENTS, NOT_PLAYED, WORKERS, play_all  # noqa: PLC0415
    from rallypoint.rpc.loop import run  # noqa: PLC0415

    if list_all:
        for kit in (AGENTS, WORKERS):
            for rule, text in kit.rules.items():
                click.echo(f"{rule}  {text}")
            for each in kit.scenarios.values():
                click.echo(f"{each.name} ({', '.join(each.rules)}): {each.summary}")
        return
    try:
        if client and worker:
            raise SettingError("--client and --worker exclude each other")
        kit = WORKERS if worker else AGENTS
        scenarios = kit.choose(rules, names)
        words = parse_command(kit.option, worker or client, kit.placeholders)
    except SettingError as error:
        raise SettingRefused(str(error)) from None
    # Ctrl-C ends the clients and their workers; SIGTERM does the same.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        report = run(
            play_all(
                kit,
                words,
                scenarios,
                timeout=timeout,
                jobs=jobs,
                progress=lambda line: click.echo(line, err=True),
            )
        )
    except SettingError as error:
        raise SettingRefused(str(error)) from None
    if as_json:
        click.echo(report.to_json())
    else:
        results = [each for each in report.results() if each.reason != NOT_PLAYED]
        for result in results:
            click.echo(result.line())
        counts = {
            status: sum(each.status == status for each in results) for status in ("PASS", "FAIL", "SKIPPED")
        }
        click.echo(", ".join(f"{count} {status}" for status, count in counts.items()))
    if report.failed:
        raise SystemExit(1)
