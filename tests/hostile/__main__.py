"""`python -m hostile`: attack a server of its own, and say how it bore it. Exit code 1 if it did not bear it well."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import click

from hostile.attacker import Attacker
from hostile.campaign import Report, attack, log_faults, memory_growth
from hostile.contract import documented_reasons
from hostile.requests import hostile_request
from hostile.target import Target, target
from hostile.verdict import fault

_MIB = 1024 * 1024
# What the second half of an attack may add to the memory of the server, bytes: what a request leaves behind for good is
# less than 330 bytes then. Where the allocator puts things makes a difference of some MiB either way.
_MOST_GROWTH = 16 * _MIB


@click.command()
@click.option(
    "--count", type=click.IntRange(100), default=100_000, show_default=True, help="How many requests."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Other seeds, other requests.")
@click.option(
    "--only", type=click.IntRange(0), help="Send the request of that number alone, and show what comes."
)
@click.option(
    "--journal", default="sqlite:journal.db", show_default=True, help="As of `rallypoint serve rendezvous`."
)
def main(count: int, seed: int, only: int | None, journal: str) -> None:
    """Send hostile requests to a rendezvous service, and report what it did wrong."""
    with tempfile.TemporaryDirectory() as folder, target(Path(folder), journal) as server:
        if only is not None:
            asyncio.run(_send_one(server, seed, only))
            return
        report = asyncio.run(attack(server, seed, count))
        server.stop()
        report.faults += log_faults(server)
    _show(report)
    if memory_growth(report) > _MOST_GROWTH:
        report.faults.append(f"memory grew by {memory_growth(report) / _MIB:.1f} MiB in the second half")
    for each in report.faults:
        click.echo(f"\nFAULT: {each}")
    sys.exit(1 if report.faults else 0)


async def _send_one(server: Target, seed: int, number: int) -> None:
    request = hostile_request(seed, number)
    click.echo(str(request))
    attacker = Attacker(server.address, 1)
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
        f"a job beside it kept its round, and formed the next within {report.slowest_round * 1000:.0f} ms; "
        f"{report.runs} runs at the end\n"
        f"answered: {sum(report.answered.values()):,}, by {len(report.answered)} methods; "
        f"refused: {sum(report.refused.values()):,}, for {len(report.refused)} reasons:"
    )
    for (service, code, reason), times in sorted(report.refused.items()):
        click.echo(f"  {times:>7,}  {service.rpartition('.')[2]:<20} {code} {reason}")


if __name__ == "__main__":
    main()
