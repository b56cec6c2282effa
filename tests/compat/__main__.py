"""`python -m compat VERSION`: write `tests/released/VERSION`, which is committed and never changed."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from shutil import copytree

import click

from compat.release import RELEASED, write
from house.source import ROOT
from rallypoint.serving.info import VERSION
from support.etcd_server import ETCD


@click.command()
@click.argument("version")
def main(version: str) -> None:
    """Write the promises of a version."""
    if version != VERSION:
        raise click.ClickException(f"the package has version {VERSION}, not {version}")
    if ETCD is None:
        raise click.ClickException("etcd is missing (.ci/install-etcd installs it)")
    if (RELEASED / version).exists():
        raise click.ClickException(f"{RELEASED / version} exists: promises are not changed")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(write(Path(folder)))
        copytree(folder, RELEASED / version)
    for path in sorted((RELEASED / version).iterdir()):
        click.echo(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
