"""`duemq bench cancel`: how fast delayed messages are cancelled, and what that costs the others.

Fills the timer service with `count` messages due at random within `days`, so that they lie on disk,
and cancels some of them: in lists, and singly by several callers at once; then the same with `near`
messages due within the minute, which lie in memory.  Meanwhile a trickle of other messages falls
due: `others_…_ms` is how late they were stored in their topic, `others_alone_ms` without cancels.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from duemq import Admin, Message, Outgoing, Producer, PushConsumer, aio
from duemq.producing.cancels import CancelOutcome
from duemq_server.bench.harness.percentiles import summary
from duemq_server.bench.harness.processes import CpuMeter
from duemq_server.bench.harness.results import Report
from duemq_server.bench.harness.target import Target, group_of
from duemq_server.bench.harness.traffic import bodies
from duemq_server.bench.measures.pending import DAY_MS, wait_pending

CHUNK = 100_000
NEAR_S = (25.0, 55.0)  # how far ahead the near ones are due
TRICKLE_S = 0.02
TRICKLE_DELAY_S = 0.5
LISTS = 5
SINGLES_PER_S_MAX = 5_000


def run(
    target: Target,
    report: Report,
    *,
    count: int,
    near: int,
    size: int,
    days: int,
    list_size: int,
    callers: int,
    seconds: float,
) -> None:
    """Fills, then cancels in every way; singly for so many seconds."""
    topic, wanted = target.new_topic("cancel"), LISTS * list_size
    singles = int(seconds * SINGLES_PER_S_MAX)
    share = min(1.0, (wanted + singles) / count)
    with Producer(target.nameserver) as producer:
        far = _fill(producer, topic, count, size, (DAY_MS / 10, days * DAY_MS), share)
    random.shuffle(far)
    with Admin(target.nameserver) as admin:
        report.figures["pending"] = wait_pending(admin, count)
    with CancelTrickle(target.nameserver, target.new_topic("others", queues=1)) as others:
        others.measure(report, "alone", lambda: time.sleep(seconds))
        _measure(target, report, others, "far", far, list_size, callers, seconds)
        with Producer(target.nameserver) as producer:
            due = (NEAR_S[0] * 1000, NEAR_S[1] * 1000)
            handles = _fill(producer, topic, near, size, due, 1.0)
        random.shuffle(handles)
        _measure(target, report, others, "near", handles, list_size, callers, seconds)


def _fill(
    producer: Producer,
    topic: str,
    count: int,
    size: int,
    due_in_ms: tuple[float, float],
    share: float,
) -> list[str]:
    """Sends messages with random due times; handles of a random share of them."""
    handles: list[str] = []
    began_ms = time.time() * 1000
    messages = bodies(count, size)
    for start in range(0, count, CHUNK):
        receipts = producer.send_many(
            topic,
            [
                Outgoing(body, deliver_at=int(began_ms + random.uniform(*due_in_ms)))
                for _, body in zip(range(min(CHUNK, count - start)), messages, strict=False)
            ],
        )
        handles += [each.handle or "" for each in receipts if random.random() < share]
    return handles


def _measure(
    target: Target,
    report: Report,
    others: CancelTrickle,
    where: str,
    handles: list[str],
    list_size: int,
    callers: int,
    seconds: float,
) -> None:
    lists = min(LISTS, max(1, len(handles) // 2 // list_size))
    cut = lists * list_size

    def measure(name: str, work: Callable[[], int]) -> None:
        def timed() -> None:
            cpu, begin = CpuMeter(target.cluster), time.perf_counter()
            done = work()
            report.figures[f"{name}_per_s"] = round(done / (time.perf_counter() - begin))
            report.figures[f"{name}_cpu_us"] = cpu.us_per(done)

        others.measure(report, name, timed)

    nameserver = target.nameserver
    measure(f"{where}_lists", lambda: asyncio.run(_in_lists(nameserver, handles[:cut], list_size)))
    measure(
        f"{where}_singly", lambda: asyncio.run(_singly(nameserver, handles[cut:], callers, seconds))
    )


async def _in_lists(nameserver: str, handles: Sequence[str], size: int) -> int:
    async with aio.Admin(nameserver) as admin:
        for start in range(0, len(handles), size):
            _check(await admin.cancel(list(handles[start : start + size])))
    return len(handles)


async def _singly(nameserver: str, handles: list[str], callers: int, seconds: float) -> int:
    """Each caller one after the other, until the time is over; how many there were."""
    left, done, end = iter(handles), 0, time.perf_counter() + seconds

    async def caller(admin: aio.Admin) -> None:
        nonlocal done
        while time.perf_counter() < end and (handle := next(left, None)) is not None:
            _check([await admin.cancel(handle)])
            done += 1

    async with aio.Admin(nameserver) as admin:
        await asyncio.gather(*(caller(admin) for _ in range(callers)))
    return done


def _check(outcomes: Sequence[CancelOutcome]) -> None:
    strange = {outcome for outcome in outcomes if outcome is not CancelOutcome.CANCELLED}
    assert not strange, f"pending messages were answered {strange}"


class CancelTrickle:
    """Other messages that fall due all the time, and how late they were; a context manager."""

    def __init__(self, nameserver: str, topic: str) -> None:
        self._topic = topic
        self._nameserver = nameserver
        self._ended = threading.Event()
        self._late: list[tuple[int, int]] = []  # (due, lateness), ms
        self._thread = threading.Thread(target=self._send, name="trickle")
        self._consumer: PushConsumer = PushConsumer(
            group_of(topic), [topic], self._receive, nameserver=nameserver, start_from="earliest"
        )

    def __enter__(self) -> Self:
        self._consumer.start()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        self._consumer.close()

    def measure(self, report: Report, name: str, work: Callable[[], None]) -> None:
        """Does the work; enters how late messages were that fell due meanwhile."""
        begin_ms = time.time() * 1000
        work()
        end_ms = time.time() * 1000
        self._ended.wait(2 * TRICKLE_DELAY_S)  # the last of them have come
        late = [late_ms for due_ms, late_ms in list(self._late) if begin_ms <= due_ms <= end_ms]
        report.figures[f"others_{name}_ms"] = summary([float(each) for each in late])

    def _send(self) -> None:
        with Producer(self._nameserver) as producer:
            while not self._ended.wait(TRICKLE_S):
                producer.submit(self._topic, b"", delay=TRICKLE_DELAY_S)

    def _receive(self, message: Message) -> None:
        due_ms = message.due_ms or 0
        self._late.append((due_ms, message.store_ms - due_ms))
