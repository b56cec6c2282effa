"""No figure of the code's shape gets worse than its limit, and the counters count."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from house import figures
from house.figures import RULES, Rule, dialect_words
from house.source import Module, When, cycles, imports


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_figure_is_within_its_limit(rule: Rule) -> None:
    """To make it pass, correct the listed files; raise a limit only with a reason in the commit."""
    figure = rule.measure()
    if not rule.holds(figure.value):
        first = f"{rule.name}: {figure.value:g}, and the limit in tests/house/figures.py is {rule.limit:g}. Behind it:"
        pytest.fail("\n".join([first, *figure.details]), pytrace=False)


def _module(tmp_path: Path, text: str) -> Module:
    path = tmp_path / "module.py"
    path.write_text(text)
    return Module("rallypoint.module", path)


def test_lines_of_code_are_counted_without_comments_and_docstrings(tmp_path: Path) -> None:
    module = _module(
        tmp_path, '"""First.\n\nMore.\n"""\n\n# A comment.\nx = """a\n\nb"""  # four\n"""Of x."""\n'
    )
    assert (module.lines, module.code_lines) == (10, 3)
    assert module.prose.split() == ["A", "comment.", "four", "First.", "More.", "Of", "x."]


def test_cycles_are_groups_that_reach_one_another() -> None:
    edges = [("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("d", "e"), ("e", "d"), ("f", "f"), ("e", "g")]
    assert cycles(edges) == [["a", "b", "c"], ["d", "e"]]


def test_an_import_counts_as_early_as_it_is_executed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Imports inside functions and for types only are found too."""
    texts = {
        "x.one": "import x.two\n\ndef f():\n    import x.two, x.three\n",
        "x.two": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from x.one import f\n",
        "x.three": "from x import two\n",
    }
    modules = []
    for name, text in texts.items():
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        modules.append(Module(name, path))
    monkeypatch.setattr("house.source.product", lambda: tuple(modules))
    assert imports.__wrapped__() == {
        ("x.one", "x.two"): When.LOADING,
        ("x.one", "x.three"): When.LATER,
        ("x.two", "x.one"): When.NEVER,
        ("x.three", "x.two"): When.LOADING,
    }


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("pause = min(2 * pause, LONGEST)", 1),
        ("self.pause = min(max(self.pause * 1.5, 0.1), LONGEST)", 1),
        ("def f(pause):\n    return min(2 * pause, LONGEST)", 1),
        ("async def f():\n    while True:\n        await sleep(x)\n        x *= 2", 1),
        ("size = min(2 * count, LONGEST)", 0),
        ("while x < 9:\n    x *= 2", 0),
    ],
)
def test_a_delay_that_grows_up_to_a_cap_is_back_off(text: str, count: int) -> None:
    assert len(list(figures._growing(ast.parse(text)))) == count


def test_dialect_words_are_lower_case_and_in_order() -> None:
    groups = Path(figures.__file__).with_name("dialect.txt").read_text().strip().split("\n\n")
    words = [[line for line in group.splitlines() if not line.startswith("#")] for group in groups]
    assert words == [sorted(group) for group in words]
    listed = [word for group in words for word in group]
    assert sorted(dialect_words()) == sorted(listed)
    assert all(word.isalpha() and word.islower() for word in listed)
