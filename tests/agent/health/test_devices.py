"""Accelerators are counted as the workers will see them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rallypoint.agent.health.gpu import count_gpus, count_xpus


def host(root: Path, *, nvidia: int = 0, amd: int = 0, intel: int = 0) -> Path:
    """Write the kernel's files for accelerators, and similar files of other devices."""
    files = {f"dev/nvidia{number}": "" for number in range(nvidia)}
    files |= {"dev/nvidiactl": "", "dev/nvidia-uvm": ""} if nvidia else {}
    for number in range(1 + amd):
        files[f"sys/class/kfd/kfd/topology/nodes/{number}/properties"] = (
            f"cpu_cores_count {8 * (number == 0)}\nsimd_count {256 * (number > 0)}\n"
        )
    for number in range(intel):
        files[f"sys/class/drm/renderD{128 + number}/device/vendor"] = "0x8086\n"
    files["sys/class/drm/renderD200/device/vendor"] = "0x10de\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("0,1", 2),
        ("3", 1),
        ("", 0),
        ("-1", 0),
        ("0,9,1", 1),
        ("1,1,2", 0),
        ("MIG-8f,MIG-9a", 1),
        ("GPU-8f,GPU-9a,GPU-01", 3),
        ("0, 2", 2),
    ],
)
def test_gpus_are_those_that_are_visible(tmp_path: Path, visible: str | None, count: int) -> None:
    """CUDA's rules apply to unknown names, duplicates, and MIG parts of a GPU."""
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(environment, host(tmp_path, nvidia=4)) == count


def test_amds_gpus_count_too(tmp_path: Path) -> None:
    """Their driver lists processors as well."""
    root = host(tmp_path, amd=3)
    assert count_gpus({}, root) == 3
    assert count_gpus({"HIP_VISIBLE_DEVICES": "0,2", "CUDA_VISIBLE_DEVICES": "0"}, root) == 2


def test_intels_are_counted_apart(tmp_path: Path) -> None:
    """Another flag requests them, and another variable hides them."""
    root = host(tmp_path, intel=2)
    assert (count_gpus({}, root), count_xpus({}, root)) == (0, 2)
    assert count_xpus({"ZE_AFFINITY_MASK": "1"}, root) == 1


def test_a_host_without_any_has_none(tmp_path: Path) -> None:
    """Other files in its folders don't count."""
    assert (count_gpus({"CUDA_VISIBLE_DEVICES": "0"}, host(tmp_path)), count_xpus({}, tmp_path)) == (0, 0)


def test_nvidias_library_is_used_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may have devices of GPUs that its driver doesn't give it."""
    calls: list[str] = []
    library = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: calls.append("init"),
        nvmlDeviceGetCount=lambda: 8,
        nvmlShutdown=lambda: calls.append("shutdown"),
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert count_gpus({}) == 8
    assert calls == ["init", "shutdown"]


def test_a_driver_that_fails_in_the_middle_is_no_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in its shutdown is ignored too."""

    def fail() -> None:
        raise RuntimeError("GPU is lost")

    library = SimpleNamespace(
        NVMLError=RuntimeError, nvmlInit=lambda: None, nvmlDeviceGetCount=fail, nvmlShutdown=fail
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0


def test_a_library_without_a_driver_is_no_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device files are counted instead; a shutdown without an init would raise."""

    def fail() -> None:
        raise RuntimeError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=RuntimeError, nvmlInit=fail))
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
