"""Measure the shape of the code, and hold each figure to a limit.

A limit is the figure at the time it was written; lines are rounded up to the next hundred. Lower it when the figure
goes down. Raise it only with a reason in the commit.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from house.source import ROOT, Module, When, cycles, imports, product

_SMALL_FILE = 60  # lines
_SMALL_MODULE = 100  # lines, of a module with one importer
_MOST_CALLABLES = 2
_CLOCK = "Callable[[], float]"
_SHARED_BACKOFF = "rpc/backoff.py"
"""End of the path of the one module that may implement back-off."""


@dataclass(frozen=True)
class Figure:
    """A measured number.

    Attributes:
        value: The number.
        details: The files or names behind it, one a line.
    """

    value: float
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A figure with its limit.

    Attributes:
        name: The row's name in the table.
        measure: Computes the figure.
        before: The figure of commit 90f09aa7, the last one before the files were moved into folders of one idea each.
        limit: The test fails above it; below it if `at_least`.
        target: The figure to reach.
        at_least: True if higher is better.
    """

    name: str
    measure: Callable[[], Figure]
    before: float
    limit: float
    target: float
    at_least: bool = False

    def holds(self, value: float) -> bool:
        """Return True if a value is within the limit."""
        return value >= self.limit if self.at_least else value <= self.limit

    def is_loose(self, value: float) -> bool:
        """Return True if a value within the limit is more than a tenth away from it."""
        return self.limit < 0.9 * value if self.at_least else value < 0.9 * self.limit


def files() -> Figure:
    """Count the hand-written product files."""
    return Figure(len(product()), _per_folder(lambda _: 1))


def lines() -> Figure:
    """Count the product lines."""
    return Figure(sum(module.lines for module in product()), _per_folder(lambda module: module.lines))


def code_lines() -> Figure:
    """Count the product lines that are not blank, comment or docstring."""
    return Figure(
        sum(module.code_lines for module in product()), _per_folder(lambda module: module.code_lines)
    )


def median_file() -> Figure:
    """Return the median length of a file, without `__init__.py`."""
    return Figure(median(module.lines for module in _files()), small_files().details)


def small_files() -> Figure:
    """Count the files under 60 lines, without `__init__.py`."""
    return _listed(f"{module.shown}: {module.lines}" for module in _files() if module.lines < _SMALL_FILE)


def single_importers() -> Figure:
    """Count the modules under 100 lines that one other module imports."""
    importers = defaultdict(list)
    for importer, imported in imports():
        importers[imported].append(importer)
    return _listed(
        f"{module.shown}: {module.lines} lines, imported by {importers[module.name][0]}"
        for module in _files()
        if module.lines < _SMALL_MODULE and len(importers[module.name]) == 1
    )


def largest_folder() -> Figure:
    """Return the number of files in the largest folder, without `__init__.py`."""
    folders = Counter(module.folder for module in _files())
    return Figure(max(folders.values()), tuple(f"{name}: {count}" for name, count in folders.most_common(12)))


def folder_cycles() -> Figure:
    """Count the groups of folders that import one another, lazy and type-only imports included."""
    edges = _folder_edges()
    details: list[str] = []
    groups = cycles(edges)
    for group in groups:
        details.append(" <-> ".join(group))
        for (start, end), between in sorted(edges.items()):
            if start != end and {start, end} <= set(group):
                details.extend(f"    {each}" for each in sorted(between)[:5])
    return Figure(len(groups), tuple(details))


def folders_in_cycles() -> Figure:
    """Count the folders in such groups: a group that grows, or two that become one, are worse as well."""
    return _listed(folder for group in cycles(_folder_edges()) for folder in group)


def file_cycles() -> Figure:
    """Count the groups of files that import one another, lazy and type-only imports included."""
    return _listed(" <-> ".join(group) for group in cycles(imports()))


def files_in_cycles() -> Figure:
    """Count the files in such groups."""
    return _listed(name for group in cycles(imports()) for name in group)


def type_only_cycles() -> Figure:
    """Count the cycles of files that go away when `if TYPE_CHECKING` is ignored."""
    running = cycles(pair for pair, when in imports().items() if when is not When.NEVER)
    return _listed(" <-> ".join(group) for group in cycles(imports()) if group not in running)


def shared_class_names() -> Figure:
    """Count the class names that several modules define; a leading underscore does not make another name."""
    places: dict[str, set[str]] = defaultdict(set)
    for module in product():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].add(module.shown)
    return _listed(
        f"{name}: {', '.join(sorted(paths))}" for name, paths in sorted(places.items()) if len(paths) > 1
    )


def backoffs() -> Figure:
    """Count the delays that are multiplied and capped by hand.

    Counted are `delay = min(2 * delay, cap)` with any factor, `return min(2 * delay, cap)` with the factor 2, and
    `delay *= 2` in a loop that awaits or sleeps.
    """
    return _listed(
        f"{module.shown}:{node.lineno}: {ast.unparse(node)}"
        for module in product()
        if not module.shown.endswith(_SHARED_BACKOFF)
        for node in _growing(module.tree)
    )


def callback_constructors() -> Figure:
    """Count the constructors, written or of a dataclass, with more than 2 parameters of type `Callable`.

    `Callable[[], float]` is left out: clocks and random numbers are to be passed in.
    """
    found = []
    for module in product():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                names = [
                    name
                    for name, annotation in _parameters(node)
                    if "Callable" in _names(annotation) and ast.unparse(annotation) != _CLOCK
                ]
                if len(names) > _MOST_CALLABLES:
                    found.append(f"{module.shown}: {node.name}({', '.join(names)})")
    return _listed(found)


def dialect() -> Figure:
    """Return the number of dialect words per 1,000 words of comments, docstrings, proto comments and docs."""
    return _dialect(_prose())


def dialect_of_tests() -> Figure:
    """Return the same figure as `dialect`, of the comments and docstrings of tests, examples and docker/."""
    return _dialect((module.shown, module.prose) for module in _modules("tests", "examples", "docker"))


def _dialect(prose: Iterable[tuple[str, str]]) -> Figure:
    words = dialect_words()
    total = 0
    by_word: Counter[str] = Counter()
    by_file: Counter[str] = Counter()
    for name, text in prose:
        spoken = re.findall(r"[a-z]+", re.sub(r"`[^`\n]*`", "", text).lower())
        hits = [word for word in spoken if word in words]
        total += len(spoken)
        by_word.update(hits)
        by_file[name] += len(hits)
    details = [
        ", ".join(f"{word} {count}" for word, count in by_word.most_common()),
        *(f"{name}: {count}" for name, count in by_file.most_common(20) if count),
    ]
    return Figure(round(1000 * by_word.total() / max(1, total), 1), tuple(details))


def test_lines() -> Figure:
    """Count the lines of the tests."""
    folders: Counter[str] = Counter()
    for module in _modules("tests"):
        folders[str(module.path.parent.relative_to(ROOT))] += module.lines
    return Figure(folders.total(), tuple(f"{name}: {count}" for name, count in folders.most_common()))


RULES = (
    Rule("hand-written product files", files, 380, 303, 220),
    Rule("product lines", lines, 52_937, 63_720, 43_500),
    Rule("product code lines", code_lines, 34_408, 42_000, 28_500),
    Rule("median file, lines (at least)", median_file, 120, 218, 200, at_least=True),
    Rule("files under 60 lines", small_files, 78, 10, 12),
    Rule("modules with one importer and under 100 lines", single_importers, 50, 3, 10),
    Rule("largest folder, files", largest_folder, 87, 18, 18),
    Rule("cycles between folders", folder_cycles, 2, 0, 0),
    Rule("folders in cycles", folders_in_cycles, 6, 0, 0),
    Rule("cycles between files", file_cycles, 4, 0, 0),
    Rule("files in cycles", files_in_cycles, 8, 0, 0),
    Rule("cycles between files, for types only", type_only_cycles, 1, 0, 0),
    Rule("class names in several modules", shared_class_names, 59, 0, 15),
    Rule("hand-written back-off", backoffs, 17, 0, 0),
    Rule("constructors with more than 2 callables", callback_constructors, 8, 0, 0),
    Rule("dialect words per 1,000 words", dialect, 27.3, 0.1, 1),
    Rule("dialect of tests, examples and docker", dialect_of_tests, 38.3, 0, 1),
    Rule("test lines", test_lines, 95_746, 114_300, 70_000),
)


@cache
def dialect_words() -> frozenset[str]:
    """Read the list of dialect words."""
    listed = Path(__file__).with_name("dialect.txt").read_text().splitlines()
    return frozenset(line for line in listed if line and not line.startswith("#"))


def _files() -> list[Module]:
    return [module for module in product() if not module.is_package]


def _listed(details: Iterable[str]) -> Figure:
    listed = tuple(details)
    return Figure(len(listed), listed)


def _folder_edges() -> dict[tuple[str, str], list[str]]:
    """Return the imports between two folders, by (importing folder, imported folder)."""
    folder = {module.name: module.folder for module in product()}
    edges = defaultdict(list)
    for importer, imported in imports():
        edges[folder[importer], folder[imported]].append(f"{importer} -> {imported}")
    return edges


def _per_folder(measure: Callable[[Module], int]) -> tuple[str, ...]:
    folders: Counter[str] = Counter()
    for module in product():
        folders[module.folder] += measure(module)
    return tuple(f"{name}: {count}" for name, count in folders.most_common())


def _modules(*trees: str) -> list[Module]:
    return [Module("", path) for tree in trees for path in sorted((ROOT / tree).rglob("*.py"))]


def _prose() -> Iterator[tuple[str, str]]:
    """Yield path and prose of each file; code blocks of Markdown are left out."""
    for module in product():
        yield module.shown, module.prose
    for path in sorted((ROOT / "protos").rglob("*.proto")):
        comments = [line.partition("//")[2] for line in path.read_text().splitlines()]
        yield str(path.relative_to(ROOT)), "\n".join(comments)
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]):
        yield str(path.relative_to(ROOT)), re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)


def _growing(tree: ast.Module) -> Iterator[ast.stmt]:
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.While | ast.For | ast.AsyncFor)]
    seen = set()
    for loop in loops:
        inside = list(ast.walk(loop))
        if any(isinstance(node, ast.Await) or "sleep" in _names(node) for node in inside):
            for node in inside:
                if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult) and node not in seen:
                    seen.add(node)
                    yield node
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[target], value=value) if _is_product_of(value, ast.unparse(target)):
                yield node
            case ast.Return(value=ast.expr() as value) if _is_doubling(value):
                yield node


def _is_product_of(value: ast.expr, name: str) -> bool:
    """Return True if a `min(...)` has an argument that multiplies this name."""
    return any(name in map(ast.unparse, factors) for factors in _factors_in_min(value))


def _is_doubling(value: ast.expr) -> bool:
    """Return True if a `min(...)` has an argument that multiplies a variable by 2."""
    return any(
        any(ast.unparse(factor) in {"2", "2.0"} for factor in factors)
        and any(isinstance(factor, ast.Name | ast.Attribute) for factor in factors)
        for factors in _factors_in_min(value)
    )


def _factors_in_min(value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    for call in ast.walk(value):
        match call:
            case ast.Call(func=ast.Name(id="min"), args=arguments):
                for node in (node for argument in arguments for node in ast.walk(argument)):
                    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                        yield node.left, node.right


def _parameters(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """Yield name and annotation of each parameter of a constructor."""
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            arguments = statement.args
            for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
                if each.annotation is not None:
                    yield each.arg, each.annotation
            return
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                yield statement.target.id, statement.annotation


def _names(node: ast.AST) -> set[str]:
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
