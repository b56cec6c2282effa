"""Elastic training on the digits: any number of workers learn alike; a death costs an epoch at most."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import train_digits
from digits import fresh_state
from rallypoint.timer import configure
from support.marks import slow
from support.waiting import PATIENCE
from train_digits import World, batches, load_or_start, pack, parse, save, train, unpack

SCRIPT = Path(train_digits.__file__)
LINE = re.compile(
    r"round \d+ · restart \d+ · epoch (\d+)/(\d+) · loss \d+\.\d\d · held-out accuracy [01]\.\d\d · world \d+"
)


@pytest.fixture(autouse=True)
def without_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No timers of the workers are watched here."""
    monkeypatch.delenv("RALLYPOINT_TIMER_SOCKET", raising=False)
    configure(required=False)


class MemoryStore:
    """The store's interface within one process, for workers that are threads."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.most_keys = 0
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self.values[key] = value
            self.most_keys = max(self.most_keys, len(self.values))
            self._changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, timeout):
                raise TimeoutError(key)
            return self.values[key]

    def delete(self, key: str) -> None:
        with self._changed:
            del self.values[key]


def worlds(size: int, store: MemoryStore) -> list[World]:
    """Return one world per rank of a round."""
    return [World(rank=rank, size=size, round=1, store=cast(Any, store)) for rank in range(size)]


T = TypeVar("T")


def on_every_rank(size: int, work: Callable[[World], T], store: MemoryStore | None = None) -> list[T]:
    """Return the result of each rank when all run at once."""
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work, worlds(size, store or MemoryStore())))


# --- Exchange -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 5, 16])
def test_averaging_gives_every_rank_the_mean(size: int) -> None:
    """All ranks get the same bits, and they are the mean of the ranks' values, turn after turn."""
    brought = np.random.default_rng(size).normal(size=(4, size, 2, 7)).astype(np.float32)

    def work(world: World) -> list[Any]:
        return [world.average(turn[world.rank]) for turn in brought]

    results = on_every_rank(size, work)
    for result in results:
        np.testing.assert_allclose(result, brought.mean(axis=1), rtol=1e-5, atol=1e-6)
        assert np.array_equal(result, results[0])


def test_a_world_of_one_needs_no_store() -> None:
    """For one rank, average and broadcast return their argument."""
    alone = World()
    state = np.ones((2, 3), dtype=np.float32)
    assert np.array_equal(alone.average(state), state)
    assert alone.broadcast(b"hello") == b"hello"


def test_the_store_does_not_grow() -> None:
    """However many turns are taken, there are never more keys at once than two turns need."""
    store, size = MemoryStore(), 4

    def work(world: World) -> None:
        world.broadcast(b"the start")
        for _ in range(50):
            world.average(np.zeros((2, 3), dtype=np.float32))

    on_every_rank(size, work, store)
    assert len(store.values) == 1
    assert store.most_keys <= 2 * size


@settings(max_examples=50)
@given(size=st.integers(1, 48), epoch=st.integers(1, 1000), seed=st.integers(0, 10))
def test_the_ranks_parts_make_up_the_epoch(size: int, epoch: int, seed: int) -> None:
    """For any world size each image belongs to one rank, and each batch is split into parts of like size."""
    whole = batches(1440, seed, epoch, rank=0, size=1)
    parts = [batches(1440, seed, epoch, rank, size) for rank in range(size)]
    assert sorted(np.concatenate(whole)) == list(range(1440))
    for step, batch in enumerate(whole):
        shares = [part[step] for part in parts]
        assert sorted(np.concatenate(shares)) == sorted(batch)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert min(map(len, shares)) >= 1


# --- Training -------------------------------------------------------------------------------------------


def test_three_workers_that_average_each_step_learn_the_same_as_one(tmp_path: Path) -> None:
    """With equal parts and an averaging after each step, it is training on whole batches."""
    arguments = ["--epochs", "1", "--average-every", "1", "--checkpoint"]
    train(World(), parse([*arguments, str(tmp_path / "one.npz")]))
    on_every_rank(3, lambda world: train(world, parse([*arguments, str(tmp_path / "three.npz")])))
    _, one = unpack((tmp_path / "one.npz").read_bytes())
    _, three = unpack((tmp_path / "three.npz").read_bytes())
    np.testing.assert_allclose(three, one, atol=1e-4)


@pytest.mark.parametrize("size", [3, slow(5)])
def test_several_workers_learn_to_read(size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Workers that average now and then pass the required accuracy, end with one model, and only rank 0 prints."""
    options = parse(["--checkpoint", str(tmp_path / "digits.npz")])
    accuracies = on_every_rank(size, lambda world: train(world, options))
    assert len(set(accuracies)) == 1
    assert accuracies[0] >= 0.92
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 30
    assert all(LINE.fullmatch(line) for line in lines)


def test_a_smaller_world_resumes_where_the_larger_one_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next round goes on after the last checkpoint, whose file only rank 0 needs to have."""
    kept = tmp_path / "kept.npz"

    def work_until(epochs: int) -> Callable[[World], float]:
        def work(world: World) -> float:
            mine = kept if world.rank == 0 else tmp_path / "nowhere" / f"{world.rank}.npz"
            return train(world, parse(["--epochs", str(epochs), "--checkpoint", str(mine)]))

        return work

    on_every_rank(3, work_until(2))
    assert unpack(kept.read_bytes())[0] == 2
    capsys.readouterr()
    assert len(set(on_every_rank(2, work_until(4)))) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "round 1 · restart 0 · resumed after epoch 2 of 4 · world 2"
    assert [LINE.fullmatch(line)[1] for line in lines[1:]] == ["3", "4"]  # type: ignore[index]
    assert not (tmp_path / "nowhere").exists()


def test_an_interrupted_training_learns_the_same_as_an_uninterrupted_one(tmp_path: Path) -> None:
    """Momentum and the order of the images survive a restart: the weights come out bit for bit the same."""
    through, stopped = tmp_path / "through.npz", tmp_path / "stopped.npz"
    train(World(), parse(["--epochs", "4", "--checkpoint", str(through)]))
    train(World(), parse(["--epochs", "2", "--checkpoint", str(stopped)]))
    train(World(), parse(["--epochs", "4", "--checkpoint", str(stopped)]))
    assert np.array_equal(unpack(through.read_bytes())[1], unpack(stopped.read_bytes())[1])


def test_no_rank_leaves_before_the_last_checkpoint_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that has exited while rank 0 still saves could not help a new round if rank 0 died just then."""
    events: list[str] = []
    saving = threading.Event()

    def slow_save(path: Path, checkpoint: bytes, round_number: int) -> None:
        saving.wait(0.2)  # time in which the others would leave
        events.append("saved")

    monkeypatch.setattr(train_digits, "save", slow_save)
    options = parse(["--epochs", "1", "--checkpoint", str(tmp_path / "digits.npz")])

    def work(world: World) -> None:
        train(world, options)
        events.append("left")

    on_every_rank(3, work)
    assert events == ["saved", "left", "left", "left"]


def test_each_step_and_each_averaging_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has its own short limit; waiting has a far longer one: only the hung worker is reported."""
    scopes: list[tuple[str, float]] = []

    @contextlib.contextmanager
    def recording(after: float, scope: str) -> Iterator[None]:
        scopes.append((scope, after))
        yield

    monkeypatch.setattr(train_digits, "expires", recording)
    train(
        World(), parse(["--epochs", "1", "--step-timeout", "3", "--checkpoint", str(tmp_path / "digits.npz")])
    )
    assert scopes.count(("step", 3.0)) == 30
    limits = {after for scope, after in scopes if scope == "average"}
    assert len(scopes) == 33
    assert min(limits) > train_digits.PATIENCE > 10 * parse([]).step_timeout


def test_an_epoch_can_be_slowed_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--epoch-seconds spreads the waiting over the epoch, in pieces that leave no long blind spot."""
    now, pauses = 100.0, []

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now

        @staticmethod
        def sleep(seconds: float) -> None:
            nonlocal now
            now += seconds
            pauses.append(seconds)

    monkeypatch.setattr(train_digits, "time", Clock)
    train(World(), parse(["--epochs", "2", "--epoch-seconds", "60", "--checkpoint", str(tmp_path / "d.npz")]))
    assert now == pytest.approx(220)
    assert max(pauses) == pytest.approx(2)


def test_a_rank_hangs_once_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the rank named in the file hangs, inside its watched step, and the file is gone by then."""
    told, options = tmp_path / "hang", ["--epochs", "1", "--checkpoint", str(tmp_path / "digits.npz")]
    told.write_text("1\n")
    open_scopes: list[str] = []

    @contextlib.contextmanager
    def recording(after: float, scope: str) -> Iterator[None]:
        open_scopes.append(scope)
        yield
        open_scopes.pop()

    class HangingError(Exception):
        pass

    def hang() -> None:
        raise HangingError

    monkeypatch.setattr(train_digits, "expires", recording)
    monkeypatch.setattr(signal, "pause", hang)
    train(World(), parse([*options, "--hang-file", str(told)]))
    assert told.read_text() == "1\n"
    told.write_text("2 0")
    with pytest.raises(HangingError):
        train(World(), parse([*options, "--epochs", "2", "--hang-file", str(told)]))
    assert open_scopes == ["step"]
    assert not told.exists()


# --- Checkpoints ----------------------------------------------------------------------------------------


def test_a_checkpoint_comes_back_as_it_went(tmp_path: Path) -> None:
    """The same values are loaded as were saved, in a folder made for it; without a file, training starts afresh."""
    path, state = tmp_path / "new" / "digits.npz", fresh_state(seed=5)
    epoch, first = unpack(load_or_start(path, seed=5))
    assert epoch == 0
    assert np.array_equal(first, state)
    save(path, pack(7, state + 1), round_number=2)
    epoch, last = unpack(load_or_start(path, seed=5))
    assert epoch == 7
    assert np.array_equal(last, state + 1)
    assert [entry.name for entry in path.parent.iterdir()] == ["digits.npz"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_dying_while_saving_leaves_the_last_checkpoint(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut short before the new file is durable or in place, saving has not touched the old one."""
    path, before = tmp_path / "digits.npz", pack(1, fresh_state(seed=1))
    save(path, before, round_number=1)

    def die(*_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(os, failing, die)
    with pytest.raises(SystemExit):
        save(path, pack(2, fresh_state(seed=2)), round_number=1)
    assert load_or_start(path, seed=0) == before


def test_the_data_are_durable_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that survives a power cut: file, rename, folder."""
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watch_fsync(descriptor: int) -> None:
        opened = Path(f"/proc/self/fd/{descriptor}").resolve()
        calls.append("folder" if opened == tmp_path else opened.read_text())
        fsync(descriptor)

    def watch_replace(source: Path, target: Path) -> None:
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(os, "replace", watch_replace)
    save(tmp_path / "digits.npz", b"content", round_number=1)
    assert calls == ["content", "rename", "folder"]


@settings(max_examples=150)
@given(position=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255), other=st.binary(max_size=200))
def test_any_damage_to_the_bytes_is_a_value_error(position: float, change: int, other: bytes) -> None:
    """Bytes cut short or of another content are refused; a changed byte never raises anything else."""
    whole = pack(3, fresh_state(seed=0))
    at = int(position * len(whole))
    for damaged in (whole[:at], other):
        with pytest.raises(ValueError, match="it is damaged or something else"):
            unpack(damaged)
    with contextlib.suppress(ValueError):
        unpack(whole[:at] + bytes([whole[at] ^ change]) + whole[at + 1 :])


@pytest.mark.parametrize("flag", [b"\x01", b"\x20"])
def test_damage_that_zipfile_has_its_own_error_for(flag: bytes) -> None:
    """Flags of encryption or patched data are damage like any other: zipfile's errors for them stay inside."""
    whole = pack(3, fresh_state(seed=0))
    flags_of_first_entry = whole.index(b"PK\x01\x02") + 8
    with pytest.raises(ValueError, match="it is damaged"):
        unpack(whole[:flags_of_first_entry] + flag + whole[flags_of_first_entry + 1 :])


def test_a_file_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    """A foreign file is left alone, and the one line that ends the worker has a remedy."""
    path, other = tmp_path / "digits.npz", io.BytesIO()
    np.savez(other, epoch=1, state=np.zeros((2, 5), dtype=np.float32))
    for content in [b"", b"not a checkpoint", other.getvalue(), pack(1, fresh_state(0))[:-1]]:
        path.write_bytes(content)
        with pytest.raises(SystemExit) as stopped:
            load_or_start(path, seed=0)
        message = str(stopped.value)
        assert str(path) in message
        assert "--checkpoint" in message
        assert "\n" not in message
        assert path.read_bytes() == content


# --- As a program ---------------------------------------------------------------------------------------


def command(*arguments: object) -> list[str]:
    """Return the example's command line."""
    return [sys.executable, str(SCRIPT), *map(str, arguments)]


def alone() -> dict[str, str]:
    """Return an environment without an agent."""
    foreign = ("RANK", "WORLD_SIZE", "CHECKPOINT", "RALLYPOINT_", "TORCHELASTIC_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def test_alone_it_trains_from_one_command(tmp_path: Path) -> None:
    """With no agent and no options it learns to read, in its working directory."""
    done = subprocess.run(
        command(), cwd=tmp_path, env=alone(), capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    matches = [LINE.fullmatch(line) for line in lines]
    assert [match and int(match[1]) for match in matches] == list(range(1, 31))
    assert last.startswith("held-out accuracy ")
    assert float(last.split()[-1]) >= 0.92
    assert (tmp_path / "var" / "digits.npz").exists()


@pytest.mark.slow
def test_killed_at_any_moment_it_resumes_from_a_whole_checkpoint(tmp_path: Path) -> None:
    """After each of several SIGKILLs the checkpoint is whole, and only the epoch under way is lost."""
    path, random = tmp_path / "digits.npz", np.random.default_rng(0)
    for _ in range(4):
        with subprocess.Popen(
            command("--epochs", 10**6, "--checkpoint", path), env=alone(), stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            shown = [process.stdout.readline() for _ in range(10)]
            time.sleep(random.uniform(0, 0.02))  # at any moment of an epoch
            process.kill()
        match = LINE.fullmatch(shown[-1].strip())
        assert match is not None
        assert unpack(path.read_bytes())[0] >= int(match[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_without_output(number: signal.Signals, tmp_path: Path) -> None:
    """A signal ends the worker at once; a traceback for it would only hide real failures."""
    path = tmp_path / "digits.npz"
    save(path, pack(3, fresh_state(seed=0)), round_number=1)
    with subprocess.Popen(
        command("--epoch-seconds", 60, "--checkpoint", path),
        env=alone(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert b"resumed after epoch 3" in process.stdout.readline()
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == -number
    assert errors == b""


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--epochs", "0"], "--epochs must be at least 1, not 0"),
        (["--average-every", "0"], "--average-every must be at least 1, not 0"),
        (["--epoch-seconds", "-1"], "--epoch-seconds must be at least 0, not -1.0"),
        (["--step-timeout", "nan"], "--step-timeout must be at least 0.1, not nan"),
        (["--seed", "-1"], "--seed must be at least 0, not -1"),
        (["--epochs", "x"], "argument --epochs: invalid int value: 'x'"),
    ],
)
def test_bad_options_are_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A senseless option ends with code 2, and the last line names it."""
    with pytest.raises(SystemExit) as stopped:
        parse(arguments)
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err.splitlines()[-1]


def test_more_workers_than_a_batch_has_images_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without an image in any batch would learn nothing; the sentence has the number."""
    monkeypatch.setattr(World, "from_environment", lambda: World(rank=0, size=49))
    with pytest.raises(SystemExit, match="WORLD_SIZE is 49"):
        train_digits.main([])
