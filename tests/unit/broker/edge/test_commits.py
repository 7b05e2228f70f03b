from __future__ import annotations

import asyncio

from duemq_server.broker.edge.commits import LEFT_MIN, Commits


async def test_who_waits_is_woken_in_turn_when_the_log_is_durable() -> None:
    commits, woken = Commits(100), list[int]()
    await commits.wait(100)
    for position in (200, 300, 250):
        commits.call(position, lambda position=position: woken.append(position))
    commits.advance(250)
    assert woken == [200]
    commits.advance(300)
    assert woken == [200, 300, 250]


async def test_who_gave_up_is_forgotten_while_nothing_is_committed() -> None:
    commits, woken = Commits(0), list[int]()
    commits.call(100, lambda: woken.append(100))
    for _ in range(8):
        callers = [asyncio.ensure_future(commits.wait(200)) for _ in range(LEFT_MIN)]
        await asyncio.wait(callers, timeout=0)
        for each in callers:
            each.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        assert len(commits._waiting) <= 2 * LEFT_MIN
    stays = asyncio.ensure_future(commits.wait(200))
    await asyncio.wait((stays,), timeout=0)
    commits.advance(200)
    await stays
    assert woken == [100]
    assert not commits._waiting
    assert not commits._left


async def test_who_left_is_not_called_and_may_leave_twice() -> None:
    commits, woken = Commits(0), list[int]()
    left, other = (commits.call(100, lambda: woken.append(1)) for _ in range(2))
    commits.leave(left)
    commits.leave(left)
    commits.advance(100)
    commits.leave(other)
    assert woken == [1]
    assert not commits._left


async def test_who_waits_for_progress_asks_again_when_there_will_be_none() -> None:
    commits = Commits(0)
    waits = [asyncio.ensure_future(commits.progress()) for _ in range(2)]
    await asyncio.wait(waits, timeout=0)
    commits.look_again()
    await asyncio.gather(*waits)
    assert commits.position == 0
