"""Coroutines that cancel the task that they run in, without brokers."""

import asyncio
import gc

import pytest

from tests.service.running_cluster import until
from tests.service.test_concurrent_dispatcher import bench
from tests.service.test_in_place_dispatcher import consuming, done, source


class Leaking:
    """A callback that is cancelled the first time that it gets this message."""

    def __init__(self, offset: int, *, waits: bool = True) -> None:
        self._offset: int | None = offset
        self._waits = waits
        self.calls: list[int] = []

    async def receive(self, given) -> None:
        given = given if isinstance(given, list) else [given]
        self.calls += [message.offset for message in given]
        if self._offset in self.calls:
            self._offset = None
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            if self._waits:
                await asyncio.sleep(0)


@pytest.mark.parametrize("batch", [False, True])
async def test_it_has_failed_and_its_worker_goes_on(batch: bool, caplog) -> None:
    leaking = Leaking(1)
    async with bench(leaking.receive, batch=batch, threads=1) as made:
        made.pull(4)
        await until(lambda: made.commit_point == 4)
        assert made.settler.offsets == ([0, 1, 2, 3] if batch else [1])
        assert {outcome.error for _, outcome, _ in made.settler.taken} == {"CancelledError"}
        made.pull(1)
        await until(lambda: made.commit_point == 5)
    assert leaking.calls == list(range(5))
    assert "the callback failed" in caplog.text


async def test_one_that_does_not_wait_ends_no_worker_either() -> None:
    leaking = Leaking(0, waits=False)
    async with bench(leaking.receive, threads=1) as made:
        for n in range(1, 4):
            made.pull(1)
            await until(lambda n=n: made.commit_point == n)
    assert leaking.calls == [0, 1, 2]


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("order", ["queue", "key", None])
async def test_in_order_it_is_tried_again_in_front_of_the_rest(order, batch: bool) -> None:
    leaking, queue = Leaking(0), source()
    async with consuming(order, leaking.receive, batch=batch, threads=1) as consumption:
        consumption.give(queue, *["a"] * 3)
        await until(lambda: done(queue))
    again = leaking.calls.index(0, 1)
    assert leaking.calls[again:] == ([0, 1, 2] if order else [0] if not batch else [0, 1, 2])


def test_nothing_begins_when_the_whole_loop_is_cancelled(caplog) -> None:
    """As asyncio.run does at its end: who starts anything then leaves it behind."""

    async def main() -> None:
        begun = asyncio.Event()

        async def receive(message) -> None:
            begun.set()
            await asyncio.Event().wait()

        made = bench(receive, threads=2)
        held.append(made)
        (await made.__aenter__()).pull(3)
        await begun.wait()

    gc.collect()  # what other tests left behind would be told, too
    caplog.clear()
    held: list[object] = []
    asyncio.run(main())
    held.clear()
    gc.collect()
    assert caplog.text == ""
