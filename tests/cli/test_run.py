"""`rallypoint run`: torchrun's flags under torchrun's names; a command that can't be carried out gets one line."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.cli_process import rallypoint, refusal
from rallypoint.agent.logs.streams import Redirect, Streams
from rallypoint.cli import run as run_module
from rallypoint.cli.main import main
from rallypoint.launcher.plan import Embedded, ExternalService, Hosted, LaunchPlan
from support.waiting import PATIENCE

SCRIPT = "print('hello')"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """An executable script."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    path.chmod(0o755)
    return path


class Understood:
    """Parses command lines and keeps the plan; nothing is run."""

    def __init__(self) -> None:
        self.plan: LaunchPlan | None = None
        self.log = ("", "")

    def take(self, plan: LaunchPlan, log_level: str, log_format: str) -> int:
        """Keep the plan instead of running it."""
        self.plan, self.log = plan, (log_level, log_format)
        return 0

    def of(self, *arguments: str | Path, environment: dict[str, str] | None = None) -> LaunchPlan:
        """Parse a command line; return its plan."""
        result = CliRunner(env=environment).invoke(main, ["run", *map(str, arguments)])
        assert result.exit_code == 0, result.stderr
        assert self.plan is not None
        return self.plan

    def command_of(self, *arguments: str | Path) -> list[str]:
        """Parse a command line; return the command of its workers."""
        return list(self.of(*arguments).command)


@pytest.fixture
def understood(monkeypatch: pytest.MonkeyPatch) -> Understood:
    """Keep jobs from being run."""
    understood = Understood()
    monkeypatch.setattr(run_module, "_run", understood.take)
    return understood


def test_the_defaults_are_torchruns(understood: Understood, script: Path) -> None:
    """One node, one worker, no restarts, torchrun's signals; all other values are the defaults of a job."""
    plan = understood.of(script)
    assert plan == LaunchPlan(
        command=(sys.executable, "-u", str(script)),
        environment=plan.environment,
        run_id=plan.run_id,
        service=Embedded(),
        nodes=(1, 1),
        local_world_size=1,
        max_restarts=0,
        signals=(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
        job={"master_address": None, "master_port": None, "input_rank": 0, "tty": True},
    )
    assert plan.run_id.startswith("standalone-")
    assert understood.log == ("info", "human")


def test_standalone_is_the_default_for_a_job_of_one_host(understood: Understood, script: Path) -> None:
    """torchrun's flag has the same meaning."""
    assert understood.of("--standalone", "--rdzv-id", "a", script) == understood.of("--rdzv-id", "a", script)


def test_flags_may_have_dashes_or_underscores(understood: Understood, script: Path) -> None:
    """torchrun takes both."""
    dashes = [
        "--nproc-per-node",
        "2",
        "--rdzv-conf=join_timeout=9",
        "--max-restarts=3",
        "--shutdown-timeout",
        "5",
        "--local-ranks-filter=1",
    ]
    underscores = [
        flag.replace("-", "_").replace("__", "--", 1) if flag[0] == "-" else flag for flag in dashes
    ]
    assert underscores[0] == "--nproc_per_node"
    first = understood.of("--standalone", "--rdzv-id", "a", *dashes, script)
    assert understood.of("--standalone", "--rdzv_id", "a", *underscores, script) == first
    assert (first.local_world_size, first.max_restarts, first.job["shutdown_timeout"]) == (2, 3, 5.0)
    assert first.job["local_ranks_filter"] == {1}
    assert first.conf == {"join_timeout": "9"}


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (["--nproc", "2"], ["--nproc-per-node", "2"]),
        (["--max_r=3"], ["--max-restarts=3"]),
        (["--stand"], ["--standalone"]),
        (["--virt"], ["--virtual-local-rank"]),
        # Our flags begin with the same letters: torchrun's users mean torchrun's.
        (["--node", "0"], ["--node-rank", "0"]),
        (["--log-d", "x"], ["--log-dir", "x"]),
        (["--keep", "2"], ["--keep-attempts", "2"]),
        (["-t=3", "-r=0:1"], ["--tee", "3", "--redirects", "0:1"]),
        (["-t3"], ["--tee=3"]),
    ],
)
def test_flags_may_be_abbreviated(
    understood: Understood, script: Path, short: list[str], long: list[str]
) -> None:
    """As with torchrun, an abbreviation must be unambiguous."""
    assert understood.of("--rdzv-id=a", *short, script) == understood.of("--rdzv-id=a", *long, script)


def test_the_environment_sets_flags_too(understood: Understood, script: Path) -> None:
    """PET_<NAME> as with torchrun; RALLYPOINT_<NAME> wins over it, and the flag over both."""
    torchrun = {
        "PET_NNODES": "2:4",
        "PET_NPROC_PER_NODE": "3",
        "PET_RDZV_ENDPOINT": "a:1",
        "PET_RDZV_ID": "x",
        "PET_NO_PYTHON": "1",
        "PET_STANDALONE": "0",
        "PET_TEE": "3",
        "PET_DUPLICATE_STDOUT_FILTERS": "a,b,,c",
    }
    plan = understood.of(script, environment=torchrun)
    assert (plan.nodes, plan.local_world_size) == ((2, 4), 3)
    assert (plan.service, plan.run_id) == (ExternalService("a:1"), "x")
    assert plan.command == (str(script),)
    assert plan.job["tee"] == Redirect(Streams.BOTH)
    assert plan.job["duplicate_stdout_filters"] == ("a", "b,c")
    both = torchrun | {"RALLYPOINT_NPROC_PER_NODE": "4"}
    assert understood.of(script, environment=both).local_world_size == 4
    assert understood.of("--nproc-per-node", "5", script, environment=both).local_world_size == 5


def test_torchs_own_variables_count(understood: Understood, script: Path) -> None:
    """They are those that torchrun reads beside PET_<NAME>."""
    torchs = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${rank}: "}
    job = understood.of(script, environment=torchs).job
    assert (job["shutdown_timeout"], job["line_prefix"]) == (7.0, "${rank}: ")


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        (["--log-line-prefix-template=a"], {}),
        (["--log_line_prefix_template=a"], {"PET_LOG_LINE_PREFIX_TEMPLATE": "b"}),
        (["--log-line-prefix=a"], {}),
        ([], {"PET_LOG_LINE_PREFIX_TEMPLATE": "a", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "b"}),
        ([], {"RALLYPOINT_LOG_LINE_PREFIX": "a"}),
    ],
)
def test_a_line_prefix_has_torchruns_name(
    understood: Understood, script: Path, flags: list[str], variables: dict[str, str]
) -> None:
    """The name is of torch 2.14; our shorter one abbreviates it. As in torchrun, the flag wins over its variable."""
    assert understood.of("--tee=3", *flags, script, environment=variables).job["line_prefix"] == "a"


def test_use_env_is_accepted(understood: Understood, script: Path) -> None:
    """It is a flag of torch.distributed.launch; workers always get their rank by environment."""
    assert understood.command_of("--standalone", "--use-env", script) == understood.command_of(
        "--standalone", script
    )


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_completion_script_is_printed(shell: str) -> None:
    """It is torchrun's flag of torch 2.14, which needs no program; the script is for our own command."""
    printed = CliRunner().invoke(main, ["run", "--print-completion", shell])
    assert printed.exit_code == 0
    assert printed.stdout == CliRunner().invoke(main, ["completion", shell]).stdout
    assert "_RALLYPOINT_COMPLETE" in printed.stdout


def test_a_flag_that_may_be_repeated_is_a_list(understood: Understood, script: Path) -> None:
    """In the environment, commas separate its values."""
    flags = ["--rlimit", "core=0", "--rlimit=nofile=64:128", "--health-check", "command:true b,c"]
    job = understood.of(*flags, script).job
    assert job["rlimits"] == {"core": (0, 0), "nofile": (64, 128)}
    assert job["health_checks"] == ("command:true b,c",)
    variables = {"RALLYPOINT_RLIMIT": "core=0,nofile=64:128", "RALLYPOINT_HEALTH_CHECK": "command:true b,,c"}
    assert understood.of(script, environment=variables).job == job


def test_arguments_after_the_program_are_the_programs(understood: Understood, script: Path) -> None:
    """That includes arguments that look like our flags."""
    like_ours = ["--nnodes", "x", "-m", "--", "--help"]
    assert understood.command_of("--standalone", script, *like_ours)[3:] == like_ours
    assert understood.command_of("--standalone", "--", script, "--epochs=3")[3:] == ["--epochs=3"]


def test_a_module_or_any_program_can_be_run(
    understood: Understood, monkeypatch: pytest.MonkeyPatch, script: Path
) -> None:
    """-m, --no-python, --run-path, and PYTHON_EXEC for the interpreter of the first."""
    here = [sys.executable, "-u", "-m", "package.train", "--lr", "1"]
    assert understood.command_of("-m", "package.train", "--lr", "1") == here
    assert understood.command_of("--no-python", "/bin/true", "a") == ["/bin/true", "a"]
    by_path = [sys.executable, "-u", "-m", "rallypoint.worker.run_path", str(script), "a"]
    assert understood.command_of("--no-python", "--run-path", script, "a") == by_path
    monkeypatch.setenv("PYTHON_EXEC", "/opt/python")
    assert understood.command_of("--module", "a") == ["/opt/python", "-u", "-m", "a"]
    assert understood.command_of("--run-path", script, "a") == by_path


def test_a_flag_without_a_meaning_is_reported(understood: Understood, script: Path) -> None:
    """One line reports it, and the job runs."""
    flags = ["--monitor-interval", "5", "--start-method=fork", "--master-addr=a", "--logs-specs", "default"]
    notices = understood.of(*flags, "--rdzv-conf", "heartbeat_timeout=3", script).notices
    assert sorted(notice.split(" has no meaning")[0] for notice in notices) == [
        "--master-addr",
        "--monitor-interval",
        "--rdzv-conf: heartbeat_timeout",
        "--start-method fork",
    ]
    assert not any("\n" in notice for notice in notices)
    assert understood.of("--start-method=spawn", script).notices == ()


def test_access_rules_without_a_network_service_are_reported(understood: Understood, script: Path) -> None:
    """A file that no server reads restricts no caller. An audit log is for Unix sockets too."""
    flags = ["--policy=p", "--token-keys=k", "--audit-log=a"]
    notices = understood.of(*flags, script).notices
    assert [notice.split(" has no effect")[0] for notice in notices] == ["--policy", "--token-keys"]
    assert understood.of(*flags, "--supervisor-address", "0.0.0.0:29420", script).notices == ()
    several = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=a:1", "--rdzv-id=x"]
    assert understood.of(*flags, *several, script).notices == ()


def test_a_flag_that_needs_another_is_reported(understood: Understood, script: Path) -> None:
    """A variable is not reported: one that is set for all jobs of a site is meant for those with the other flag."""
    notices = understood.of("--log-keep-files=3", "--log-line-prefix=x", script).notices
    assert [notice.split(":")[0] for notice in notices] == [
        "--log-line-prefix has no meaning without --tee",
        "--log-keep-files has no meaning without --log-max-size",
    ]
    assert understood.of("--log-keep-files=3", "--log-max-size=1MB", script).notices == ()
    assert understood.of("--log-line-prefix=x", "-t=0:1", script).notices == ()
    for variables in ({"RALLYPOINT_LOG_KEEP_FILES": "3"}, {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "x"}):
        assert understood.of(script, environment=variables).notices == ()


def test_a_setting_of_services_does_not_affect_a_job(understood: Understood, script: Path) -> None:
    """Images and sites set RALLYPOINT_DRAIN_GRACE, seconds that a server's open calls get, for all they run."""
    assert "drain_grace" not in understood.of(script, environment={"RALLYPOINT_DRAIN_GRACE": "3"}).job
    plan = understood.of(script, environment={"RALLYPOINT_DRAIN_TIMEOUT": "120"})
    assert plan.job["drain_grace"] == 120


def test_the_static_backend_names_this_host_by_its_rank(understood: Understood, script: Path) -> None:
    """It also fixes the address at which workers meet."""
    flags = ["--nnodes=2", "--node-rank=1", "--master-addr=head", "--master-port=29500"]
    plan = understood.of(*flags, script)
    assert plan.service == Hosted("head:29501", here=False)
    assert (plan.node_id, plan.node_id_is_ours) == ("rank1", True)
    assert (plan.job["master_address"], plan.job["master_port"]) == ("head", 29500)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--nnodes", "3:1"], r"'--nnodes': '3:1' has its maximum below its minimum; did you mean 1:3\?"),
        (["--nnodes", "x"], "'--nnodes': .*'x' is not a number of nodes; expected N or MIN:MAX"),
        (["--nproc-per-node", "0"], "'--nproc-per-node': .*'0' workers can't form a job; the least is 1"),
        (
            ["--standalone", "--nnodes", "2"],
            "--nnodes: --standalone runs on this host alone: leave --nnodes out",
        ),
        (["--rdzv-endpoint", "a:1"], "Give --rdzv-id NAME"),
        (["--nnodes=1:2", "--rdzv-id", "x"], "Give --rdzv-endpoint HOST:PORT"),
        (["--nnodes", "2", "--rdzv-id", "x"], "Give --rdzv-endpoint HOST:PORT"),
        (["--rdzv-backend", "etcd-v2"], "Give --rdzv-id NAME"),
        (["--rdzv-endpoint", "etcd://a:1/x?workers=1"], "has the parameter 'workers', expected one of"),
        (["--nnodes=1", "--rdzv-endpoint", "etcd://a/x?min_workers=2"], "contradicts --nnodes 1:1"),
        (
            ["--rdzv-backend", "zeus"],
            "'zeus' is not a backend; expected rallypoint, static, c10d, etcd, etcd-v2",
        ),
        (["--logs-specs", "mine"], "--logs-specs: 'mine' can't be used here"),
        (["--start-method", "thread"], "'thread' is none of spawn, fork, forkserver"),
        (["--signals-to-handle", "SIGX"], "'--signals-to-handle': .*'SIGX' is not a signal"),
        (["--redirects", "7"], "--redirects: 7: '7' names no stream; expected 0|--redirects 7: "),
        (["--tee", "3:1"], "--tee 3:1: there is no local rank 3"),
        (["--rlimit", "nofile"], "--rlimit: 'nofile' is not a resource limit"),
        (["--event-log-handler", "scuba"], "--event-log-handler: 'scuba' is none of null, console"),
        (["--rdzv", "x"], "--rdzv could be --rdzv-backend, --rdzv-endpoint, --rdzv-id or --rdzv-conf"),
        (["--health=x"], "--health could be --health-check or --health-timeout"),
        (
            ["--log-max", "1MB", "--d"],
            "--d could be --duplicate-stdout-filters or --duplicate-stderr-filters",
        ),
        (["--standalone", "--max-restarts", "-1"], "'--max-restarts': .*-1 is not in the range"),
        (["--standalone", "--max-restarts", "9999999999"], "'--max-restarts': .*is not in the range"),
        (["--standalone", "-m", "--no-python"], "--module and --no-python contradict each other"),
        (
            ["--standalone", "--shutdown-timeout", "soon"],
            "--shutdown-timeout: 'soon' is not a number of seconds",
        ),
        (["--standalone", "--redirct", "3"], "No such option '--redirct'.* '--redirects'"),
    ],
)
def test_a_wrong_flag_is_reported_in_one_line(
    understood: Understood, script: Path, arguments: list[str], told: str
) -> None:
    """The line has the mistake, its flag, and the expected form; the exit code is 2."""
    result = CliRunner().invoke(main, ["run", *arguments, str(script)])
    assert result.exit_code == 2
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)
    assert re.search(told, result.stderr)
    assert understood.plan is None


def test_a_wrong_variable_is_reported_by_its_name(understood: Understood, script: Path) -> None:
    """A user who looks only at the command line would not find it."""
    result = CliRunner(env={"PET_NNODES": "x"}).invoke(main, ["run", str(script)])
    assert "Invalid value for '--nnodes' (from PET_NNODES): 'x' is not a number" in result.stderr


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (
            "missing.py",
            "'missing.py' does not exist; expected a Python script (for a module use -m, for other programs",
        ),
        (".", "'.' is a folder"),
    ],
)
def test_a_missing_script_is_reported_in_one_line(understood: Understood, program: str, told: str) -> None:
    """The line comes before anything is started or joined, and names the flags that may be missing."""
    result = CliRunner().invoke(main, ["run", "--standalone", program])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert told in result.stderr


def test_a_program_that_can_not_run_is_reported_before_anything_starts(
    understood: Understood, tmp_path: Path
) -> None:
    """A restart would not correct it; a name that depends on the worker is checked by the worker."""
    blank = tmp_path / "blank"
    blank.touch()
    for program, told in (
        ("no-such-program", "'no-such-program' is not a program in PATH"),
        ("/no/such/program", "'/no/such/program' does not exist"),
        (str(blank), "is not executable; chmod +x it"),
    ):
        result = CliRunner().invoke(main, ["run", "--no-python", program])
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert told in result.stderr
    assert understood.command_of("--no-python", "./train-${local_rank}") == ["./train-${local_rank}"]


def test_the_help_has_sections(understood: Understood) -> None:
    """Every flag is in a section, except those that all commands have."""
    told = CliRunner().invoke(main, ["run", "--help"]).stdout
    sections = re.findall(r"^(\w+):$", told, re.MULTILINE)
    assert sections == ["Job", "Rendezvous", "Workers", "Logs", "Supervision", "Security", "Other"]
    other = told[told.index("\nOther:") :]
    assert re.findall(r"^  (-[a-zA-Z-]+)", other, re.MULTILINE) == ["-h"]
    assert "[default: 30]" in told
    assert "PROGRAM" not in other


# --- In their own processes ---------------------------------------------------------------------------------


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which no process listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_an_unreachable_endpoint_is_reported_after_its_timeout(script: Path, nobody: str) -> None:
    """The line has the address, the time, the reason, and the things to check."""
    told = refusal(
        rallypoint(
            *["run", "--rdzv-endpoint", nobody, "--rdzv-id", "x", "--rdzv-conf", "read_timeout=5"],
            *["--log-level", "error", str(script)],
        )
    )
    assert told.startswith(f"no rendezvous service answered at {nobody} within 5 s: ")
    assert "Connection refused" in told
    assert told.endswith("check that it is running and that --rdzv-endpoint is right")


def test_stdout_has_only_the_output_of_the_workers(tmp_path: Path) -> None:
    """Logs go to stderr. Workers inherit the environment unchanged: the agent's gRPC settings are not passed on."""
    script = tmp_path / "show.py"
    script.write_text(
        "import os; print(os.environ.get('MARK'), [k for k in os.environ if k.startswith('GRPC_')])"
    )
    arguments = ["run", "--standalone", "--nproc_per_node=2", "--log-format", "json", str(script)]
    result = rallypoint(*arguments, environment={"MARK": "yes"})
    assert (result.returncode, result.stdout) == (0, "yes []\n" * 2)
    assert all(line.startswith("{") for line in result.stderr.splitlines())


def test_logs_are_for_people_also_in_a_file(tmp_path: Path) -> None:
    """Short local time, one line per event, in a pipe as well; the report follows."""
    script = tmp_path / "fail.py"
    script.write_text("raise ValueError('bad')")
    result = rallypoint("run", "--standalone", script, environment={"TZ": "XYZ-5:45"})
    lines = result.stderr.splitlines()
    now = datetime.now(UTC) + timedelta(hours=5, minutes=45)
    began = datetime.strptime(lines[0][:8], "%H:%M:%S").replace(tzinfo=UTC)
    assert (now.replace(year=1900, month=1, day=1) - began) % timedelta(days=1) < timedelta(seconds=PATIENCE)
    report = lines.index("The failure that ended the run:")
    # The lines before the report include the worker's own traceback.
    log = [line for line in lines[:report] if re.match(r"\d\d:\d\d:\d\d ", line)]
    assert any(re.fullmatch(r"\S+ joined lease=\d+ min_nodes=1 max_nodes=1", line) for line in log)
    assert any(line.endswith("reason='ValueError: bad'") and " error worker failed " in line for line in log)
    assert " error job failed " in lines[-1]


def test_with_json_the_report_is_json_too(tmp_path: Path) -> None:
    """All output of the agent is JSON; the worker's own lines are in files here."""
    script = tmp_path / "fail.py"
    script.write_text("raise ValueError('bad')")
    json_log: list[str | Path] = ["run", "--standalone", "--log-format", "json", "--redirects", "3"]
    result = rallypoint(*json_log, script)
    last = [json.loads(line) for line in result.stderr.splitlines()][-1]
    assert (last["event"], last["exit_code"]) == ("job failed", 1)
    assert last["report"].startswith("The failure that ended the run:\n  rank       0")
    assert "  reason     ValueError: bad\n" in last["report"]
    for refused in (
        [*json_log, tmp_path / "missing.py"],
        [*json_log, "--max-restarts", "0", "--nnodes", "2", script],
    ):
        result = rallypoint(*refused)
        [line] = map(json.loads, result.stderr.splitlines())
        assert (result.returncode, line["level"], line["exit_code"]) == (2, "error", 2)
        assert line["report"]
