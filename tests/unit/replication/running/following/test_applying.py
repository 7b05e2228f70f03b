"""What is committed takes effect, in a thread that has the state to itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from duemq_server.replication.running.following import applying
from duemq_server.replication.running.following.applying import ENTRIES_MAX, Applying
from duemq_server.storage.errors import DiskFull

ENTRY = 100


class State:
    """Entries of ENTRY bytes; some of them are durable here."""

    def __init__(self) -> None:
        self.applied = 0
        self.durable = 0
        self.store_id = 1
        self.calls: list[tuple[int, int | None]] = []
        self.called = threading.Semaphore(0)
        self.full = False
        self.may_apply = threading.Event()
        self.may_apply.set()
        self.inside = threading.Event()
        """A pass has begun."""
        self.passes: list[int] = []
        """The store id that each saved."""
        self.checkpoints = 0
        self.saved = threading.Event()

    def apply(self, committed: int, entries_max: int | None = None) -> None:
        self.calls.append((committed, entries_max))
        self.called.release()
        store_id = self.store_id
        self.inside.set()
        assert self.may_apply.wait(30)
        if self.full:
            self.full = False
            raise DiskFull("no space left")
        end = min(committed, self.durable) // ENTRY * ENTRY
        self.applied = max(self.applied, min(end, self.applied + 5 * ENTRY))
        self.passes.append(store_id)

    def checkpoint(self) -> None:
        self.checkpoints += 1
        if self.full:
            self.full = False
            raise DiskFull("no space left")
        self.saved.set()

    def rename(self, store_id: int) -> None:
        self.store_id = store_id


@asynccontextmanager
async def running(state: State) -> AsyncIterator[Applying]:
    made = Applying(state)  # type: ignore[arg-type]
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        state.may_apply.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def reached(made: Applying, position: int) -> None:
    async with asyncio.timeout(30):
        await made.reach(position)


async def called(state: State) -> None:
    """Once more."""
    assert await asyncio.to_thread(state.called.acquire, timeout=30)


async def idle(made: Applying) -> None:
    """The pass has ended, and so has the one that follows at once, if one does."""
    async with asyncio.timeout(30):
        for _ in range(2):  # whoever goes on waits for the lock behind the first
            async with made.lock:
                pass


async def test_what_is_committed_is_applied_some_at_a_time() -> None:
    state = State()
    state.durable = 12 * ENTRY
    async with running(state) as made:
        made.advance(12 * ENTRY)
        await reached(made, 12 * ENTRY)
    assert state.calls == [(12 * ENTRY, ENTRIES_MAX)] * 3


@pytest.mark.parametrize(
    ("goal", "durable", "applied"),
    [(3 * ENTRY, 2 * ENTRY, 2 * ENTRY), (2 * ENTRY + 1, 9 * ENTRY, 2 * ENTRY)],
    ids=["beyond what is durable", "inside an entry"],
)
async def test_a_goal_that_is_not_reached_is_not_tried_again_until_there_is_news(
    goal: int, durable: int, applied: int
) -> None:
    state = State()
    state.durable = durable
    async with running(state) as made:
        made.advance(goal)
        await called(state)
        await called(state)  # the second one takes it no further
        await idle(made)
        assert len(state.calls) == 2
        assert state.applied == applied

        state.durable = 9 * ENTRY
        made.advance(goal)  # as far as it was, and more of it is durable by now
        await called(state)
        await idle(made)
        made.advance(4 * ENTRY)
        await reached(made, 4 * ENTRY)


async def test_a_full_disk_is_tried_again_without_news(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applying, "FULL_S", 0.0)
    state = State()
    state.durable, state.full = ENTRY, True
    async with running(state) as made:
        made.advance(ENTRY)
        await reached(made, ENTRY)
    assert len(state.calls) == 2


async def test_a_full_disk_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is logged takes space, too."""
    monkeypatch.setattr(applying, "FULL_S", 0.0)

    class Full(State):
        fulls = 3

        def apply(self, committed: int, entries_max: int | None = None) -> None:
            self.fulls -= 1
            self.full = self.fulls >= 0
            super().apply(committed, entries_max)

    state = Full()
    state.durable = 2 * ENTRY
    async with running(state) as made:
        made.advance(ENTRY)
        await reached(made, ENTRY)
        assert caplog.text.count("waits for space") == 1
        state.fulls = 3
        made.advance(2 * ENTRY)
        await reached(made, 2 * ENTRY)
    assert caplog.text.count("waits for space") == 2


async def test_what_the_open_found_no_space_to_save_is_saved_without_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(applying, "CHECKPOINT_S", 0.0)
    state = State()
    state.full = True
    keeping = asyncio.create_task(Applying(state).keep())  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        await asyncio.to_thread(state.saved.wait, 30)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert not state.full


async def test_a_state_is_asked_for_a_checkpoint_in_silence_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may not have been time for one when the last entry came."""
    monkeypatch.setattr(applying, "CHECKPOINT_S", 0.0)
    asked = threading.Semaphore(0)

    class Waiting(State):
        def checkpoint(self) -> None:
            asked.release()

    keeping = asyncio.create_task(Applying(Waiting()).keep())  # type: ignore[arg-type]
    for _ in range(3):
        assert await asyncio.to_thread(asked.acquire, timeout=60)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_a_new_name_waits_for_the_pass_that_is_under_way() -> None:
    state = State()
    state.durable = 2 * ENTRY
    state.may_apply.clear()
    async with running(state) as made:
        made.advance(ENTRY)
        await asyncio.to_thread(state.inside.wait, 30)
        renaming = asyncio.create_task(made.alone(state.rename, 2))
        for _ in range(20):  # a thread of its own would be through by now
            await asyncio.to_thread(lambda: None)
        assert state.store_id == 1
        state.may_apply.set()
        await renaming
        assert (state.store_id, state.passes) == (2, [1])
        made.advance(2 * ENTRY)
        await reached(made, 2 * ENTRY)
    assert state.passes == [1, 2]


async def test_what_was_begun_with_the_state_ends_although_its_caller_is_cancelled() -> None:
    state = State()
    made = Applying(state)  # type: ignore[arg-type]
    begun, may_end = threading.Event(), threading.Event()

    def rename(store_id: int) -> None:
        begun.set()
        assert may_end.wait(30)
        state.rename(store_id)

    caller = asyncio.create_task(made.alone(rename, 2))
    await asyncio.to_thread(begun.wait, 30)
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    assert made.lock.locked()  # nobody else comes in
    may_end.set()
    async with asyncio.timeout(30), made.lock:
        assert state.store_id == 2


async def test_a_disk_too_full_for_a_checkpoint_loses_what_the_leader_keeps_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(applying, "CHECKPOINT_S", 0.0)
    monkeypatch.setattr(applying, "DROP_S", 0.0)
    dropped = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Full(State):
        def checkpoint(self) -> None:
            raise DiskFull("no space left")

        def drop_before(self, log_start: int) -> None:
            assert log_start == 5 * ENTRY
            loop.call_soon_threadsafe(dropped.set)

    state = Full()
    made = Applying(state)  # type: ignore[arg-type]
    state.applied = 9 * ENTRY
    made.advance(9 * ENTRY, 5 * ENTRY)
    keeping = asyncio.create_task(made.keep())
    async with asyncio.timeout(30):
        await dropped.wait()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
