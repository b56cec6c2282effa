"""An option has one meaning and one set of errors as a flag, in LaunchConfig and in a JobSpec."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any

import pytest

from rallypoint.agent.config.job import JobConfig
from rallypoint.agent.job.options import OPTIONS, OptionError, job_fields, parse_signal, split_commas
from rallypoint.agent.logs.streams import Redirect, Streams


@pytest.mark.parametrize(
    ("name", "value", "field", "meaning"),
    [
        ("role", "trainer", "role", "trainer"),
        ("topology", "", "topology", ""),
        ("log-dir", "logs", "log_dir", Path("logs")),
        ("log_dir", Path("logs"), "log_dir", Path("logs")),
        ("redirects", "3", "redirects", Redirect(Streams.BOTH)),
        ("tee", "1:2", "tee", Redirect(Streams.NONE, {1: Streams.STDERR})),
        ("tee", Redirect(Streams.BOTH), "tee", Redirect(Streams.BOTH)),
        ("local-ranks-filter", "0, 1", "local_ranks_filter", {0, 1}),
        ("local-ranks-filter", "", "local_ranks_filter", None),
        ("duplicate-stdout-filters", "a b,c,,d", "duplicate_stdout_filters", ("a b", "c,d")),
        ("duplicate-stderr-filters", ["a,b"], "duplicate_stderr_filters", ("a,b",)),
        ("log-line-prefix", "${rank}: ", "line_prefix", "${rank}: "),
        ("log-max-size", "4.5KiB", "log_max_bytes", 4608),
        ("log-max-size", "100 MB", "log_max_bytes", 10**8),
        ("log-max-size", "7000", "log_max_bytes", 7000),
        ("log-max-size", 7000, "log_max_bytes", 7000),
        ("log-max-size", "0", "log_max_bytes", None),
        ("log-keep-files", "1", "log_keep_files", 1),
        ("keep-attempts", "3", "keep_attempts", 3),
        ("failure-file", "/x/y.json", "failure_file", Path("/x/y.json")),
        ("event-log-handler", "console", "event_log", "console"),
        ("shutdown-timeout", "2.5", "shutdown_timeout", 2.5),
        ("shutdown-timeout", 0, "shutdown_timeout", 0.0),
        ("stop-signal", "SIGINT", "stop_signal", signal.SIGINT),
        ("stop-signal", "usr1", "stop_signal", signal.SIGUSR1),
        ("warn-signal", "10", "warn_signal", 10),
        ("warn-signal", signal.SIGUSR2, "warn_signal", signal.SIGUSR2),
        ("virtual-local-rank", "true", "virtual_local_rank", True),
        ("virtual-local-rank", "0", "virtual_local_rank", False),
        ("virtual-local-rank", True, "virtual_local_rank", True),
        ("master-addr", "head", "master_address", "head"),
        ("master-addr", "fd00::1", "master_address", "fd00::1"),
        ("master-port", "29500", "master_port", 29500),
        ("store", "rallypoint", "store", "rallypoint"),
        ("numa-binding", "core_complex", "numa_binding", "core-complex"),
        ("rlimit", "core=0,nofile=64:128", "rlimits", {"core": (0, 0), "nofile": (64, 128)}),
        ("rlimit", ["core=unlimited"], "rlimits", {"core": (-1, -1)}),
        ("health-check", "disk:2%,command:true b", "health_checks", ("disk:2%", "command:true b")),
        ("maintenance-command", "/opt/check --of 'a b'", "maintenance_command", ("/opt/check", "--of", "a b")),
        ("maintenance-command", ["/opt/check"], "maintenance_command", ("/opt/check",)),
        ("drain-timeout", "90", "drain_grace", 90.0),
        ("stall-after", "0", "stall_after", 0.0),
        ("require-watchdog", "true", "require_watchdog", True),
        ("watchdog-timeout", "2.5", "watchdog_timeout", 2.5),
    ],
)  # fmt: skip
def test_an_option_sets_a_field(name: str, value: Any, field: str, meaning: object) -> None:
    """The value may be text, or the value that the text means."""
    assert job_fields({name: value}, 2) == {field: meaning}


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("no-such", "1", "--no-such: there is no such option; known: drain-timeout, "),
        ("role", "", "--role: '' is empty"),
        ("role", b"a\xff".decode(errors="surrogateescape"), "--role: 'a\\udcff' is not valid UTF-8"),
        ("tee", "4", "--tee 4: '4' names no stream"),
        ("redirects", "2:1", "--redirects 2:1: there is no local rank 2; this host has 2 workers"),
        ("local-ranks-filter", "0,x", "has 'x', which is not a local rank"),
        ("local-ranks-filter", "2", "has 2, but this host has 2 workers, counted from 0"),
        ("log-max-size", "big", "'big' is not a size; expected bytes, or as in 100MB or 1GiB"),
        ("log-max-size", "-1", "'-1' is not a size"),
        ("log-max-size", "4095", "'4095' is too small for a log file; expected at least 4096 bytes, or 0"),
        ("log-keep-files", "0", "'0' would keep no rotated file; expected at least 1"),
        ("log-line-prefix", "${host} ", "there is no variable ${host}; there are ${role_name}"),
        ("log-keep-files", "few", "'few' is not a whole number from 0 to 1000000"),
        ("keep-attempts", "9999999", "is not a whole number"),
        ("shutdown-timeout", "soon", "--shutdown-timeout: 'soon' is not a number of seconds"),
        ("shutdown-timeout", "nan", "is out of range; expected 0 to"),
        ("health-timeout", "-1", "is out of range"),
        ("stop-signal", "SIGNAL", "'SIGNAL' is no signal; expected a name or number"),
        ("stop-signal", "99", "'99' is no signal"),
        ("stop-signal", "KILL", "can't be caught by a worker"),
        ("stop-signal", 0, "is no signal"),
        ("virtual-local-rank", "maybe", "'maybe' is neither true nor false"),
        ("master-addr", "", "--master-addr: '' is no name of a host and no address"),
        ("master-addr", "a b", "--master-addr: 'a b' is no name of a host and no address"),
        ("master-addr", "x." * 127, "is no name of a host and no address"),
        ("master-addr", "head:29500", "'head:29500' is no name of a host and no address"),
        ("master-addr", "unix:/run/x", "'unix:/run/x' is no name of a host and no address"),
        ("master-port", "0", "'0' is not a port; expected a number from 1 to 65535"),
        ("store", "redis", "'redis' is neither tcp nor rallypoint"),
        ("numa-binding", "chip", "'chip' is none of node, socket, exclusive, core-complex"),
        ("rlimit", "nofile", "--rlimit: 'nofile' is not a resource limit"),
        ("rlimit", {"nofile": (5, 4)}, "--rlimit: nofile=5:4: the soft limit must not be above the hard one"),
        ("rlimit", ["core=0", "nofile=9", "core=1"], "--rlimit: core is given 2 times; give it once"),
        ("event-log-handler", "scuba", "--event-log-handler: 'scuba' is none of"),
        ("health-check", ["disk:lots"], "--health-check: health check 'disk:lots': "),
        ("maintenance-command", "a 'b", "can't be read as a command (no closing quotation)"),
    ],
)
def test_an_invalid_option_is_reported_in_one_line(name: str, value: Any, told: str) -> None:
    """The error has the option, the value, and the expected form."""
    with pytest.raises(OptionError) as caught:
        job_fields({name: value}, 2)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_omitted_option_is_not_set() -> None:
    """The job's own default applies."""
    assert job_fields({"role": None, "tee": None}, 1) == {}


def test_every_option_is_a_field_of_a_job() -> None:
    """No two options have the same field."""
    fields = [option.field for option in OPTIONS.values()]
    assert len(set(fields)) == len(fields)
    assert set(fields) <= {field.name for field in dataclasses.fields(JobConfig)}


def test_errors_have_the_callers_names_of_options() -> None:
    """For example, the names in a JobSpec have no dashes."""
    with pytest.raises(OptionError, match=r"^options\[tee\] 9: "):
        job_fields({"tee": "9"}, 1, label=lambda name: f"options[{name}]")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ()),
        ("a", ("a",)),
        ("a,b", ("a", "b")),
        ("a,,b", ("a,b",)),
        ("a,,,b", ("a,", "b")),
        (",a,", ("a",)),
    ],
)
def test_two_commas_are_one_in_a_value(text: str, parts: tuple[str, ...]) -> None:
    """This is torchrun's rule for its filters."""
    assert split_commas(text) == parts


@pytest.mark.parametrize("text", ["SIGTERM", "term", " 15 "])
def test_a_signal_has_several_names(text: str) -> None:
    """They are the ones that `kill` accepts."""
    assert parse_signal(text) is signal.SIGTERM
