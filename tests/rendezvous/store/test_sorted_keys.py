"""`SortedKeys` is a sorted list; a page costs only its own keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.rendezvous.store import core
from rallypoint.rendezvous.store.core import SortedKeys

names = st.text("ab\U0001f600\ue000", max_size=3)


@given(
    part=st.integers(1, 4),
    start=st.sets(names, max_size=12),
    changes=st.lists(names, max_size=40),
    pages=st.lists(st.tuples(names, names, st.integers(0, 5)), max_size=8),
)
def test_keys_are_a_sorted_list(
    part: int, start: set[str], changes: list[str], pages: list[tuple[str, str, int]]
) -> None:
    """This holds for any number of parts, any splits and removals, and any begin of a page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "_PART", part)
        keys, model = SortedKeys(start), set(start)
        for name in changes:
            (keys.remove if name in model else keys.add)(name)
            model ^= {name}
            assert [key for each in keys._parts for key in each] == sorted(model)
        assert all(0 < len(each) <= 2 * part for each in keys._parts)
        for prefix, after, count in pages:
            expected = [key for key in sorted(model) if key.startswith(prefix) and key > after]
            assert keys.page(prefix, after, count) == expected[:count]


class Counted(str):
    """A key that counts how often it is compared."""

    looks = 0
    __slots__ = ()

    def __lt__(self, other: str) -> bool:
        Counted.looks += 1
        return str.__lt__(self, other)

    def __gt__(self, other: str) -> bool:
        Counted.looks += 1
        return str.__gt__(self, other)

    def startswith(self, *args: object) -> bool:
        Counted.looks += 1
        return str.startswith(self, *args)  # type: ignore[arg-type]


def test_a_page_costs_the_page_and_not_all_keys() -> None:
    """One run with very many keys doesn't delay the others."""
    keys = SortedKeys(Counted(f"{number:06}") for number in range(50_000))
    Counted.looks = 0
    assert keys.page("04", "042", 3) == ["042000", "042001", "042002"]
    keys.add(Counted("042000+"))
    keys.remove("042001")
    assert keys.page("04", "042", 3) == ["042000", "042000+", "042002"]
    assert 0 < Counted.looks < 200
