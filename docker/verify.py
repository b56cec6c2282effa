"""Build and test the images: the commands of docs/containers.md, the loss of a host, a stop, a restart.

Needs a running Docker daemon (docker/with-daemon finds or starts one) and Docker Compose, either version.
The names of all created objects contain this process's id; they are removed at the end, except the cache of
the builder and the base image. Exit code 0 if all checks passed, else 1 and the failed check.
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
_OURS = {
    "TAG": TAG,
    "BASE": BASE,
    "COMPOSE_PROJECT_NAME": f"rallypoint-{TAG}",
    "RALLYPOINT_RUN_SECRET": secrets.token_hex(32),
}
# The objects that the commands of docs/containers.md create, in the order in which they can be removed.
_BY_THE_PAGE = {
    "container": {f"rendezvous-{TAG}", f"timer-{TAG}"},
    "volume": {f"journal-{TAG}", f"tls-{TAG}"},
    "network": {f"job-{TAG}"},
}
LEAST_ACCURACY = 0.92
# Exit codes of a container that ended on SIGTERM, and of one that was killed after its grace period.
STOPPED, KILLED = 0, 137


class Failed(Exception):
    """A check failed. The message is one line."""


def run(
    *command: str, timeout: float = 60, merged: bool = False, variables: Mapping[str, str] | None = None
) -> str:
    """Return the standard output of a command (merged: and its stderr); raise Failed if it fails or is too slow."""
    environment = {**os.environ, **_OURS, **(variables or {})}
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
    """Return the output of a docker command."""
    return run("docker", *arguments, timeout=timeout)


def log_of(container: str, *options: str) -> str:
    """Return all output of a container: results are on its stdout, events on its stderr."""
    return run("docker", "logs", *options, container, merged=True)


def expect(holds: bool, what: str) -> None:
    """Raise Failed unless the condition holds."""
    if not holds:
        raise Failed(what)


# --- Compose --------------------------------------------------------------------------------------------


def compose_command() -> list[str]:
    """Return `docker compose` where that plug-in is installed, else `docker-compose`."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)  # noqa: S607
    if plugin.returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise Failed("no Docker Compose here: install its plug-in for docker, or the package docker-compose")


def compose(*arguments: str, timeout: float = 60, **variables: str) -> str:
    """Return the output of a compose command on this process's own project."""
    project = ("--file", "docker/compose.yaml")
    return run(*compose_command(), *project, *arguments, timeout=timeout, variables=variables)


def containers(service: str) -> list[str]:
    """Return the ids of a service's containers."""
    return compose("ps", "--quiet", service).split()


def state(container: str) -> dict[str, Any]:
    """Return the output of `docker inspect` for a container."""
    described: dict[str, Any] = json.loads(docker("inspect", container))[0]
    return described


@contextmanager
def lines_of(*command: str, timeout: float) -> Iterator[Iterator[str]]:
    """Yield the lines of a command's stdout and stderr until the context ends or `timeout` seconds are over."""
    bounded = ["timeout", str(timeout), *command]
    pipe, merged = subprocess.PIPE, subprocess.STDOUT
    environment = {**os.environ, **_OURS}
    with subprocess.Popen(
        bounded, cwd=ROOT, env=environment, stdout=pipe, stderr=merged, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            yield iter(process.stdout)
        finally:
            os.killpg(process.pid, signal.SIGTERM)


def await_line(container: str, holds: Callable[[str], bool], what: str, timeout: float) -> None:
    """Wait for a matching line in a container's log; raise Failed if the log ends or the time is over first."""
    with lines_of("docker", "logs", "--follow", container, timeout=timeout) as lines:
        expect(any(holds(line) for line in lines), f"no {what} within {timeout:g} s")


def await_healthy(container: str, since: float, timeout: float) -> None:
    """Wait until Docker reports a container healthy, at or after `since` (time.time()); else raise Failed."""
    filters = ("--filter", f"container={container}", "--filter", "event=health_status")
    command = ("docker", "events", "--since", f"{since:.3f}", *filters, "--format", "{{.Status}}")
    with lines_of(*command, timeout=timeout) as lines:
        healthy = any(line.strip() == "health_status: healthy" for line in lines)
        expect(healthy, f"{container} is not healthy within {timeout:g} s")


# --- The commands of docs/containers.md -----------------------------------------------------------------


def page(containing: str) -> str:
    """Return the block of commands that contains a text, with images and names replaced by this process's."""
    text = (ROOT / "docs" / "containers.md").read_text()
    blocks: list[str] = re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    (block,) = (each for each in blocks if containing in each)
    for pattern, replacement in (
        (r"^ *docker pull .*\n", ""),  # the base image exists
        (r"^ *docker/make-context +# once\n", ""),  # and so do the wheels
        (r"\bIMAGE\b", BASE),
        (rf"\brallypoint-(?:{'|'.join(ROLES)})\b", rf"\g<0>:{TAG}"),
        (r"--name (\w+)", rf"--name \1-{TAG} --network-alias \1"),
        (r"docker exec \w+|--internal \w+|--network \w+|-v journal", rf"\g<0>-{TAG}"),
        (r"/path/to/tls", f"tls-{TAG}"),
        (r"docker-compose", " ".join(compose_command())),
        (r" exec rendezvous ", " exec -T rendezvous "),  # no terminal
    ):
        block = re.sub(pattern, replacement, block, flags=re.MULTILINE)
    return block


def shell(commands: str, timeout: float) -> str:
    """Return the standard output of a block of commands; raise Failed if one fails, or all take too long."""
    return run("bash", "-euc", commands, timeout=timeout)


# --- The checks -----------------------------------------------------------------------------------------


def build() -> None:
    """Build the three images, from wheels that are downloaded first."""
    began = time.monotonic()
    shell(page("docker build "), timeout=900)
    say(f"images {time.monotonic() - began:.0f} s")
    for role in ROLES:
        say(f"rallypoint-{role}: {state(f'rallypoint-{role}:{TAG}')['Size'] / 1e6:.0f} MB")


def start_job(run_id: str, options: str = "") -> list[str]:
    """Start the digits job, and the services unless they run; return its agents' containers."""
    compose("up", "--detach", timeout=120, RUN_ID=run_id, TRAIN_OPTIONS=options)
    return containers("agent")


def await_success(run_id: str, agents: list[str], timeout: float) -> None:
    """Wait until all agents ended with code 0; check the accuracy and that the run succeeded."""
    codes = docker("wait", *agents, timeout=timeout).split()
    log = "".join(log_of(agent) for agent in agents)
    expect(set(codes) == {"0"}, f"{run_id}: the agents' exit codes are {codes}\n{log}")
    expect_good(re.findall(r"^held-out accuracy ([0-9.]+)$", log, re.MULTILINE), log)
    expect_succeeded(run_id)


def expect_good(accuracies: list[str], log: str) -> None:
    """Check that one worker printed an accuracy, and that it is sufficient."""
    expect(len(accuracies) == 1, f"{len(accuracies)} final lines of accuracy\n{log}")
    expect(float(accuracies[0]) >= LEAST_ACCURACY, f"accuracy {accuracies[0]} < {LEAST_ACCURACY}")
    say(f"held-out accuracy {accuracies[0]}")


def expect_succeeded(run_id: str) -> None:
    """Check that the rendezvous service reports the run as succeeded."""
    status = compose("exec", "-T", "rendezvous", "rallypoint", "status", run_id)
    say(status.splitlines()[0])
    expect(": CLOSED SUCCEEDED" in status, f"status of {run_id}: {status}")


def page_runs() -> None:
    """The services and a job succeed, each in a container that `docker run` starts."""
    results = shell(page("docker network create"), timeout=180)
    expect_good(re.findall(r"^held-out accuracy ([0-9.]+)$", results, re.MULTILINE), results)
    expect(": CLOSED SUCCEEDED" in results, f"status of my-run: {results}")


def page_runs_with_certificates() -> None:
    """The same journal, served with certificates: the container is healthy, and reports the run."""
    docker("rm", "--force", "--volumes", f"rendezvous-{TAG}")
    image, certificates = f"rallypoint-agent:{TAG}", f"tls-{TAG}:/tls"
    made = "rallypoint tls init /tls/made rendezvous && cd /tls/made && chown 10001 server.key"
    named = "mv server.pem ../cert.pem && mv server.key ../key.pem && mv ca.pem .."
    docker(
        "run", "--rm", "--user=0", "-v", certificates, "--entrypoint=sh", image, "-c", f"{made} && {named}"
    )
    since = time.time()
    shell(page("RALLYPOINT_TLS_CERT"), timeout=60)
    await_healthy(f"rendezvous-{TAG}", since, timeout=60)
    trusted = ("--env", "RALLYPOINT_TLS_CA=/tls/ca.pem")
    status = docker("exec", *trusted, f"rendezvous-{TAG}", "rallypoint", "status", "my-run")
    expect(": CLOSED SUCCEEDED" in status, f"status of my-run: {status}")


def page_runs_with_compose() -> None:
    """Two agents of two workers train to the end. `up` runs in one terminal, the other commands in another."""
    before, up, after = re.split(r"^(.* up .*\n)", page("docker/compose.yaml up"), flags=re.MULTILINE)
    began, output, ends = time.monotonic(), "", 0
    with lines_of("bash", "-euc", before + up, timeout=300) as lines:
        while ends < 2 and (line := next(lines, "")):
            output += line
            ends += re.search(r"agent.\d.* exited with code 0$", line) is not None
        expect(ends == 2, f"{ends} of 2 agents ended with exit code 0\n{output}")
        expect_good(re.findall(r"held-out accuracy ([0-9.]+)$", output, re.MULTILINE), output)
        say(f"digits: {time.monotonic() - began:.1f} s from `up` to the end")
        runs = shell(after, timeout=120)
        expect(re.search(r"^ digits +CLOSED", runs, re.MULTILINE) is not None, f"status: {runs}")


def lost_host_comes_back() -> None:
    """The agent with rank 0 is killed half-way; Docker restarts it, and the job resumes from its checkpoint."""
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
    """Wait for an agent's ranks; return True if they begin at 0."""
    found = []

    def tells(line: str) -> bool:
        found.extend(re.findall(r"starting workers .*\branks=(\d+)", line))
        return bool(found)

    await_line(agent, tells, "assignment of ranks", timeout=60)
    return found == ["0"]


def kill(container: str) -> None:
    """Send SIGKILL from a process, not with `docker kill`: after that, Docker would not restart the container."""
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
    """Return the time (as time.time()) of the first line with this text; raise Failed if there is none."""
    logs = [log_of(agent, "--timestamps").splitlines() for agent in agents]
    stamps = [line.split()[0] for log in logs for line in log if text in line]
    expect(bool(stamps), f"nobody printed {text!r}")
    # fromisoformat does not accept nanoseconds.
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
    """A new rendezvous container on the same volume reports the runs of the one before it."""
    compose("down")
    since = time.time()
    compose("up", "--detach", "rendezvous")
    await_healthy(containers("rendezvous")[0], since, timeout=60)
    expect_succeeded("killed")


# --- From start to end ----------------------------------------------------------------------------------


def say(line: str) -> None:
    """Print without buffering."""
    print(line, flush=True)  # noqa: T201


def remove_everything() -> None:
    """Remove the containers, networks, volumes and images of this process; raise Failed if any is left."""
    compose("down", "--volumes", "--remove-orphans", "--timeout", "10", timeout=120)
    for kind, names in _BY_THE_PAGE.items():
        for name in names & known(kind):
            docker(kind, "rm", *(("--force", "--volumes") if kind == "container" else ()), name)
    images = [image for role in ROLES if (image := f"rallypoint-{role}:{TAG}") in known_images()]
    if images:
        docker("image", "rm", *images)
    left = known_images() & {f"rallypoint-{role}:{TAG}" for role in ROLES}
    for kind, names in _BY_THE_PAGE.items():
        left |= names & known(kind)
        every = ("--all",) if kind == "container" else ()
        label = f"label=com.docker.compose.project=rallypoint-{TAG}"
        left |= set(docker(kind, "ls", *every, "--quiet", "--filter", label).split())
    expect(not left, f"left behind: {', '.join(sorted(left))}")


def known(kind: str) -> set[str]:
    """Return the names of all containers, volumes or networks of the daemon."""
    listed = ("--all", "--format", "{{.Names}}") if kind == "container" else ("--format", "{{.Name}}")
    return set(docker(kind, "ls", *listed).split())


def known_images() -> set[str]:
    """Return the names of all images of the daemon."""
    return set(docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").split())


def have_base() -> None:
    """Build the Debian base image if it is missing; any other base image must exist already."""
    if BASE == "rallypoint-base:bookworm" and BASE not in known_images():
        began = time.monotonic()
        run("make", "docker-base", timeout=900)
        say(f"base image {time.monotonic() - began:.0f} s")


def main() -> None:
    """Run all checks, in order; always clean up."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    checks = (
        build,
        page_runs,
        page_runs_with_certificates,
        page_runs_with_compose,
        lost_host_comes_back,
        services_stop_in_good_order,
        journal_outlives_its_container,
    )
    try:
        compose_command()  # before minutes are spent on the base image
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
