"""Requests to timer shards while threads ask and the client closes."""

import asyncio
import time
from functools import partial
from types import SimpleNamespace

import pytest

from duemq.errors import Closed, Timeout, Unavailable
from duemq.producing.batch import NO_LABELS
from duemq.producing.batch_encoding import NO_EXTRAS
from duemq.producing.keyed import asks
from duemq.producing.keyed.calls import TimerCalls
from duemq.producing.keyed.intake import KeyedIntake
from duemq.producing.outbox import Outbox, Target
from duemq.protocol.due import DELAYS_MS, Due
from duemq.protocol.limits import BATCH_BYTES_DEFAULT, MESSAGE_BYTES_DEFAULT
from duemq.settings import ClientSettings
from duemq.transport import retrying
from duemq.v1.message_pb2 import TimerHandle
from duemq_server.timer_service.scheduling.keyed.request_memory import KEEP_MIN_MS

REACHES_S = 5.0  # its shard so long after the last time that it is sent, at the most
SHARD_0 = partial(asks.CancelCall, 0, 0.0, time.monotonic() + 30)


class Away:
    """A client that finds no shard."""

    settings = ClientSettings()
    routes = SimpleNamespace(key_shards=1)

    def __init__(self):
        self.asked = 0

    def timer_shard(self, number):
        self.asked += 1
        raise Unavailable("away", field="timer_shard", retryable=False)


@pytest.fixture
def calls():
    return TimerCalls(Away())


def ask(calls, key):
    part = asks.Part(1)
    asks._gather(calls, [SHARD_0], "way", part, None, [(0, ("t", key))])
    return part


async def test_a_question_behind_the_close_is_refused(calls):
    before = ask(calls, "k")
    await calls.close()
    assert isinstance(before.results[0], Closed)
    with pytest.raises(Closed):
        ask(calls, "k")


async def test_who_waits_is_told_though_the_close_is_cancelled(calls):
    begins = ask(calls, "k")
    [task] = calls._tasks  # it has not begun
    closing = calls.close()
    closing.send(None)
    with pytest.raises(asyncio.CancelledError):
        closing.throw(asyncio.CancelledError())
    await asyncio.wait([task])
    assert isinstance(begins.results.get(0), Closed)


async def test_what_is_too_late_is_not_sent(calls):
    late = asks.CancelCall(0, 0.0, time.monotonic() - 1)
    part = asks.Part(1)
    asks._gather(calls, [lambda: late], "way", part, None, [(0, ("t", "k"))])
    await part.done.wait()
    assert isinstance(part.results[0], Timeout)
    assert not part.heard
    assert calls.client.asked == 0


async def test_no_request_is_repeated_for_longer_than_its_shard_knows_it_again(calls, monkeypatch):
    """It would be done twice."""
    lasts_s = []

    async def until(deadline, attempt, away_s):
        lasts_s.append(deadline - began)
        raise Unavailable("away")

    monkeypatch.setattr(retrying, "until", until)
    began = time.monotonic()
    patient = asks.CancelCall(0, 0.0, began + 86_400)
    part = asks.Part(1)
    asks._gather(calls, [lambda: patient], "way", part, None, [(0, ("t", "k"))])
    await part.done.wait()
    spent_s = time.monotonic() - began
    assert 0 < lasts_s[0] - spent_s < KEEP_MIN_MS / 1000 - REACHES_S


async def test_what_needs_other_rights_goes_in_another_request(calls):
    """Or who asks for what it may is refused because of who asks for more."""
    begun = []

    def begin():
        now = time.monotonic()
        begun.append(asks.RescheduleCall(0, now, now + 30))
        return begun[-1]

    refs = [("t", "k"), ("u", "k"), TimerHandle(queue_id=1), ("t", "l"), TimerHandle(queue_id=2)]
    asks._gather(calls, [begin], ("way",), asks.Part(len(refs)), None, list(enumerate(refs)))
    assert [each.refs for each in begun] == [[refs[0], refs[3]], [refs[1]], [refs[2], refs[4]]]
    await calls.close()


async def test_a_message_whose_producer_closes_meanwhile_is_refused(calls):
    outbox = Outbox(1 << 20, 1 << 20, lambda: None)
    target = Target("t", (), traced=False)
    await calls.close()
    given = target, None, b"x", NO_EXTRAS, Due(DELAYS_MS, 5), 1, NO_LABELS, None, "k"
    with pytest.raises(Closed):
        KeyedIntake(outbox, calls, None, 30).add(*given, if_absent=False)
    assert outbox.used_bytes == 0


async def test_a_request_is_no_larger_than_a_shard_takes_however_large_a_frame_may_be(calls):
    outbox = Outbox(1 << 30, BATCH_BYTES_DEFAULT, lambda: None)
    owner = SimpleNamespace(open_target=None, settled=lambda batch: None)
    intake = KeyedIntake(outbox, calls, owner, 30)
    target, body = Target("t", (), traced=False), bytes(MESSAGE_BYTES_DEFAULT)
    for key in ("k", "l"):
        given = target, None, body, NO_EXTRAS, Due(DELAYS_MS, 5), 1, NO_LABELS, None, key
        intake.add(*given, if_absent=False)
    sizes = [batch.size for batch in intake]
    await calls.close()
    assert max(sizes) < BATCH_BYTES_DEFAULT < sum(sizes)


async def test_a_flush_does_not_wait_for_what_another_thread_asks_behind_it(calls, monkeypatch):
    asked = []
    take = calls.lanes.take

    def taken_and_asked_again():
        taken = take()
        if not asked:
            asked.append(calls.lanes.gather("way", ("t", "k"), 0.0, SHARD_0))
        return taken

    monkeypatch.setattr(calls.lanes, "take", taken_and_asked_again)
    await calls.flush(30)
    assert asked
    await calls.close()
