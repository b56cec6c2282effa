"""Each command of docs/migrate.md works as written on the page.

`head` is this machine, its ports are free ones, and a command for every host runs twice. Slurm's two commands are
stand-ins, which start their command on both hosts with Slurm's variables.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cli.cli_process import clean_environment
from support.ports import free_port
from support.processes import fresh_marker
from support.waiting import PATIENCE

pytestmark = [pytest.mark.torch, pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1200)]

PAGE = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
HOSTS = 2
WORLD = 4

# They exit without the interpreter's clean-up, in which torch 2.13 rarely aborts.
PROGRAMS = {
    "train.py": """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"summed over {int(total)} of {os.environ['WORLD_SIZE']}", flush=True)
dist.destroy_process_group()
os._exit(0)
""",
    "fit.py": """
import os
import lightning
import torch

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = lightning.Trainer(
    accelerator="cpu", devices=2, max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(24, 4), batch_size=4))
assert trainer.global_step == 3
print(f"summed over {trainer.world_size} of {os.environ['WORLD_SIZE']}", flush=True)
os._exit(0)
""",
    "accelerated.py": """
import os
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.randn(8, 4)).square().mean())
optimizer.step()
total = accelerator.reduce(torch.ones(1))
print(f"summed over {int(total)} of {os.environ['WORLD_SIZE']}", flush=True)
accelerator.end_training()
os._exit(0)
""",
    "srun": """#!/bin/sh
for node in 0 1; do SLURM_NODEID=$node SLURM_PROCID=$node "$@" & pids="$pids $!"; done
for pid in $pids; do wait "$pid" || exit; done
""",
    "scontrol": "#!/bin/sh\necho 127.0.0.1\n",
}


@pytest.fixture(scope="module", autouse=True)
def frameworks() -> None:
    """Skip without the frameworks; `make test-torch` has all of them."""
    for name in ("torch", "lightning", "accelerate"):
        pytest.importorskip(name)


def commands(section: str) -> list[str]:
    """Return the commands of a section's console blocks."""
    text = "".join(re.findall(r"^```console\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))
    assert all(line.startswith("$ ") for line in text.splitlines())
    return [line.removeprefix("$ ") for line in text.splitlines()]


class Shells:
    """The shells of one machine that replace each host, in one folder with the programs and the secret."""

    def __init__(self, folder: Path, marker: str, stack: ExitStack) -> None:
        """Write the programs, and create the secret with the page's command."""
        self.folder = folder
        self._stack = stack
        self._environment = clean_environment(
            MARKER=marker,
            PATH=f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            OMP_NUM_THREADS="1",
        )
        self._ports = {port: str(free_port()) for port in ("29400", "29500")}
        for name, text in PROGRAMS.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        made, exported = commands(PAGE.partition("\n## ")[0])
        assert self.start(made).wait(PATIENCE) == 0
        self._secret = f"{exported}\n"

    def start(self, command: str, **variables: str) -> subprocess.Popen[str]:
        """Run a command in a shell, with the page's names of hosts and ports replaced."""
        secret = getattr(self, "_secret", "")
        script = self.here(command)
        process = subprocess.Popen(
            ["bash", "-c", f"{secret}{script}"],
            cwd=self.folder,
            env=self._environment | {name: self.here(value) for name, value in variables.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        return process

    def here(self, text: str) -> str:
        """Return a text of the page with this machine's address and free ports."""
        text = re.sub(
            r"(?<!\$)(?<!\| )\bhead(?=[: ]|$)", "127.0.0.1", text
        )  # the host, not the variable or program
        return re.sub(r"\b29[45]00\b", lambda port: self._ports[port[0]], text)

    def serve(self, command: str) -> None:
        """Start a service, which runs to the end of the test."""
        self.start(command, RALLYPOINT_PORT="29400", RALLYPOINT_JOURNAL="memory")

    def launch(self, command: str, world: int, **variables: str) -> None:
        """Run a job to its end; check that all its workers met."""
        hosts = HOSTS if "# on every host" in command else 1
        started = [
            self.start(command, NODE_RANK=str(rank), **{**variables, "PET_NODE_RANK": str(rank)})
            for rank in range(hosts)
        ]
        printed = [process.communicate(timeout=5 * PATIENCE)[0] for process in started]
        assert [process.returncode for process in started] == [0] * hosts, "\n".join(printed)
        assert "".join(printed).count(f"summed over {world} of {world}") == world, "\n".join(printed)


@pytest.fixture
def shells(tmp_path: Path) -> Iterator[Shells]:
    """Shells that leave no process behind."""
    with fresh_marker() as marker, ExitStack() as stack:
        yield Shells(tmp_path, marker, stack)


# Two torchruns of an elastic job must start within the last call: the later one would end the job.
LAST_CALL = {"PET_RDZV_CONF": "last_call_timeout=15"}


@pytest.mark.parametrize(
    "title", [title for title in SECTIONS if re.match(r"\d|Lightning|Accelerate", title)]
)
def test_the_commands_of_a_section(shells: Shells, title: str) -> None:
    """The commands before and after the change are run."""
    for command in commands(SECTIONS[title]):
        if " serve " in command:
            shells.serve(command)
        else:
            elastic = LAST_CALL if "1:4" in command else {}
            shells.launch(command, WORLD if "every host" in command else WORLD // HOSTS, **elastic)


def test_the_batch_file(shells: Shells) -> None:
    """The one with `rallypoint run` works, and the one to go back to."""
    (batch,) = re.findall(r"^```sh\n(.*?)^```$", SECTIONS["Slurm"], re.MULTILINE | re.DOTALL)
    assert "srun rallypoint run" in batch
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "host-[1-2]", "SLURM_JOB_ID": "17"}
    for text in (batch, batch.replace("rallypoint run", "torchrun")):
        shells.launch(text, WORLD, **slurm)


FORMS = re.findall(r"^\| ([^|]+) \| `(PET_.*)` \|$", SECTIONS["Kubeflow"], re.MULTILINE)


@pytest.mark.parametrize(("form", "variables"), FORMS, ids=[form for form, _ in FORMS])
def test_kubeflows_variables(shells: Shells, form: str, variables: str) -> None:
    """All of their forms work."""
    pairs = dict(pair.split("=") for pair in shlex.split(variables))
    per_host = (
        os.cpu_count() or 1 if pairs["PET_NPROC_PER_NODE"] == "auto" else int(pairs["PET_NPROC_PER_NODE"])
    )
    elastic = LAST_CALL if "1:2" in variables else {}
    for command in commands(SECTIONS["Kubeflow"]):
        shells.launch(command, per_host * HOSTS, **pairs, **elastic)


def test_every_command_is_run() -> None:
    """One of the tests above runs it."""
    tested = {title for title in SECTIONS if re.match(r"\d|Lightning|Accelerate|Slurm|Kubeflow", title)}
    assert tested == SECTIONS.keys()
    assert len(FORMS) == 3
