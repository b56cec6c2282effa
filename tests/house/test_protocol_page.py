"""docs/protocol.md has a line for each error of the contract, with its code, and for no other."""

from __future__ import annotations

import re
from pathlib import Path

from hostile.contract import documented_reasons

_PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
_ROW = re.compile(r"^\| `([A-Z_]+)` \| ([A-Z_]+) \| \w", re.MULTILINE)


def test_each_error_of_the_contract_is_in_the_table_once() -> None:
    contract = {(reason, code) for reasons in documented_reasons().values() for code, reason in reasons}
    rows = _ROW.findall(_PAGE.read_text(encoding="utf-8"))
    assert set(rows) == contract
    assert rows == sorted(rows)
