"""`python -m hostile`: attack a server of its own, and report the result. Exit code 1 if the server misbehaved."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import click

from hostile.attacker import Attacker
from hostile.campaign import Report, attack, log_faults, memory_growth
from hostile.contract import documented_reasons
from hostile.insider import Insider
from hostile.kinds import KINDS, RENDEZVOUS, Kind
from hostile.requests import hostile_request
from hostile.target import Target, target
from hostile.verdict import fault

_MIB = 1024 * 1024


@click.command()
@click.option(
    "--count", type=click.IntRange(100), default=100_000, show_default=True, help="How many requests."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Other seeds, other requests.")
@click.option(
    "--only", type=click.IntRange(0), help="Send the request of that number alone, and show what comes."
)
@click.option(
    "--journal", default="", help="As of `rallypoint serve rendezvous`; default: sqlite:journal.db."
)
@click.option(
    "--of",
    type=click.Choice(list(KINDS)),
    default=RENDEZVOUS.name,
    show_default=True,
    help="Which service to attack.",
)
def main(count: int, seed: int, only: int | None, journal: str, of: str) -> None:
    """Send hostile requests to a service, and report its faults."""
    kind = KINDS[of]
    with tempfile.TemporaryDirectory() as folder, target(Path(folder), kind, journal) as server:
        if only is not None:
            asyncio.run(_send_one(server, kind, seed, only))
            return
        report = asyncio.run(attack(server, kind, seed, count))
        server.stop()
        report.faults += log_faults(server, kind)
    _show(report)
    if memory_growth(report) > kind.most_growth * _MIB:
        report.faults.append(f"memory grew by {memory_growth(report) / _MIB:.1f} MiB in the second half")
    for each in report.faults:
        click.echo(f"\nFAULT: {each}")
    sys.exit(1 if report.faults else 0)


async def _send_one(server: Target, kind: Kind, seed: int, number: int) -> None:
    request = hostile_request(seed, number, kind)
    click.echo(str(request))
    attacker = Attacker(server.address, 1, Insider())
    outcome = await attacker.send(request)
    await attacker.close()
    click.echo(f"{outcome}\n{fault(request, outcome, documented_reasons()) or 'as it should be'}")
    click.echo(server.log.read_text(encoding="utf-8"))


def _show(report: Report) -> None:
    memory = ", ".join(f"{each / _MIB:.1f}" for each in report.memory)
    click.echo(
        f"{report.sent:,} requests of seed {report.seed} in {report.seconds:.1f} s "
        f"({report.sent / report.seconds:,.0f}/s; {report.server_cpu:.1f} s of the server's CPU)\n"
        f"server memory after each tenth: {memory} MiB; {memory_growth(report) / _MIB:+.1f} MiB in the second half\n"
        f"{report.beside}\n"
        f"answered: {sum(report.answered.values()):,}, by {len(report.answered)} methods; "
        f"refused: {sum(report.refused.values()):,}, for {len(report.refused)} reasons:"
    )
    for (service, code, reason), times in sorted(report.refused.items()):
        click.echo(f"  {times:>7,}  {service.rpartition('.')[2]:<20} {code} {reason}")


if __name__ == "__main__":
    main()
