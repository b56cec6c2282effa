"""A worker that carries out the steps of `rallypoint conformance --worker` with Rallypoint's own library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from rallypoint.timer import expires, progress
from rallypoint.timer.worker.expires import Guard
from rallypoint.worker.store import RoundOverError, Store, StoreError, StoreRequestError, StoreTimeoutError

_KINDS: dict[type[StoreError], str] = {
    StoreTimeoutError: "timeout",
    RoundOverError: "round-over",
    StoreRequestError: "refused",
}
_guards: dict[str, Guard] = {}
_store = Store.from_environment()


def _acquire(token: str, seconds: str, scope: str) -> None:
    guard = _guards[token] = expires(float(seconds) or "auto", scope)
    guard.__enter__()


def _release(token: str) -> None:
    if (guard := _guards.pop(token, None)) is not None:
        guard.__exit__(None, None, None)


_STEPS: dict[str, Callable[..., Sequence[object] | None]] = {
    "acquire": _acquire,
    "release": _release,
    "progress": lambda step: progress(int(step)),
    "set": lambda key, value: _store.set(key, bytes.fromhex(value)),
    "get": lambda key, timeout: [_store.get(key, float(timeout)).hex()],
    "add": lambda key, amount: [_store.add(key, int(amount))],
    "compare_set": lambda key, *values: [_store.compare_set(key, *map(bytes.fromhex, values)).hex()],
    "wait": lambda timeout, *keys: _store.wait(keys, float(timeout)),
    "check": lambda *keys: [int(_store.check(keys))],
    "delete": lambda key: [int(_store.delete(key))],
    "keys": _store.keys,
}


def main() -> None:
    """Carry out steps until the end of the input."""
    for line in sys.stdin.buffer:
        name, *fields = line.decode().rstrip("\n").split("\t")
        try:
            result = ["ok", *(_STEPS[name](*fields) or ())] if name in _STEPS else ["unsupported"]
        except StoreError as error:
            result = ["error", _KINDS.get(type(error), "unavailable"), error]
        sys.stdout.buffer.write(("\t".join(map(str, result)) + "\n").encode())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
