"""Names are text that can be sent; bytes of a command line that are none are told, not shown as a traceback."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from rallypoint.cli.main import main
from rallypoint.cli.nodes import Text

BROKEN = b"a\xff".decode(errors="surrogateescape")  # as Python hands on what is no UTF-8


def test_text_is_taken_as_it_is() -> None:
    """Of any script."""
    assert Text()("训练 🚂") == "训练 🚂"
    with pytest.raises(click.BadParameter, match="not valid UTF-8"):
        Text()(BROKEN)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["run", "--rdzv-endpoint", "127.0.0.1:1", "--rdzv-id", BROKEN, __file__], "--rdzv-id"),
        (["run", "--standalone", "--node-id", BROKEN, __file__], "--node-id"),
        (["run", "--standalone", "--role", BROKEN, __file__], "--role"),
        (["run", "--standalone", "--local-addr", BROKEN, __file__], "--local-addr"),
        (["run", "--rdzv-endpoint", f"{BROKEN}:1", "--rdzv-id", "x", __file__], "--rdzv-endpoint"),
        (["status", BROKEN], "[RUN_ID]"),
        (["close", BROKEN], "RUN_ID"),
        (["close", "x", "--reason", BROKEN], "--reason"),
    ],
    ids=ascii,
)
def test_bytes_that_are_no_text_are_told_in_one_line(command: list[str], told: str) -> None:
    """With the flag or argument that has them."""
    result = CliRunner().invoke(main, command)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"Invalid value for '{told}" in result.stderr
    assert "'a\\udcff" in result.stderr
