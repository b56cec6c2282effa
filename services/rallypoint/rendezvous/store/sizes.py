"""Sizes that the contract fixes (store_service.proto). All of them follow from what one message can carry."""

from __future__ import annotations

MAX_KEY_BYTES = 1024
# A gRPC message has 4 MiB by default; 16 KiB of them for the key, the names and the framing around a value.
MAX_VALUE_BYTES = 4 * 1024 * 1024 - 16 * 1024
# What several keys and values may have together, each pair counted with what frames it: three tags and three
# lengths take up to 13 bytes. Above the largest value with the longest key, so that one pair always fits; the
# 8 KiB that are left hold the names of the run, the node and the operation.
MAX_MULTI_BYTES = 4 * 1024 * 1024 - 8 * 1024
FRAME_BYTES = 16
MAX_KEYS = 10_000
# As many of the longest keys are 2 MiB: they fit into one answer.
MAX_PAGE_SIZE = 2_000
