"""Builds the images and puts them to work: the digits job to its end, a host that dies, a stop, a restart.

Needs a Docker daemon that answers (docker/with-daemon finds or starts one) and Docker Compose, either version.
Everything that it makes is named for this process and removed at the end; what stays is what the builder caches
and the base image. Exit code 0 if all held, else 1 and what did not.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BASE = os.environ.get("BASE", "rallypoint-base:bookworm")
TAG = f"verify-{os.getpid()}"
ROLES = ("rendezvous", "timer", "agent")
_SECRET = secrets.token_hex(32)
LEAST_ACCURACY = 0.92
# Exit codes of a container that took SIGTERM, and of one whose grace was over.
STOPPED, KILLED = 0, 137


class Failed(Exception):
    """Something did not hold. Its text is one line."""


def run(
    *command: str, timeout: float = 60, merged: bool = False, variables: Mapping[str, str] | None = None
) -> str:
    """What a command prints to its standard output, or, merged, to both; Failed when it fails or is too slow."""
    ours = {"TAG": TAG, "BASE": BASE, "RALLYPOINT_RUN_SECRET": _SECRET}
    environment = {**os.environ, **ours, **(variables or {})}
    pipe, errors = subprocess.PIPE, subprocess.STDOUT if merged else subprocess.PIPE
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            timeout=timeout,
            stdout=pipe,
            stderr=errors,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"{' '.join(command)}: not done within {timeout:g} s") from None
    if done.returncode != 0:
        raise Failed(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr or ''}")
    return done.stdout


def docker(*arguments: str, timeout: float = 60) -> str:
    """What a docker command prints."""
    return run("docker", *arguments, timeout=timeout)


def log_of(container: str, *options: str) -> str:
    """All that a container has printed: results on its standard output, events on the other."""
    return run("docker", "logs", *options, container, merged=True)


def expect(holds: bool, what: str) -> None:
    """Failed unless it holds."""
    if not holds:
        raise Failed(what)


# --- Compose --------------------------------------------------------------------------------------------


def compose_command() -> list[str]:
    """`docker compose` where that plug-in is installed, else `docker-compose`."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)  # noqa: S607
    if plugin.returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise Failed("no Docker Compose here: install its plug-in for docker, or the package docker-compose")


def compose(*arguments: str, timeout: float = 60, **variables: str) -> str:
    """What a compose command prints, of this process's own project."""
    project = ("--file", "docker/compose.yaml", "--project-name", f"rallypoint-{TAG}")
    return run(*compose_command(), *project, *arguments, timeout=timeout, variables=variables)


def containers(service: str) -> list[str]:
    """Ids of a service's containers."""
    return compose("ps", "--quiet", service).split()


def state(container: str) -> dict[str, Any]:
    """What Docker knows about a container."""
    described: dict[str, Any] = json.loads(docker("inspect", container))[0]
    return described


@contextmanager
def lines_of(*command: str, timeout: float) -> Iterator[Iterator[str]]:
    """What a command prints to either output, line by line, until the context ends or `timeout` seconds are over."""
    bounded = ["timeout", str(timeout), *command]
    pipe, merged = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(bounded, stdout=pipe, stderr=merged, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            yield iter(process.stdout)
        finally:
            os.killpg(process.pid, signal.SIGTERM)


def await_line(container: str, holds: Callable[[str], bool], what: str, timeout: float) -> None:
    """Returns once a line of a container's log says so; Failed when its log ends before, or in time."""
    with lines_of("docker", "logs", "--follow", container, timeout=timeout) as lines:
        expect(any(holds(line) for line in lines), f"no {what} within {timeout:g} s")


def await_healthy(service: str, since: float, timeout: float) -> None:
    """Returns once a service's container says that it is healthy, as of `since` (time.time()); else Failed."""
    container = containers(service)[0]
    filters = ("--filter", f"container={container}", "--filter", "event=health_status")
    command = ("docker", "events", "--since", f"{since:.3f}", *filters, "--format", "{{.Status}}")
    with lines_of(*command, timeout=timeout) as lines:
        healthy = any(line.strip() == "health_status: healthy" for line in lines)
        expect(healthy, f"{service} is not healthy within {timeout:g} s")


# --- What must hold -------------------------------------------------------------------------------------


def build() -> None:
    """The three images, from wheels that are downloaded first."""
    began = time.monotonic()
    run("docker/make-context", BASE, timeout=300)
    downloaded = time.monotonic()
    compose("build", timeout=600)
    say(f"wheels {downloaded - began:.0f} s, images {time.monotonic() - downloaded:.0f} s")
    for role in ROLES:
        say(f"rallypoint-{role}: {state(f'rallypoint-{role}:{TAG}')['Size'] / 1e6:.0f} MB")


def start_job(run_id: str, options: str = "") -> list[str]:
    """Starts the digits job, and what it needs unless it runs; returns its agents' containers."""
    compose("up", "--detach", timeout=120, RUN_ID=run_id, TRAIN_OPTIONS=options)
    return containers("agent")


def await_success(run_id: str, agents: list[str], timeout: float) -> None:
    """Returns once all agents ended well, the model is good, and the run is known to have succeeded."""
    codes = docker("wait", *agents, timeout=timeout).split()
    log = "".join(log_of(agent) for agent in agents)
    expect(set(codes) == {"0"}, f"{run_id}: the agents' exit codes are {codes}\n{log}")
    results = re.findall(r"^held-out accuracy ([0-9.]+)$", log, re.MULTILINE)
    expect(len(results) == 1, f"{run_id}: {len(results)} final lines of accuracy\n{log}")
    expect(float(results[0]) >= LEAST_ACCURACY, f"{run_id}: accuracy {results[0]} < {LEAST_ACCURACY}")
    say(f"{run_id}: held-out accuracy {results[0]}")
    expect_succeeded(run_id)


def expect_succeeded(run_id: str) -> None:
    """The rendezvous service knows that the run succeeded."""
    status = compose("exec", "-T", "rendezvous", "rallypoint", "status", run_id)
    say(status.splitlines()[0])
    expect(": CLOSED SUCCEEDED" in status, f"status of {run_id}: {status}")


def job_succeeds() -> None:
    """Two agents of two workers train to the end."""
    began = time.monotonic()
    agents = start_job("digits")
    expect(len(agents) == 2, f"{len(agents)} agents were started")
    await_success("digits", agents, timeout=180)
    say(f"digits: {time.monotonic() - began:.1f} s from `up` to the end")


def lost_host_comes_back() -> None:
    """The agent with rank 0 is killed half-way; Docker starts it again, and the job goes on from its checkpoint."""
    agents = start_job("killed", "--epoch-seconds 0.5")
    leader = next(agent for agent in agents if has_rank_0(agent))
    await_line(leader, lambda line: "epoch 8/" in line, "8th epoch", timeout=120)
    killed = time.time()
    kill(leader)
    others = [agent for agent in agents if agent != leader]
    # The others end when the run does. Only then has the killed one ended for good.
    docker("wait", *others, timeout=180)
    await_success("killed", agents, timeout=30)
    restarts = state(leader)["RestartCount"]
    expect(restarts == 1, f"the killed agent was started again {restarts} times")
    resumed = first_time_of(" resumed after epoch ", agents)
    say(f"killed: {resumed - killed:.1f} s from the kill to training again")


def has_rank_0(agent: str) -> bool:
    """Whether this agent got the first ranks, once it knows."""
    found = []

    def tells(line: str) -> bool:
        found.extend(re.findall(r'"starting workers".*"ranks": "(\d+)', line))
        return bool(found)

    await_line(agent, tells, "assignment of ranks", timeout=60)
    return found == ["0"]


def kill(container: str) -> None:
    """SIGKILL, as the kernel sends it: `docker kill` would count as a wish that the container stay down."""
    pid = state(container)["State"]["Pid"]
    program = f"import os; os.kill({pid}, 9)"
    one_shot = (
        "run",
        "--rm",
        "--network",
        "none",
        "--pid",
        "host",
        "--user",
        "0",
        "--entrypoint",
        "python3",
        BASE,
    )
    docker(*one_shot, "-c", program)


def first_time_of(text: str, agents: list[str]) -> float:
    """When a line with this text was first printed, as time.time(); Failed when it never was."""
    logs = [log_of(agent, "--timestamps").splitlines() for agent in agents]
    stamps = [line.split()[0] for log in logs for line in log if text in line]
    expect(bool(stamps), f"nobody printed {text!r}")
    # Nanoseconds are more than fromisoformat takes.
    return datetime.fromisoformat(f"{min(stamps)[:26]}+00:00").timestamp()


def services_stop_in_good_order() -> None:
    """Neither service runs as root; SIGTERM reaches it as process 1; it ends by itself, with exit code 0."""
    services = {service: containers(service)[0] for service in ("rendezvous", "timer")}
    for service, container in services.items():
        user = docker("exec", container, "id", "-u").strip()
        expect(user != "0", f"{service} runs as root")
    began = time.monotonic()
    compose("stop", *services)
    say(f"services stopped in {time.monotonic() - began:.1f} s")
    for service, container in services.items():
        code = state(container)["State"]["ExitCode"]
        expect(code == STOPPED, f"{service} {'had to be killed' if code == KILLED else f'ended with {code}'}")


def journal_outlives_its_container() -> None:
    """A rendezvous service made anew on the same volume knows the runs of the one before it."""
    compose("down")
    since = time.time()
    compose("up", "--detach", "rendezvous")
    await_healthy("rendezvous", since, timeout=60)
    expect_succeeded("digits")
    expect_succeeded("killed")


# --- From start to end ----------------------------------------------------------------------------------


def say(line: str) -> None:
    """Prints at once."""
    print(line, flush=True)  # noqa: T201


def remove_everything() -> None:
    """Containers, networks, volumes and images of this process; Failed if any stays."""
    compose("down", "--volumes", "--remove-orphans", "--timeout", "10", timeout=120)
    images = [image for role in ROLES if (image := f"rallypoint-{role}:{TAG}") in known_images()]
    if images:
        docker("image", "rm", *images)
    left = known_images() & {f"rallypoint-{role}:{TAG}" for role in ROLES}
    for kind in ("container", "volume", "network"):
        every = ("--all",) if kind == "container" else ()
        label = f"label=com.docker.compose.project=rallypoint-{TAG}"
        left |= set(docker(kind, "ls", *every, "--quiet", "--filter", label).split())
    expect(not left, f"left behind: {', '.join(sorted(left))}")


def known_images() -> set[str]:
    """Names of all images here."""
    return set(docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").split())


def have_base() -> None:
    """Makes Debian's base image where it is not there; another one has to be there."""
    if BASE == "rallypoint-base:bookworm" and BASE not in known_images():
        began = time.monotonic()
        run("make", "docker-base", timeout=900)
        say(f"base image {time.monotonic() - began:.0f} s")


def main() -> None:
    """Runs all checks, in order; cleans up whatever happens."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    checks = (
        build,
        job_succeeds,
        lost_host_comes_back,
        services_stop_in_good_order,
        journal_outlives_its_container,
    )
    try:
        have_base()
        try:
            for check in checks:
                say(f"== {check.__name__.replace('_', ' ')}")
                check()
        finally:
            remove_everything()
    except Failed as failure:
        sys.exit(f"docker-test: {failure}")
    say("docker-test: all of it held, and nothing is left behind")


if __name__ == "__main__":
    main()
