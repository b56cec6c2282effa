"""The example clients keep a run alive together with an agent, despite losses of the service and of workers."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli.cli_process import rallypoint
from clients.members import (
    BUILT,
    CLIENTS,
    MAX_RESTARTS,
    PYTHON,
    SEARCH_PATH,
    Members,
    Service,
    get_run,
    members_of_a_service,
)
from ha.cluster import REPLICAS, running_cluster
from ha.waiting import PATIENCE, until
from programs import Program
from rallypoint.conformance.rules import RULES
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

pytestmark = BUILT

RUN = "polyglot"


async def test_members_keep_their_lease_over_a_restart_of_the_service(tmp_path: Path) -> None:
    """The service is SIGKILLed: no worker notices. A worker is: all workers restart, once, and the run succeeds."""
    nodes = (*CLIENTS, PYTHON)
    async with members_of_a_service(tmp_path, str(len(nodes))) as (members, service):
        members.start(*nodes)
        first = await members.meet(nodes)
        assert sorted(int(record["RANK"]) for record in first.values()) == [*range(len(nodes))]
        watchers = [members.watch(language) for language in CLIENTS]
        await all_print(watchers, f"round {first[PYTHON]['round']}")

        before = await service.run(RUN)
        await service.kill()
        await service.start()
        await all_resume(service.endpoint)
        after = await service.run(RUN)
        assert after.round == before.round
        assert [(node.node_id, node.lease) for node in after.nodes] == [
            (node.node_id, node.lease) for node in before.nodes
        ]
        assert await members.meet(nodes) == first, "a worker was restarted"

        os.kill(first[next(iter(CLIENTS))]["pid"], signal.SIGKILL)
        second = await members.meet(nodes, after=after.round)
        assert {record["TORCHELASTIC_RESTART_COUNT"] for record in second.values()} == {"1"}
        await all_print(watchers, f"round {second[PYTHON]['round']}")

        members.finish()
        assert set((await members.ended()).values()) == {0}
        run = await service.run(RUN)
        assert (run.run_end.outcome, run.restart_count) == (pb.OUTCOME_SUCCEEDED, 1)
        await all_print(watchers, "closed")
        assert {len(watcher.output.items) for watcher in watchers} == {3}


async def test_members_report_events_during_an_outage_of_the_service(tmp_path: Path) -> None:
    """Failures count as one restart. The service drains, and all workers succeed meanwhile: so does the run."""
    async with members_of_a_service(tmp_path, str(len(CLIENTS))) as (members, service):
        members.start(*CLIENTS)
        first = await members.meet(CLIENTS)
        await service.kill()
        for record in first.values():
            os.kill(record["pid"], signal.SIGKILL)
        await ended_workers(first)
        await service.start()
        second = await members.meet(CLIENTS, after=next(iter(first.values()))["round"])
        assert {record["TORCHELASTIC_RESTART_COUNT"] for record in second.values()} == {"1"}

        await service.stop()
        members.finish()
        await ended_workers(second)
        await service.start()
        assert set((await members.ended()).values()) == {0}
        run = await service.run(RUN)
        assert (run.run_end.outcome, run.restart_count) == (pb.OUTCOME_SUCCEEDED, 1)


async def ended_workers(records: Mapping[str, Mapping[str, Any]]) -> None:
    """Wait until workers are gone, and until their members have reaped them."""

    async def living() -> str:
        return ", ".join(node for node, record in records.items() if psutil.pid_exists(record["pid"]))

    await until("the ends of the workers", living, PATIENCE)


async def all_print(watchers: Sequence[Program], event: str) -> None:
    """Wait until each watcher has printed a line of an event."""
    for watcher in watchers:
        await watcher.output.first(event, lambda line: line.text.startswith(f"{event}:"))


async def test_a_worker_has_the_environment_of_an_agent_s_worker(tmp_path: Path) -> None:
    """Every variable of docs/protocol.md is set, as `rallypoint run` sets it."""
    nodes = (*CLIENTS, PYTHON)
    async with members_of_a_service(tmp_path, str(len(nodes))) as (members, _):
        members.start(*nodes)
        records = await members.meet(nodes)
        members.finish()
        own = {"pid", "RANK", "ROLE_RANK", "GROUP_RANK", "RALLYPOINT_NODE"}
        page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
        table = page[page.index("## The environment of a worker") :]
        common = {name: value for name, value in records[PYTHON].items() if name in table and name not in own}
        assert len(common) > 10
        common.pop("TORCHELASTIC_ERROR_FILE")  # the examples record no exceptions
        for language in CLIENTS:
            record = records[language]
            assert {name: record.get(name) for name in common} == common, language
            assert record["RANK"] == record["ROLE_RANK"] == record["GROUP_RANK"]
            assert record["RALLYPOINT_NODE"] == language


async def test_the_end_of_a_failed_run_has_the_first_failure(tmp_path: Path) -> None:
    """Without a restart left, a worker's death closes the run: all members exit with an error."""
    async with members_of_a_service(tmp_path, str(len(CLIENTS))) as (members, service):
        members.start(*CLIENTS)
        after = 0
        for victim in [*CLIENTS, *CLIENTS][-MAX_RESTARTS - 1 :]:
            records = await members.meet(CLIENTS, after=after)
            after = records[victim]["round"]
            os.kill(records[victim]["pid"], signal.SIGKILL)
        codes = await members.ended()
        assert set(codes.values()) == {1}, codes
        failure = (await service.run(RUN)).run_end.failure
        assert (failure.node_id, failure.exit_code) == (victim, -signal.SIGKILL)
        assert (failure.kind, failure.rank) == (pb.FAILURE_KIND_SIGNAL, int(records[victim]["RANK"]))


async def all_resume(endpoint: str) -> None:
    """Wait until each node of the run has a stream again."""

    async def resumed() -> str:
        run = await get_run(endpoint, RUN)
        return "" if all(node.connected for node in run.nodes) else f"the nodes are {run.nodes}"

    await until("all nodes to resume", resumed, PATIENCE)


async def test_members_that_lost_their_lease_join_again(tmp_path: Path) -> None:
    """Paused for longer than their leases live, they stop the workers of the old round and join as newcomers."""
    nodes = (*CLIENTS, PYTHON)
    async with members_of_a_service(tmp_path, f"1:{len(nodes)}") as (members, service):
        members.start(*nodes)
        first = await members.meet(nodes)
        for language in CLIENTS:
            members.programs[language].signal(signal.SIGSTOP)

        async def lost() -> str:
            names = [node.node_id for node in (await service.run(RUN)).nodes]
            return "" if names == [PYTHON] else f"the nodes are {names}"

        await until("the ends of the leases", lost, PATIENCE)
        for language in CLIENTS:
            members.programs[language].signal(signal.SIGCONT)
        second = await members.meet(nodes, after=first[PYTHON]["round"])
        assert not [record for record in first.values() if psutil.pid_exists(record["pid"])]
        assert {record["TORCHELASTIC_RESTART_COUNT"] for record in second.values()} == {"0"}
        members.finish()
        assert set((await members.ended()).values()) == {0}


async def test_members_leave_in_good_order_on_sigterm(tmp_path: Path) -> None:
    """One after the other leaves; the others go on in a new round, and no restart is counted."""
    left = [PYTHON, *CLIENTS]
    async with members_of_a_service(tmp_path, f"1:{len(left)}") as (members, service):
        members.start(*left)
        after = 0
        while left:
            records = await members.meet(left, after=after)
            assert {record["TORCHELASTIC_RESTART_COUNT"] for record in records.values()} == {"0"}
            after = records[left[0]]["round"]
            leaver = left.pop(0)
            members.programs[leaver].signal(signal.SIGTERM)
            assert await members.programs[leaver].ended(PATIENCE) == 128 + signal.SIGTERM
            assert leaver in [
                line.fields["node_id"] for line in service.log() if line.event == "node departing"
            ]
            run = await service.run(RUN)
            assert leaver not in [node.node_id for node in run.nodes]
            assert run.last_round_end.cause == pb.ROUND_END_CAUSE_NODE_LEFT
            assert run.last_round_end.node_id == leaver


@pytest.mark.timeout(6 * PATIENCE)
async def test_members_follow_a_run_to_another_replica(tmp_path: Path) -> None:
    """The replica that owns the run is SIGKILLed: all members resume at the next owner, and no worker notices."""
    async with running_cluster(tmp_path) as cluster:
        await cluster.settled()
        owner = await cluster.owner(RUN)
        # The members know a replica that does not own the run: they reach the owner by its redirect only.
        known = next(name for name in REPLICAS if name != owner)
        nodes = (*CLIENTS, PYTHON)
        members = Members(tmp_path, cluster.replicas.endpoint(known), RUN, str(len(nodes)))
        try:
            members.start(*nodes)
            first = await members.meet(nodes)
            assert await cluster.owner(RUN) == owner
            await cluster.process(owner).kill()
            for language in CLIENTS:
                log = members.programs[language].log
                await log.first(f"{language} to resume", lambda line: "resumed: true" in line.text)
            await all_resume(cluster.replicas.endpoint(await cluster.owner(RUN, but=[owner])))
            assert await members.meet(nodes) == first, "a worker was restarted"
            members.finish()
            codes = await members.ended()
            assert set(codes.values()) == {0}, codes
        finally:
            await members.close()


async def test_members_with_certificates_meet(tmp_path: Path) -> None:
    """Mutual TLS, with the files of `rallypoint tls init`: all form a round, which goes on over a restart.

    A client without a certificate, and one that trusts another CA, are not admitted.
    """
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        assert rallypoint("tls", "init", folder, "127.0.0.1").returncode == 0

    def files(authority: Path) -> dict[str, str]:
        return {"ca": f"{authority}/ca.pem", "cert": f"{own}/client.pem", "key": f"{own}/client.key"}

    def flags(**files: str) -> list[str]:
        return [word for name, path in files.items() for word in (f"--tls-{name}", path)]

    nodes = (*CLIENTS, PYTHON)
    service = Service(
        tmp_path,
        "--tls-client-ca",
        f"{own}/ca.pem",
        *flags(cert=f"{own}/server.pem", key=f"{own}/server.key"),
    )
    members = Members(tmp_path, service.endpoint, RUN, str(len(nodes)), flags(**files(own)))
    strangers = [
        Members(tmp_path / name, service.endpoint, "of strangers", "1", tls)
        for name, tls in (("no-cert", flags(ca=f"{own}/ca.pem")), ("other-ca", flags(**files(other))))
    ]
    try:
        await service.start()
        for each, name in zip(strangers, ("no-cert", "other-ca"), strict=True):
            (tmp_path / name).mkdir()
            each.start(*CLIENTS)
        members.start(*nodes)
        first = await members.meet(nodes)
        watchers = [members.watch(language) for language in CLIENTS]
        await all_print(watchers, f"round {first[PYTHON]['round']}")
        await service.kill()
        await service.start()
        for language in CLIENTS:
            log = members.programs[language].log
            await log.first(f"{language} to resume", lambda line: "resumed: true" in line.text)
        assert await members.meet(nodes) == first, "a worker was restarted"
        members.finish()
        assert set((await members.ended()).values()) == {0}
        for program in [program for each in strangers for program in each.programs.values()]:
            await program.log.first("its trouble", lambda line: True)
            assert not [line.text for line in program.log.items if "lease" in line.text], program.command
    finally:
        for each in (members, *strangers):
            await each.close()
        await service.kill()


@pytest.mark.timeout(20 * PATIENCE)
@pytest.mark.parametrize("client", sorted(CLIENTS))
def test_a_client_keeps_the_rules_of_the_protocol(client: str) -> None:
    """The conformance kit checks them, over TLS."""
    command = (
        f"{shlex.join(CLIENTS[client])} member --tls-ca {{ca}} --rendezvous {{addresses}} --run {{run_id}} "
        "--node {node_id}"
    )
    kit = rallypoint(
        *("conformance", "--timeout", str(PATIENCE), "--client", f"{command} --nnodes 1:1 -- {{worker}}"),
        environment={"PATH": SEARCH_PATH},
        timeout=18 * PATIENCE,
    )
    assert kit.returncode == 0, kit.stdout
    # Optional are the report of a start, staying until the last worker of a closed run is gone, and a watchdog.
    optional = {"R51", "R54", "R58", *(rule for rule in RULES if "R60" <= rule <= "R72")}
    assert f"{len(RULES) - len(optional)} PASS, 0 FAIL, {len(optional)} SKIPPED" in kit.stdout
