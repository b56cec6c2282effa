"""Prefixes follow their template, and a filter selects whole lines."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.agent.logs.lines import LineFilter, check_line_prefix, line_prefix
from rallypoint.agent.logs.streams import LogError


@pytest.mark.parametrize(
    ("template", "prefix"),
    [
        (None, b"[trainer1]:"),
        ("[${role_name}${local_rank}]:", b"[trainer1]:"),
        ("[${rank}]:", b"[5]:"),
        ("${hostname}:${rank}: ", f"{socket.gethostname()}:5: ".encode()),
        ("$role_name $local_rank/$rank> ", b"trainer 1/5> "),
        ("$$ ${rank} $ ", b"$ 5 $ "),
        ("", b""),
    ],
)
def test_templates_are_torchs(template: str | None, prefix: bytes) -> None:
    """They are those of string.Template, with four variables; the default is the role and the local rank."""
    assert line_prefix(template, role="trainer", local_rank=1, rank=5) == prefix
    if template is not None:
        assert check_line_prefix(template, "--log-line-prefix") == template


def test_a_variable_that_lines_have_not_is_refused() -> None:
    """The error is one line with the known variables."""
    with pytest.raises(LogError) as caught:
        check_line_prefix("[${host}]", "--log-line-prefix")
    assert str(caught.value) == (
        "--log-line-prefix [${host}]: there is no variable ${host}; "
        "there are ${role_name}, ${local_rank}, ${rank}, ${hostname}"
    )
    with pytest.raises(LogError, match="leave the line break out"):
        check_line_prefix("a\nb", "--log-line-prefix")


def test_lines_that_have_any_of_the_texts_are_picked() -> None:
    """Each is selected once, with its end; texts are not patterns."""
    choose = LineFilter(["apple", "a.c", "süß"])
    assert choose(b"pear\nan apple, an apple\nabc\na.c\n") == b"an apple, an apple\na.c\n"
    assert choose("sü\n süß\n".encode() + b"\xff apple") == " süß\n".encode() + b"\xff apple"
    assert choose(b"") == b""


@given(
    st.lists(st.text(alphabet="ab ", max_size=6), max_size=12),
    st.lists(st.text(alphabet="ab ", min_size=1, max_size=3), min_size=1, max_size=3),
    st.booleans(),
)
def test_a_filter_selects_the_matching_lines(lines: list[str], texts: list[str], ended: bool) -> None:
    """It selects all lines that contain one of the texts, in order."""
    data = "\n".join(lines) + "\n" * ended
    expected = "".join(line for line in data.splitlines(keepends=True) if any(text in line for text in texts))
    assert LineFilter(texts)(data.encode()) == expected.encode()
