"""`expires`: the cost of a guarded block to a worker."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

from benchmarks.agents import agent
from benchmarks.clients.block_costs import PACES, BlockCost, BlocksOrder, read_costs
from benchmarks.figures import Figure
from benchmarks.processes import BenchmarkError, client_command, driven, tail, timer_server
from benchmarks.session import Session
from benchmarks.trials import median

SIZES = (20_000,)

_PACED = 10  # blocks back to back per paced block, which takes a millisecond
_TORCH = 10  # our blocks per block of torch, which is slower
_TIMEOUT = 300.0  # seconds
_SCOPES = ("default", "explicit")
_QUANTITIES = ("median", "p99", "longest")

_Costs: TypeAlias = Mapping[str, BlockCost]


def expires(session: Session) -> Iterator[Figure]:
    """Measure; see docs/benchmarks.md."""
    for blocks in session.sizes_or(SIZES):
        costs = _in_trials(session, "ours", partial(_ours, session, blocks))
        if not costs:
            continue
        file, queue = (_torch(session, kind, blocks // _TORCH) for kind in ("file", "queue"))
        for scope in _SCOPES:
            for pace in PACES:
                yield from _figures(blocks, f"{scope}.{pace}", costs, file, queue)
            raised = _raised(costs, scope)
            if raised:
                session.fail(f"expires {scope}: {raised:g} blocks raised an error")
            note = f"torch's queue: {_raised(queue, scope):g}; a tenth of the blocks" if queue else ""
            peer = _raised(file, scope) if file else None
            yield Figure(f"expires.{scope}.raised", blocks, raised, "blocks", peer=peer, note=note)


def _figures(blocks: int, what: str, costs: _Costs, file: _Costs, queue: _Costs) -> Iterator[Figure]:
    for quantity in _QUANTITIES:
        ours, floor = getattr(costs[what], quantity), getattr(costs[f"floor.{what}"], quantity)
        peer = getattr(file[what], quantity) * 1e6 if file else None
        note = f"torch's queue: {getattr(queue[what], quantity) * 1e6:,.0f}" if queue else ""
        yield Figure(f"expires.{what}.{quantity}", blocks, ours * 1e6, "µs", floor * 1e6, peer, note)


def _raised(costs: _Costs, scope: str) -> float:
    """Return the number of blocks that raised an error, over all paces."""
    return sum(costs[f"{scope}.{pace}"].raised for pace in PACES)


def _in_trials(session: Session, who: str, measure: Callable[[], _Costs]) -> _Costs:
    """Return the medians over `session.trials`; empty if all trials failed."""
    trials: list[_Costs] = []
    for trial in range(1, session.trials + 1):
        doing = f"expires {who} {trial}/{session.trials}"
        try:
            trials.append(measure())
        except BenchmarkError as error:
            # A failure of torch must not fail our figures.
            (session.fail if who == "ours" else session.say)(f"{doing}: {error}")
        else:
            session.say(f"{doing}: {_show(trials[-1])}")
    return {name: median(trial[name] for trial in trials) for name in (trials[0] if trials else ())}


def _show(costs: _Costs) -> str:
    return ", ".join(
        f"{name} {cost.median * 1e6:.1f} µs, p99 {cost.p99 * 1e6:.1f} µs"
        for name, cost in costs.items()
        if not name.startswith("floor.")
    )


def _order(session: Session, kind: str, blocks: int) -> tuple[BlocksOrder, Path]:
    answer = session.folder / f"expires-{kind}.json"
    answer.unlink(missing_ok=True)
    return BlocksOrder(kind, blocks, max(2, blocks // _PACED), str(answer)), answer


def _ours(session: Session, blocks: int) -> _Costs:
    order, answer = _order(session, "ours", blocks)
    with timer_server(session.folder) as timers, agent(session.folder, timers, "expires", order) as process:
        try:
            code = process.wait(_TIMEOUT)
        except subprocess.TimeoutExpired:
            code = None
    if code != 0:
        raise BenchmarkError(
            f"the agent ended with exit code {code}: {tail(session.folder / 'agent-expires.log')}"
        )
    return read_costs(answer)


def _torch(session: Session, kind: str, blocks: int) -> _Costs:
    """Measure torch's timers; return nothing without torch, or if all trials failed."""
    torch = session.torch
    if torch is None:
        return {}

    def measure() -> _Costs:
        order, answer = _order(session, kind, max(2, blocks))
        module, *rest = client_command("torch_timers", order, torch)[2:]
        command = [str(torch), "-m", module, "blocks", *rest]
        driven(command, session.folder / "client-torch-timers.log", _TIMEOUT)
        return read_costs(answer)

    return _in_trials(session, f"torch's {kind}", measure)
