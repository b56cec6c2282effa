"""docs/grpcurl.md calls methods of the contract, with fields that they have, and both tools send the same.

tests/integration/test_grpcurl_page.py runs the commands against real services.
"""

from __future__ import annotations

import os
import subprocess
from argparse import ArgumentParser, Namespace

from google.protobuf import json_format, message_factory
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]

from rallypoint.agent.v1 import supervisor_service_pb2
from rallypoint.rendezvous.v1 import rendezvous_service_pb2, store_service_pb2
from rallypoint.server.v1 import server_service_pb2
from rallypoint.timer.v1 import timer_service_pb2
from support.console_page import TOOLS, Example, examples

METHODS = {
    f"{service.full_name}/{method.name}": method
    for module in (
        health_pb2,
        rendezvous_service_pb2,
        server_service_pb2,
        store_service_pb2,
        supervisor_service_pb2,
        timer_service_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}

# These replace the tools: each writes its arguments. The time is the same for both.
_STUBS = "".join(f"{tool}() {{ printf '%s\\0' {tool} \"$@\" >&2; }}\n" for tool in TOOLS)
_STUBS += "date() { echo 2026-11-25T06:30:29Z; }\n"


def arguments(example: Example) -> list[str]:
    """Return the arguments of the tool that a command calls."""
    command = example.command.partition(" | ")[0].replace(" 2>&1", "")
    result = subprocess.run(
        ["bash", "-c", f"{_STUBS}{example.before}{command}"],
        capture_output=True,
        text=True,
        check=True,
        env={"XDG_RUNTIME_DIR": "/run/user/7", "PATH": os.environ["PATH"]},
    )
    return result.stderr.split("\0")[:-1]


def options(dashes: str) -> ArgumentParser:
    """Return a parser of the options that both tools have."""
    parser = ArgumentParser()
    parser.add_argument("-d", dest="data", default="{}")
    parser.add_argument("-v", dest="verbose", action="store_true")
    parser.add_argument("-H", dest="header")
    for name in ("cacert", "cert", "key"):
        parser.add_argument(f"{dashes}{name}")
    return parser


def of_buf(arguments: list[str]) -> Namespace:
    """Return the request of a `buf` command, and its address."""
    parser = options("--")
    parser.add_argument("--protocol", required=True, choices=["grpc"])
    parser.add_argument("--http2-prior-knowledge", action="store_true")
    parser.add_argument("--unix-socket", dest="address")
    parser.add_argument("url")
    call = parser.parse_args(arguments)
    scheme, _, place = call.url.partition("://")
    host, _, call.method = place.partition("/")
    call.address = call.address or host
    assert (scheme == "http") == call.http2_prior_knowledge == (host == "localhost")
    del call.url, call.protocol, call.http2_prior_knowledge
    return call


def of_grpcurl(arguments: list[str]) -> Namespace:
    """Return the request of a `grpcurl` command, and its address."""
    parser = options("-")
    parser.add_argument("-plaintext", action="store_true")
    parser.add_argument("-unix", action="store_true")
    parser.add_argument("address")
    parser.add_argument("method")
    call = parser.parse_args(arguments)
    assert call.plaintext == call.unix == call.address.startswith("/")
    del call.plaintext, call.unix
    return call


def test_both_tools_send_the_same_requests_of_the_contract() -> None:
    pairs = [[arguments(example) for example in examples(tool)] for tool in TOOLS]
    calls = 0
    for buf, grpcurl in zip(*pairs, strict=True):
        if "list" in grpcurl:
            assert any(argument in ("--list-services", "--list-methods") for argument in buf)
            continue
        call = of_buf(buf[2:])
        assert call == of_grpcurl(grpcurl[1:])
        json_format.Parse(call.data, message_factory.GetMessageClass(METHODS[call.method].input_type)())
        calls += 1
    assert calls > 20
