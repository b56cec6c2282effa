"""Read the hand-written files of the product: their modules, lines, imports and prose."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
TREES = (ROOT / "services", ROOT / "agent")

_GENERATED = ("_pb2.py", "_pb2_grpc.py")
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class When(Enum):
    """The time at which an import is executed."""

    LOADING = "while the module is loaded"
    LATER = "inside a function"
    NEVER = "for types only"


@dataclass(frozen=True)
class Module:
    """One hand-written Python file.

    Attributes:
        name: Dotted name; that of the package for an `__init__.py`.
        path: Path of the file.
    """

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        """The source."""
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed source."""
        return ast.parse(self.text)

    @property
    def shown(self) -> str:
        """The path from the root of the repository."""
        return str(self.path.relative_to(ROOT))

    @property
    def is_package(self) -> bool:
        """True if the file is an `__init__.py`."""
        return self.path.name == "__init__.py"

    @property
    def folder(self) -> str:
        """Dotted name of the package that holds the file."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @cached_property
    def lines(self) -> int:
        """Number of lines."""
        return len(self.text.splitlines())

    @cached_property
    def code_lines(self) -> int:
        """Number of lines that are not blank, not a comment and not part of a docstring."""
        code: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _NO_CODE:
                code.update(range(token.start[0], token.end[0] + 1))
        for string in _docstrings(self.tree):
            code.difference_update(range(string.lineno, (string.end_lineno or string.lineno) + 1))
        return len(code)

    @cached_property
    def prose(self) -> str:
        """The comments and docstrings."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        comments = [token.string.lstrip("#") for token in tokens if token.type == tokenize.COMMENT]
        return "\n".join([*comments, *(str(string.value) for string in _docstrings(self.tree))])


@cache
def product() -> tuple[Module, ...]:
    """Return the hand-written modules of services and agent, by path."""
    return tuple(
        Module(".".join(part for part in parts if part != "__init__"), path)
        for tree in TREES
        for path in sorted(tree.rglob("*.py"))
        if not path.name.endswith(_GENERATED)
        for parts in [path.relative_to(tree).with_suffix("").parts]
    )


@cache
def imports() -> dict[tuple[str, str], When]:
    """Return when each module of the product first imports each other one, by (importer, imported)."""
    known = {module.name for module in product()}
    found: dict[tuple[str, str], When] = {}
    order = list(When)
    for module in product():
        for name, when in _imports(module.tree, When.LOADING):
            target = name if name in known else name.rpartition(".")[0]
            if target not in known or target == module.name:
                continue
            pair = (module.name, target)
            found[pair] = min(when, found.get(pair, When.NEVER), key=order.index)
    return found


def cycles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return groups of nodes that reach one another, each sorted."""
    after: dict[str, set[str]] = {}
    for source, target in edges:
        if source != target:
            after.setdefault(source, set()).add(target)
    reached = {node: _reach(node, after) for node in after}
    groups = {
        tuple(sorted(other for other in reached[node] if node in reached.get(other, ())))
        for node in after
        if node in reached[node]
    }
    return sorted(list(group) for group in groups)


def _reach(start: str, after: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for node in after.get(waiting.pop(), ()):
            if node not in seen:
                seen.add(node)
                waiting.append(node)
    return seen


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield strings that are statements: docstrings, and those below an attribute or a constant."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str()) as string):
                yield string


def _imports(node: ast.AST, when: When) -> Iterator[tuple[str, When]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, when
    elif isinstance(node, ast.ImportFrom):
        assert node.module is not None, "imports are absolute here"
        assert not node.level, "imports are absolute here"
        for alias in node.names:
            yield f"{node.module}.{alias.name}", when
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for statement in node.body:
            yield from _imports(statement, When.NEVER)
        for statement in node.orelse:
            yield from _imports(statement, when)
    else:
        inside = when
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and when is When.LOADING:
            inside = When.LATER
        for child in ast.iter_child_nodes(node):
            yield from _imports(child, inside)
