"""Command lines for both torchrun and `rallypoint run`: one for every flag, and some with several.

`{logs}`: a folder; `{port}`: a free port with a free one above it; `{folder}`: where the probe is, which is the
working directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PROBE = "torchrun_probe.py"


@dataclass(frozen=True)
class Case:
    """A command line.

    Attributes:
        name: The subject of the case.
        flags: Flags before the program.
        program: The program and its arguments.
        nodes: Further flags for each node, if there are several.
        environment: Variables in addition to the usual ones.
        stdin: Text on standard input; empty: there is none.
        terminal: True if all three streams are a terminal, and the text is typed.
        module: Torch's launcher, if it is not torchrun.
        here: Flags, program and arguments for Rallypoint, if they differ.
        since: The first version of torch whose torchrun has these flags.
    """

    name: str
    flags: tuple[str, ...] = ()
    program: tuple[str, ...] = (PROBE,)
    nodes: tuple[tuple[str, ...], ...] = ((),)
    environment: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""
    module: str = ""
    here: tuple[str, ...] = ()
    terminal: bool = False
    since: tuple[int, int] = (2, 13)


TWO = ("--nproc-per-node", "2")
LOGS = ("--log-dir", "{logs}")
AT_TERMINAL = {"PROBE_READ": "0", "TERM": "xterm"}

CASES = (
    Case("defaults"),
    Case("arguments", TWO, (PROBE, "--lr", "1", "-m", "shard=${local_rank}", "--", "")),
    Case("nodes and workers", ("--nnodes", "1:1", "--nproc-per-node=3")),
    Case("nproc-per-node cpu", ("--nproc-per-node", "cpu")),
    Case("nproc-per-node auto", ("--nproc-per-node", "auto")),
    Case("nproc-per-node gpu", ("--nproc-per-node", "gpu")),
    Case(
        "standalone with what it overrules", ("--standalone", "--rdzv-id", "mine", "--rdzv-backend", "c10d")
    ),
    Case("rdzv-id", ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:{port}", "--rdzv-id", "job-1")),
    Case("rdzv-endpoint with port 0", ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")),
    Case(
        "rdzv-conf",
        (
            *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:{port}"),
            "--rdzv-conf=is_host=1,join_timeout=60,last_call_timeout=1,close_timeout=5,heartbeat_timeout=5,"
            "keep_alive_interval=5,keep_alive_max_attempt=3,read_timeout=30,timeout=60,store_type=tcp",
        ),
    ),
    Case("max-restarts", ("--max-restarts", "1", *TWO), environment={"PROBE_END": "1:first"}),
    Case(
        "what watches",
        (
            *("--monitor-interval", "0.05", "--start-method", "fork", "--event-log-handler", "null"),
            *("--signals-to-handle", "SIGTERM,SIGUSR1", "--shutdown-timeout", "5", "--logs-specs", "default"),
        ),
    ),
    Case("module", ("-m",), (PROBE.removesuffix(".py"), "a")),
    Case("no-python", ("--no-python",), (f"./{PROBE}", "a")),
    Case("no-python beside module", ("--no-python", "-m"), ("a",)),
    Case("run-path", ("--run-path",), (f"{{folder}}/{PROBE}", "a"), environment={"PROBE_END": "0:raise"}),
    Case("redirects", (*LOGS, *TWO, "-r", "3")),
    Case("redirects by rank", (*LOGS, *TWO, "--redirects", "0:1,1:2")),
    Case("tee", (*LOGS, *TWO, "-t", "3", "--role", "trainer")),
    Case("tee by rank and redirects", (*LOGS, *TWO, "--tee", "0:1", "--redirects", "1:3")),
    Case("local-ranks-filter", (*LOGS, *TWO, "--tee=3", "--local-ranks-filter", "1")),
    Case("local-ranks-filter of plain output", (*TWO, "--local-ranks-filter", "1")),
    Case(
        "duplicate filters",
        (
            *(*LOGS, *TWO, "--tee=3", "--duplicate-stdout-filters", "0 app,none"),
            *("--duplicate-stderr-filters", "orange"),
        ),
    ),
    Case(
        "line prefix",
        ("--tee=3",),
        environment={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank} ${local_rank}>"},
    ),
    Case(
        "log-line-prefix-template",
        ("--tee=3", "--log-line-prefix-template", "<${hostname} ${role_name} ${rank}>"),
        environment={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<overruled>"},
        since=(2, 14),
    ),
    Case("static with one node", ("--master-addr", "localhost", "--master-port={port}", "--node-rank", "0")),
    Case("static with an endpoint", ("--rdzv-backend=static", "--rdzv-endpoint=127.0.0.1:{port}")),
    Case("local-addr", ("--local-addr", "localhost")),
    Case("numa-binding", ("--numa-binding", "node")),
    Case("virtual-local-rank", ("--virtual-local-rank", *TWO), environment={"CUDA_VISIBLE_DEVICES": "5,7"}),
    Case(
        "virtual-local-rank without enough devices",
        ("--virtual-local-rank", *TWO),
        environment={"CUDA_VISIBLE_DEVICES": "5"},
    ),
    Case("a pipe", environment={"PROBE_READ": "0"}, stdin="a line\nanother\n"),
    Case("a pipe for several", TWO, environment={"PROBE_READ": "0"}, stdin="a line\n"),
    Case("a terminal", environment=AT_TERMINAL, stdin="a line\n", terminal=True),
    Case("a terminal for several", TWO, environment=AT_TERMINAL, stdin="a line\n", terminal=True),
    Case(
        "variables for flags",
        environment={"PET_NPROC_PER_NODE": "2", "PET_ROLE": "r", "PET_TEE": "3", "PET_NO_PYTHON": "0"},
    ),
    Case(
        "flags before variables", ("--role", "flag"), environment={"PET_ROLE": "other", "PET_STANDALONE": "1"}
    ),
    Case("underscores and abbreviations", ("--nproc_per_node=2", "--max-r", "2", "--shutdown_timeout=9")),
    Case(
        "variables that stay",
        TWO,
        environment={
            "OMP_NUM_THREADS": "3",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "PYTHON_EXEC": "{python}",
        },
    ),
    Case("a worker that fails", (*LOGS, *TWO, "-r", "3"), environment={"PROBE_END": "1:exit:5"}),
    Case("a worker that is killed", environment={"PROBE_END": "0:signal:9"}),
    Case("a worker that is out of restarts", ("--max-restarts=1",), environment={"PROBE_END": "0:exit:3"}),
    Case(
        "a reply file of a worker that has recorded its exception",
        TWO,
        environment={"PROBE_END": "1:record", "TORCHELASTIC_ERROR_FILE": "{logs}/reply.json"},
    ),
    Case(
        "a reply file of a worker without a record",
        TWO,
        environment={"PROBE_END": "1:exit:5", "TORCHELASTIC_ERROR_FILE": "{logs}/reply.json"},
    ),
    Case("a reply file of a job that succeeds", environment={"TORCHELASTIC_ERROR_FILE": "{logs}/reply.json"}),
    Case(
        "variables that another launcher has set",
        TWO,
        environment={
            "RANK": "7",
            "LOCAL_RANK": "6",
            "WORLD_SIZE": "9",
            "LOCAL_WORLD_SIZE": "5",
            "NODE_RANK": "4",
            "GROUP_RANK": "3",
            "GROUP_WORLD_SIZE": "2",
            "ROLE_RANK": "8",
            "ROLE_WORLD_SIZE": "9",
            "ROLE_NAME": "other",
            "MASTER_ADDR": "elsewhere",
            "MASTER_PORT": "1",
            "TORCHELASTIC_RESTART_COUNT": "3",
            "TORCHELASTIC_MAX_RESTARTS": "4",
            "TORCHELASTIC_RUN_ID": "other",
            "TORCHELASTIC_USE_AGENT_STORE": "maybe",
        },
    ),
    Case(
        "exit_barrier_timeout, which torch's agent has and torchrun ignores",
        ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-conf=exit_barrier_timeout=20"),
    ),
    Case(
        "torch.distributed.launch",
        module="torch.distributed.launch",
        program=(PROBE, "a"),
        here=(PROBE, "--local-rank=${local_rank}", "a"),
    ),
    Case(
        "torch.distributed.launch with use-env",
        (*TWO, "--use-env"),
        module="torch.distributed.launch",
        program=(PROBE, "a"),
    ),
    Case("a script that is missing", program=("missing.py",)),
    Case("a flag that does not exist", ("--no-such-flag",)),
    Case("a value that makes no sense", ("--nnodes", "x")),
    Case(
        "two nodes of static",
        ("--nnodes=2", *TWO, "--master-addr=127.0.0.1", "--master-port={port}"),
        nodes=(("--node-rank=0",), ("--node-rank=1",)),
    ),
    Case(
        "two nodes of c10d",
        ("--nnodes=2", *TWO, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:{port}", "--rdzv-id=job-2"),
        nodes=((), ()),
    ),
)
