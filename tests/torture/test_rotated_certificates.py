"""All certificates of a run, also the authority's, are replaced again and again: no node is lost."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

import pytest

from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from serving.conftest import make_certificates
from support.waiting import PATIENCE, until
from torture.crowd import crowd
from torture.mortal_server import MortalServer, serving

NODES = 64
ROTATIONS = 3

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout((2 + 2 * ROTATIONS) * PATIENCE)]


async def test_a_run_outlives_all_its_certificates(tmp_path: Path) -> None:
    """The service restarts with the new ones, and the agents come back with theirs, to the same round."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command (apt install openssl)")
    files = make_certificates(tmp_path / "tls", "authority 0")
    server = MortalServer(tmp_path, files)
    settings = pb.RunSettings(min_nodes=NODES, max_nodes=NODES)
    async with (
        serving(server),
        crowd(server.endpoint, settings, NODES, random.Random(NODES), server.security) as nodes,
    ):
        round_ = await nodes.agree(PATIENCE)
        for rotation in range(1, ROTATIONS + 1):
            await asyncio.to_thread(make_certificates, tmp_path / "tls", f"authority {rotation}")
            await asyncio.to_thread(server.terminate)
            await asyncio.to_thread(server.start)
            await until(
                lambda rotation=rotation: min(node.resumptions for node in nodes.nodes) >= rotation,  # type: ignore[misc]
                f"all nodes to be back after rotation {rotation}",
            )
        assert nodes.common_round() == round_
        assert [reason for node in nodes.nodes for reason in node.losses] == []
    assert server.complaints() == []
