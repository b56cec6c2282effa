"""NVML, NVIDIA's library that tells of GPUs: its Python binding, and a talk with the driver."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class GpuLibraryError(Exception):
    """The library that looks at GPUs is not there; one line."""


class NoDriverError(Exception):
    """No driver answers; why, in the library's words."""


def gpu_library() -> Any:
    """NVML's Python binding. It asks no driver yet: that may hang, where a GPU is sick.

    Raises:
        GpuLibraryError: It is not installed.
    """
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        raise GpuLibraryError(
            "the library that looks at GPUs is not installed; pip install nvidia-ml-py"
        ) from None


@contextmanager
def driver(nvml: Any) -> Iterator[None]:
    """A talk with the driver. Anew each time: what it found before it was loaded again says nothing.

    Args:
        nvml: The library.

    Raises:
        NoDriverError: There is none, or it does not answer.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoDriverError(str(error)) from None
    try:
        yield
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
