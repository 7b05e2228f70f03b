"""A signal whose handler raises in the middle of a call costs that call's own messages alone."""

from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from duemq import producing
from duemq.errors import Closed
from duemq.message import Outgoing
from duemq.producing.batch_encoding import Numbers
from duemq.producing.intake import Intake
from duemq.producing.keyed.batch import KeyedBatch
from duemq.producing.keyed.calls import TimerCalls
from duemq.producing.keyed.intake import KeyedIntake
from duemq.producing.outbox import Outbox, Target
from duemq.settings import ClientSettings
from duemq.v1.broker_pb2 import SendRequest
from tests.interruption import Interrupt, interrupted

SIZE = 1 << 20
FOLDER = str(Path(producing.__file__).parent)


def in_producing(file):
    return file.startswith(FOLDER)


class Calls(TimerCalls):
    """Nobody sends what it takes."""

    shards = 1

    def __init__(self):
        super().__init__(SimpleNamespace(settings=ClientSettings()))
        self.woken = 0

    def wake(self):
        self.woken += 1


class Sends:
    """A producer up to what its event loop would see."""

    def __init__(self, check=lambda: None):
        self.woken = 0
        self.outbox = Outbox(SIZE, SIZE, self._wake, check)
        self.calls = Calls()
        keyed = KeyedIntake(self.outbox, self.calls, SimpleNamespace(open_target=None), 30)
        self.intake = Intake(self.outbox, keyed)
        self.target = Target("t", (), traced=False)

    def _wake(self):
        self.woken += 1

    def send(self, *messages, **common):
        chunk = list(messages), all(isinstance(each, bytes) for each in messages)
        self.intake.offer_chunk(self.target, chunk, Outgoing(b"", **common), [])


def labels(records):
    """Key and timer key are those of the body, or none."""
    return {(each.body, each.key, each.timer_key) for each in records}


PLAIN = Outgoing(b"first")
CALLS = {
    "one": [Outgoing(b"second", key="k1")],
    "one that waits": [Outgoing(b"second", key="k1", delay="1h")],
    "a list": [b"second"],
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("first", [PLAIN, Outgoing(b"first", key="k0")], ids=["plain", "key"])
def test_the_messages_before_and_behind_it_are_sent_as_they_are(name, first):
    common = {"key": "k1"} if name == "a list" else {}
    delay = "1h" if name == "one that waits" else None
    for at in count(1):
        sends = Sends()
        sends.send(first)
        batches = sends.outbox.take_arrivals()
        woken = sends.woken
        was = interrupted(lambda: sends.send(*CALLS[name], **common), at, in_producing)  # noqa: B023
        sends.send(Outgoing(b"third", key="k2", delay=delay))
        assert not sends.outbox.arrivals or sends.woken > woken
        batches += sends.outbox.take_arrivals()
        assert all(each.count for each in batches)
        encoded = [each.encode(0, Numbers(1, 0, n)) for n, each in enumerate(batches)]
        records = [
            record
            for each in encoded
            for made in SendRequest.FromString(each).batches
            for record in made.records.records
        ]
        wanted = {(b"first", first.key or "", ""), (b"third", "k2", "")}
        assert wanted <= labels(records) <= wanted | {(b"second", "k1", "")}
        assert len(records) == len(labels(records))
        if not was:
            break
    assert at > 20


@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.parametrize("seen", [True, False], ids=["behind it", "with it"])
def test_of_a_timer_shard_too(seen, signals, monkeypatch):
    left, cut = [], KeyedBatch.cut

    def interrupted_too(batch):
        if left:  # both signals came at once
            raise left.pop()
        cut(batch)

    monkeypatch.setattr(KeyedBatch, "cut", interrupted_too)
    for at in count(1):
        left[:] = [Interrupt] * (signals - 1)
        sends = Sends()
        sends.send(Outgoing(b"first", key="k0", delay="1h", timer_key="a"))
        calls = sends.calls.lanes.take() if seen else []
        woken = sends.calls.woken
        second = Outgoing(b"second", key="k1", delay="1h", timer_key="b")
        was = interrupted(lambda: sends.send(second), at, in_producing)  # noqa: B023
        sends.send(Outgoing(b"third", key="k2", delay="1h", timer_key="c"))
        assert sends.calls.woken > woken or not seen
        calls += sends.calls.lanes.take()
        records = [record for call in calls for record in call.request(b"").records.records]
        wanted = {(b"first", "k0", "a"), (b"third", "k2", "c")}
        assert wanted <= labels(records) <= wanted | {(b"second", "k1", "b")}
        batches = [call.batch for call in calls]
        assert [key for each in batches for key in each.timer_keys] == [
            r.timer_key for r in records
        ]
        assert sends.outbox.used_bytes <= sum(each.reserved for each in batches)
        if not was:
            break
    assert at > 20


def test_who_may_not_add_gives_no_room_that_others_have_taken():
    def check():
        raise Closed("the producer belongs to another event loop")

    sends = Sends(check)
    with pytest.raises(Closed):
        sends.send(Outgoing(b"first", delay="1h", timer_key="a"))
    assert sends.outbox.used_bytes == 0
