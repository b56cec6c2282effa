"""The environment of a worker: torchrun's variables, and ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from rallypoint.agent.config.job import JobConfig
from rallypoint.agent.core.core import Assignment
from rallypoint.rpc.endpoint import SettingError

# Variables with which the agent proves who it is; a worker has its own sockets.
_CREDENTIALS = re.compile(r"RALLYPOINT_(RUN_SECRET|TLS_|TOKEN|ETCD_PASSWORD)")


def worker_environment(
    config: JobConfig,
    assignment: Assignment,
    restart_count: int,
    local_rank: int,
    *,
    error_file: Path,
    sockets: Mapping[str, str],
) -> dict[str, str]:
    """Return the whole environment of one worker.

    Args:
        assignment: This node's rank assignment in the round.
        error_file: File for the worker's own error record.
        sockets: Variables with the addresses of the agent's sockets; `${local_rank}` in them is replaced.
    """
    environment = {
        **{name: value for name, value in config.environment.items() if not _CREDENTIALS.match(name)},
        "RANK": str(assignment.base_rank + local_rank),
        **_device_variables(config, local_rank),
        "GROUP_RANK": str(assignment.group_rank),
        "ROLE_RANK": str(assignment.base_role_rank + local_rank),
        "ROLE_NAME": config.role,
        "LOCAL_WORLD_SIZE": str(config.local_world_size),
        "WORLD_SIZE": str(assignment.world_size),
        "GROUP_WORLD_SIZE": str(assignment.group_world_size),
        "ROLE_WORLD_SIZE": str(assignment.role_world_size),
        "MASTER_ADDR": config.master_address or assignment.master_address,
        "MASTER_PORT": str(config.master_port or assignment.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(config.settings.max_restarts),
        "TORCHELASTIC_RUN_ID": config.run_id,
        # Rank 0 makes a new TCPStore at MASTER_PORT in every round; `sockets` has other values for the TCPStore port.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        "RALLYPOINT_RUN_ID": config.run_id,
        "RALLYPOINT_NODE": config.node_id,
        "RALLYPOINT_ROUND": str(assignment.round),
        "RALLYPOINT_FENCING_TOKEN": str(assignment.fencing_token),
        **{name: value.replace("${local_rank}", str(local_rank)) for name, value in sockets.items()},
    }
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    # If native code kills a Python program, only the program itself can log its Python stacks.
    environment.setdefault("PYTHONFAULTHANDLER", "1")
    if config.local_world_size > 1:
        # As torchrun: several workers with one thread per core each slow each other down.
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def _visible_devices(environment: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the variable that selects the job's GPUs, and its value: HIP_VISIBLE_DEVICES comes first, if it is set."""
    name = "HIP_VISIBLE_DEVICES" if environment.get("HIP_VISIBLE_DEVICES") else "CUDA_VISIBLE_DEVICES"
    return name, environment.get(name)


def check_devices(config: JobConfig) -> None:
    """Refuse a job with `--virtual-local-rank` in which a worker would have no GPU.

    Raises:
        SettingError: Fewer GPUs are visible than there are workers; one line.
    """
    name, visible = _visible_devices(config.environment)
    count = len(visible.split(",")) if visible else config.local_world_size
    if config.virtual_local_rank and count < config.local_world_size:
        raise SettingError(
            f"--virtual-local-rank: {name}={visible} names {count} device{'s' * (count != 1)} for "
            f"{config.local_world_size} workers; start fewer workers, or make more devices visible"
        )


def _device_variables(config: JobConfig, local_rank: int) -> dict[str, str]:
    """Return the local rank; with `--virtual-local-rank` it is 0, and the worker sees the GPU with that index alone."""
    if not config.virtual_local_rank:
        return {"LOCAL_RANK": str(local_rank)}
    name, visible = _visible_devices(config.environment)
    device = str(local_rank)
    if visible is not None:  # `check_devices` has refused too few
        device = visible.split(",")[local_rank].strip() if visible else ""
    # Torch reads CUDA_VISIBLE_DEVICES with AMD's GPUs too.
    return {"LOCAL_RANK": "0", **dict.fromkeys({"CUDA_VISIBLE_DEVICES", name}, device)}


def worker_command(config: JobConfig, local_rank: int) -> tuple[str, ...]:
    """Return program and arguments of one worker."""
    return tuple(argument.replace("${local_rank}", str(local_rank)) for argument in config.command)
