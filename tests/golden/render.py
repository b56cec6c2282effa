"""Render the public surface of Rallypoint as text: help, tables, contract, metrics, exit codes, import paths.

The product is reached through its public entry points, and otherwise by searching its source for a class, so that
moving a module changes nothing here.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from golden.tables import tables
from house.source import ROOT, Module, product

_WIDTH = 80
_PUBLIC_PACKAGES = (
    "rallypoint.timer",
    "rallypoint.worker",
    "rallypoint.launcher",
    "rallypoint.torch.backend",
    "rallypoint.torch.handler",
    "rallypoint.torch.timer",
)
_RESULT_CLASS = "JobResult"
"""The class whose module defines the exit codes of a job."""


def render() -> dict[str, str]:
    """Return the text of each golden file by its path in `tests/golden`."""
    return {
        **{f"help/{name}.txt": text for name, text in helps().items()},
        **{f"tables/{name}.txt": text for name, text in tables().items()},
        "protos.txt": protos(),
        "metrics.txt": metrics(),
        "exit_codes.txt": exit_codes(),
        "public_imports.txt": public_imports(),
    }


# --- Help -----------------------------------------------------------------------------------------------


def helps() -> dict[str, str]:
    """Return the help of each command of each console script, by its words joined with `-`."""
    found: dict[str, str] = {}
    for name, command in sorted(_scripts().items()):
        for path, each, context in _commands(name, command, None):
            found["-".join(path)] = each.get_help(context).rstrip() + "\n"
    return found


def _scripts() -> dict[str, click.Command]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, click.Command] = {}
    for name, entry in project["scripts"].items():
        module, _, attribute = entry.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command), f"the script {name} is no click command"
        found[name] = command
    return found


def _commands(
    name: str, command: click.Command, parent: click.Context | None
) -> Iterator[tuple[tuple[str, ...], click.Command, click.Context]]:
    settings = {**command.context_settings, "terminal_width": _WIDTH, "max_content_width": _WIDTH}
    context = command.context_class(command, info_name=name, parent=parent, color=False, **settings)
    yield (name,), command, context
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            each = command.get_command(context, child)
            assert each is not None
            for path, found, below in _commands(child, each, context):
                yield (name, *path), found, below


# --- Contract -------------------------------------------------------------------------------------------

_LABELS = {
    FieldDescriptorProto.LABEL_OPTIONAL: "",
    FieldDescriptorProto.LABEL_REPEATED: "repeated ",
    FieldDescriptorProto.LABEL_REQUIRED: "required ",
}


def protos() -> str:
    """Return the content of the generated modules for each file in `protos/`, without comments."""
    lines: list[str] = []
    for path in sorted((ROOT / "protos").rglob("*.proto")):
        name = str(path.relative_to(ROOT / "protos"))
        descriptor = importlib.import_module(_generated(name)).DESCRIPTOR
        file = FileDescriptorProto.FromString(descriptor.serialized_pb)
        assert file.name == name, f"{_generated(name)} was made of {file.name}"
        lines += [f"file {name}", f"  package {file.package}; syntax {file.syntax}{_options(file)}"]
        lines += [f"  import {each}" for each in sorted(file.dependency)]
        for service in file.service:
            lines += _service(service)
        for message in file.message_type:
            lines += _message(message, "  ")
        for enum in file.enum_type:
            lines += _enum(enum, "  ")
        lines.append("")
    return "\n".join(lines)


def _generated(proto: str) -> str:
    return proto.removesuffix(".proto").replace("/", ".") + "_pb2"


def _options(element: Message) -> str:
    """Return the options of a file, message, field, enum, value or method, if it has any."""
    if not element.HasField("options"):
        return ""
    return f" [{text_format.MessageToString(element.options, as_one_line=True).strip()}]"  # type: ignore[attr-defined]


def _service(service: ServiceDescriptorProto) -> list[str]:
    lines = [f"  service {service.name}{_options(service)}"]
    for method in service.method:
        sent = ("stream " if method.client_streaming else "") + method.input_type.lstrip(".")
        received = ("stream " if method.server_streaming else "") + method.output_type.lstrip(".")
        lines.append(f"    rpc {method.name}({sent}) returns ({received}){_options(method)}")
    return lines


def _message(message: DescriptorProto, indent: str) -> list[str]:
    lines = [f"{indent}message {message.name}{_options(message)}"]
    lines += [
        f"{indent}  {_field(field, message)}" for field in sorted(message.field, key=lambda each: each.number)
    ]
    # The end of a reserved range of a message is exclusive.
    lines += [f"{indent}  reserved {each.start} to {each.end - 1}" for each in message.reserved_range]
    lines += [f'{indent}  reserved "{name}"' for name in message.reserved_name]
    for nested in message.nested_type:
        lines += _message(nested, indent + "  ")
    for enum in message.enum_type:
        lines += _enum(enum, indent + "  ")
    return lines


def _field(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    kind = field.type_name.lstrip(".") or FieldDescriptorProto.Type.Name(field.type)[len("TYPE_") :].lower()
    label = "optional " if field.proto3_optional else _LABELS[field.label]
    oneof = ""
    if field.HasField("oneof_index") and not field.proto3_optional:
        oneof = f" (oneof {message.oneof_decl[field.oneof_index].name})"
    return f"{field.number}: {label}{kind} {field.name}{oneof}{_options(field)}"


def _enum(enum: EnumDescriptorProto, indent: str) -> list[str]:
    lines = [f"{indent}enum {enum.name}{_options(enum)}"]
    lines += [f"{indent}  {value.number}: {value.name}{_options(value)}" for value in enum.value]
    # The end of a reserved range of an enum is inclusive.
    lines += [f"{indent}  reserved {each.start} to {each.end}" for each in enum.reserved_range]
    lines += [f'{indent}  reserved "{name}"' for name in enum.reserved_name]
    return lines


# --- Metrics --------------------------------------------------------------------------------------------


class RecordingRegistry(CollectorRegistry):
    """A registry that lists its collectors in the order of their registration."""

    def __init__(self) -> None:
        super().__init__()
        self.collectors: list[Collector] = []

    def register(self, collector: Collector) -> None:
        super().register(collector)
        self.collectors.append(collector)


def metrics() -> str:
    """Return name, type, labels, buckets and help of each metric that a process of Rallypoint may serve."""
    lines: list[str] = []
    for collector in sorted(registered().collectors, key=_metric_name):
        assert isinstance(collector, MetricWrapperBase)
        labels = collector._labelnames
        lines.append(f"{_metric_name(collector)} {collector._type}({', '.join(labels)})")
        # A metric with labels has samples once it has been used.
        (collector.labels(*labels) if labels else collector).collect()
        buckets = [
            sample.labels["le"]
            for family in collector.collect()
            for sample in family.samples
            if "le" in sample.labels
        ]
        if buckets:
            lines.append(f"  buckets {' '.join(buckets)}")
        lines.append(f"  {collector._documentation}")
    return "\n".join(lines) + "\n"


def registered() -> RecordingRegistry:
    """Return a registry with the metrics of each class that constructs some; it is their only argument."""
    registry = RecordingRegistry()
    for module, name in registrars():
        getattr(importlib.import_module(module.name), name)(registry)
    return registry


def registrars() -> list[tuple[Module, str]]:
    """Return the classes that construct metrics."""
    return [
        (module, node.name)
        for module in product()
        for node in module.tree.body
        if isinstance(node, ast.ClassDef) and list(metric_calls(module, node))
    ]


def metric_calls(module: Module, within: ast.AST | None = None) -> Iterator[ast.Call]:
    """Yield the calls of prometheus_client's metric classes in a module, or in a part of it."""
    names: set[str] = set()
    modules: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prometheus_client"):
            names.update(alias.asname or alias.name for alias in node.names if alias.name in _METRIC_CLASSES)
        elif isinstance(node, ast.Import):
            modules.update(
                alias.asname or alias.name
                for alias in node.names
                if alias.name.startswith("prometheus_client")
            )
    for node in ast.walk(within or module.tree):
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if function in names or (
                function.rpartition(".")[0] in modules and function.endswith(_METRIC_CLASSES)
            ):
                yield node


_METRIC_CLASSES = (
    "Counter",
    "Gauge",
    "Histogram",
    "Summary",
    "Info",
    "Enum",
    "CounterMetricFamily",
    "GaugeMetricFamily",
    "HistogramMetricFamily",
    "SummaryMetricFamily",
    "InfoMetricFamily",
    "StateSetMetricFamily",
    "UntypedMetricFamily",
    "UnknownMetricFamily",
    "Metric",
)


def _metric_name(collector: Any) -> str:
    """Return the metric's name in a scrape: that of a counter ends with `_total`."""
    name: str = collector._name
    return f"{name}_total" if collector._type == "counter" else name


# --- Exit codes -----------------------------------------------------------------------------------------


def exit_codes() -> str:
    """Return the exit codes of a job, with the advice to retry of each, and those of command lines with mistakes."""
    module = importlib.import_module(defining(_RESULT_CLASS).name)
    result = getattr(module, _RESULT_CLASS)
    constants = {
        name: value
        for name, value in vars(module).items()
        if name.isupper() and name[0] != "_" and type(value) is int and value < 256
    }
    lines = [f"{value:3} {name}" for name, value in sorted(constants.items(), key=lambda item: item[::-1])]
    lines.append("")
    first = 0
    for code in range(1, 257):
        advice = result(exit_code=first, detail="").retry
        if code == 256 or result(exit_code=code, detail="").retry != advice:
            lines.append(f"{first} to {code - 1}: retry {advice}")
            first = code
    lines.append("")
    for name, command in sorted(_scripts().items()):
        for arguments in (
            [],
            ["--help"],
            ["--version"],
            ["no-such-command"],
            ["run"],
            ["run", "--no-such-flag"],
        ):
            code = CliRunner().invoke(command, arguments, prog_name=name).exit_code
            lines.append(f"{code:3} {' '.join([name, *arguments])}")
    return "\n".join(lines) + "\n"


def defining(name: str) -> Module:
    """Return the one module of the product that defines a class of this name."""
    (found,) = (
        module
        for module in product()
        if any(isinstance(node, ast.ClassDef) and node.name == name for node in module.tree.body)
    )
    return found


# --- Public import paths --------------------------------------------------------------------------------


def public_imports() -> str:
    """Return the names that can be imported from the public modules, and the generated modules of the contract."""
    lines: list[str] = []
    for name in _public_modules():
        lines.append(name)
        lines += [f"  {each}" for each in public_names(name)]
    for path in sorted((ROOT / "protos").rglob("*.proto")):
        module = _generated(str(path.relative_to(ROOT / "protos")))
        lines.append(module)
        if find_spec(f"{module}_grpc") is not None:
            lines.append(f"{module}_grpc")
    return "\n".join(lines) + "\n"


def _public_modules() -> Iterator[str]:
    for name in _PUBLIC_PACKAGES:
        yield name
        if name == "rallypoint.worker":
            for path in importlib.import_module(name).__path__:
                yield from sorted(f"{name}.{each.name}" for each in pkgutil.iter_modules([path]))


def public_names(module: str) -> list[str]:
    """Return `__all__` of a module, or else its names without underscore that it or its package defines.

    The source is read, and the module is not imported: `rallypoint.torch.timer` needs torch.
    """
    spec = find_spec(module)
    assert spec is not None, f"there is no {module}"
    assert spec.origin is not None, f"{module} has no source"
    tree = ast.parse(Path(spec.origin).read_text())
    package = module.rpartition(".")[0]
    names: set[str] = set()
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return sorted(ast.literal_eval(value))
            case ast.Assign(targets=targets):
                names.update(target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.ImportFrom(module=str() as source, names=aliases) if source.startswith(package):
                names.update(alias.asname or alias.name for alias in aliases)
    return sorted(name for name in names if not name.startswith("_"))
