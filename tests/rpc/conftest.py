"""The fixtures of `serving`: a tiny service, channels to it, certificates."""

from __future__ import annotations

from serving.conftest import certificates as certificates  # noqa: PLC0414 (a fixture)
from serving.conftest import connect as connect  # noqa: PLC0414
from serving.conftest import logging_restored as logging_restored  # noqa: PLC0414
from serving.conftest import other_certificates as other_certificates  # noqa: PLC0414
from serving.conftest import serve as serve  # noqa: PLC0414
