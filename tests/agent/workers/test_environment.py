"""A worker's environment: torchrun's variables under torchrun's names, and the environment of the agent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rallypoint.agent.config.job import JobConfig, Peer, new_node_id
from rallypoint.agent.core.core import Assignment
from rallypoint.agent.workers.environment import check_devices, worker_command, worker_environment
from rallypoint.rendezvous.v1.rendezvous_service_pb2 import RunSettings
from rallypoint.rpc.endpoint import SettingError

CONFIG = JobConfig(
    run_id="run-7",
    node_id="node-b",
    address="10.0.0.2",
    settings=RunSettings(min_nodes=1, max_nodes=4, max_restarts=3),
    command=("python", "train.py", "--shard=${local_rank}", "${local_rank}/${local_rank}"),
    environment={"PATH": "/bin", "RANK": "99"},
    rendezvous=Peer("10.0.0.9:29400"),
    timer=Peer("10.0.0.9:29410"),
    local_world_size=2,
    role="trainer",
)
SEAT = Assignment(
    round=5,
    group_rank=1,
    group_world_size=3,
    base_rank=4,
    world_size=8,
    base_role_rank=2,
    role_world_size=6,
    master_address="10.0.0.1",
    master_port=4242,
    fencing_token=17,
)


def environment(config: JobConfig = CONFIG, local_rank: int = 1) -> dict[str, str]:
    """Return the environment of one worker."""
    sockets = {
        "RALLYPOINT_STORE_SOCKET": "/run/agent/store",
        "TORCHELASTIC_TIMER_FILE": "/run/agent/torch.${local_rank}",
    }
    return worker_environment(
        config, SEAT, 2, local_rank, error_file=Path("/logs/1/error.json"), sockets=sockets
    )


def test_a_worker_sees_torchruns_variables_and_ours() -> None:
    """All of it: a missing or additional variable is a change of the interface."""
    assert environment() == {
        "PATH": "/bin",
        "PYTHONFAULTHANDLER": "1",
        "RANK": "5",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "ROLE_RANK": "3",
        "ROLE_NAME": "trainer",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "8",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4242",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "run-7",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": "/logs/1/error.json",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
        "RALLYPOINT_RUN_ID": "run-7",
        "RALLYPOINT_NODE": "node-b",
        "RALLYPOINT_ROUND": "5",
        "RALLYPOINT_FENCING_TOKEN": "17",
        "RALLYPOINT_STORE_SOCKET": "/run/agent/store",
        "TORCHELASTIC_TIMER_FILE": "/run/agent/torch.1",
    }


def test_variables_that_the_user_set_stay() -> None:
    """Some variables are defaults; the ranks are not."""
    chosen = {"OMP_NUM_THREADS": "8", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "PYTHONFAULTHANDLER": ""}
    seen = environment(replace(CONFIG, environment=chosen))
    assert {name: seen[name] for name in chosen} == chosen


def test_a_single_worker_may_use_all_threads() -> None:
    """As in torchrun: only several workers on one host hinder each other."""
    assert "OMP_NUM_THREADS" not in environment(replace(CONFIG, local_world_size=1), 0)


def test_a_fixed_master_is_the_master_of_every_round() -> None:
    """A user of --master-addr has opened that port, and no other."""
    seen = environment(replace(CONFIG, master_address="head", master_port=29500))
    assert (seen["MASTER_ADDR"], seen["MASTER_PORT"]) == ("head", "29500")


@pytest.mark.parametrize(
    ("visible", "devices"),
    [(None, ["0", "1"]), ("4,7", ["4", "7"]), (" 3 , GPU-8f ,5", ["3", "GPU-8f"]), ("", ["", ""])],
)
def test_a_virtual_local_rank_is_0_and_its_device_its_own(visible: str | None, devices: list[str]) -> None:
    """It is the one of the worker's real local rank among the visible devices; the global rank does not change."""
    hidden = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    config = replace(CONFIG, virtual_local_rank=True, environment=hidden)
    check_devices(config)
    seen = [environment(config, local_rank) for local_rank in (0, 1)]
    assert [each["LOCAL_RANK"] for each in seen] == ["0", "0"]
    assert [each["RANK"] for each in seen] == ["4", "5"]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == devices


@pytest.mark.parametrize(
    ("hip", "cuda", "devices"),
    [("4,7", "0,1", ["4", "7"]), ("", "5,6", ["5", "6"]), ("2,3", None, ["2", "3"])],
)
def test_hip_visible_devices_come_first(hip: str, cuda: str | None, devices: list[str]) -> None:
    """This is ROCm's own rule, and both are set: torch reads CUDA_VISIBLE_DEVICES there too."""
    hidden = {"HIP_VISIBLE_DEVICES": hip} | ({} if cuda is None else {"CUDA_VISIBLE_DEVICES": cuda})
    config = replace(CONFIG, virtual_local_rank=True, environment=hidden)
    check_devices(config)
    seen = [environment(config, local_rank) for local_rank in (0, 1)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == devices
    assert [each["HIP_VISIBLE_DEVICES"] for each in seen] == (devices if hip else ["", ""])


def test_too_few_devices_of_amd_are_refused_by_their_variable() -> None:
    """The value of CUDA_VISIBLE_DEVICES does not matter."""
    seen = {"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "0,1"}
    config = replace(CONFIG, virtual_local_rank=True, environment=seen)
    with pytest.raises(SettingError, match="HIP_VISIBLE_DEVICES=3 names 1 device for 2 workers"):
        check_devices(config)


def test_a_worker_without_a_device_of_its_own_is_refused() -> None:
    """It is refused before anything starts; with real local ranks the workers choose their own devices."""
    config = replace(CONFIG, environment={"CUDA_VISIBLE_DEVICES": "3"})
    check_devices(config)
    with pytest.raises(SettingError, match="CUDA_VISIBLE_DEVICES=3 names 1 device for 2 workers"):
        check_devices(replace(config, virtual_local_rank=True))


def test_the_local_rank_is_put_into_arguments() -> None:
    """It replaces each occurrence in every argument."""
    assert worker_command(CONFIG, 1) == ("python", "train.py", "--shard=1", "1/1")


def test_no_two_agents_get_the_same_name() -> None:
    """Several agents run on one host, and containers share process IDs."""
    assert len({new_node_id() for _ in range(100)}) == 100
