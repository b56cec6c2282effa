"""The comment of each field that a client sends names its limit, if a client can make the field grow."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

from hostile.contract import PROTOS
from rallypoint.rpc.durations import is_repeated

_DURATION = "google.protobuf.Duration"
_MESSAGE = re.compile(r"^message (\w+) \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"((?:^ +//.*\n)+) +(?:[\w.]+ )*(?:map<[^>]+> )?(\w+) = \d+;", re.MULTILINE)
# "256 bytes", "at most 1,000", "at most ten years", a field of ServerLimits in backquotes; or "no limit".
_LIMIT = re.compile(
    r"(?i)\d (bytes|days|printable)\b|\bat most (\d|an hour|ten years)|`[a-z_]+_(bytes|ttl)`"
    r"|\bany (text|number|length|of|but|as)\b"
)
_WITHOUT = {"page_token": "opaque: clients return what the server sent"}


def _inputs() -> Iterator[Any]:
    """Yield the input of each method of a public service."""
    for path in sorted(PROTOS.rglob("*_service.proto")):
        name = str(path.relative_to(PROTOS)).removesuffix(".proto").replace("/", ".")
        for service in importlib.import_module(f"{name}_pb2").DESCRIPTOR.services_by_name.values():
            yield from (method.input_type for method in service.methods)


def _reachable(message: Any, found: dict[str, Any]) -> None:
    """Add the message, and those in its fields, to `found`."""
    if message.full_name in found or message.file.package.startswith("google."):
        return
    found[message.full_name] = message
    for field in message.fields:
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            _reachable(field.message_type, found)


def test_each_field_that_can_grow_has_its_limit_in_its_comment() -> None:
    messages: dict[str, Any] = {}
    for message in _inputs():
        _reachable(message, messages)
    missing = []
    for full_name, message in sorted(messages.items()):
        body = dict(_MESSAGE.findall((PROTOS / message.file.name).read_text(encoding="utf-8"))).get(
            message.name, ""
        )
        comments = {name: comment for comment, name in _FIELD.findall(body)}
        for field in message.fields:
            duration = field.message_type is not None and field.message_type.full_name == _DURATION
            grows = duration or is_repeated(field) or field.type in (field.TYPE_STRING, field.TYPE_BYTES)
            comment = " ".join(comments[field.name].replace("//", " ").split())
            if grows and field.name not in _WITHOUT and not _LIMIT.search(comment):
                missing.append(f"{full_name}.{field.name}")
    assert len(messages) > 50, "the messages were not found"
    assert not missing
