import pytest

from duemq.errors import Closed, InvalidArgument, TooLarge
from duemq.producing.batch import RECORD_BYTES, Batch
from duemq.producing.batch_encoding import BLOCK_MESSAGES
from duemq.producing.outbox import (
    BATCH_AGE_MS_MAX,
    BODY_BYTES_MAX,
    Outbox,
    Target,
    body_of,
    chunks_of,
)
from duemq.protocol.balance import queue_of_key
from duemq.protocol.due import DELAY_LEVELS, DELAYS_MS, DUE_MS, DUE_MS_MAX, Due
from duemq.protocol.message_ids import ID_CHARS
from duemq.protocol.route import Queue

QUEUE = Queue("a", 1)


class Pump:
    def __init__(self):
        self.woken = 0

    def __call__(self):
        self.woken += 1


@pytest.fixture
def pump():
    return Pump()


@pytest.fixture
def outbox(pump):
    return Outbox(limit_bytes=10_000, frame_bytes=1_000, wake_pump=pump)


@pytest.fixture
def target():
    return Target("t", (QUEUE,), traced=True)


def add(outbox, target, body=b"x", queue=None, due=None, now_ms=0):
    return outbox.add(target, queue, body, None, due, now_ms)


def test_messages_of_one_way_grow_one_batch(outbox, target):
    first, second = add(outbox, target), add(outbox, target)
    assert first[0] is second[0]
    assert (first[1], second[1]) == (0, 1)
    assert outbox.take_arrivals() == [first[0]]
    assert outbox.take_arrivals() == []


def test_what_a_broker_may_refuse_for_its_due_time_does_not_travel_with_others(outbox, target):
    far = DUE_MS_MAX - 1
    dues = [Due(DELAY_LEVELS, 1), Due(DELAY_LEVELS, 2), Due(DELAYS_MS, 5), Due(DELAYS_MS, far)]
    batches = [add(outbox, target, due=due)[0] for due in (*dues, *dues)]
    assert batches[:4] == batches[4:]
    assert len(set(batches)) == 4
    assert [batch.due_field for batch in batches[:4]] == [due.field for due in dues]
    assert [batch.due_values for batch in batches[:4]] == [[due.value] * 2 for due in dues]
    of_list = outbox.add_list(target, None, [b"x"], None, dues[1], 0)
    assert (of_list.due_field, of_list.due_values) == (DELAY_LEVELS, [2])
    assert add(outbox, target, due=dues[1])[0] is not batches[1]  # it would overtake the list
    assert add(outbox, target, due=dues[0])[0] is batches[0]


def test_due_times_of_one_kind_travel_together(outbox, target):
    first = add(outbox, target, due=Due(DUE_MS, 1_790_000_000_000))[0]
    assert add(outbox, target, due=Due(DUE_MS, 1_790_000_000_001))[0] is first


def test_queues_and_kinds_of_due_time_have_batches_of_their_own(outbox, target):
    batches = {
        add(outbox, target)[0],
        add(outbox, target, queue=QUEUE)[0],
        add(outbox, target, due=Due(DELAYS_MS, 5))[0],
        add(outbox, target, queue=QUEUE, due=Due(DELAYS_MS, 5))[0],
    }
    assert len(batches) == 4


@pytest.mark.parametrize("then", [0, 1, 64], ids="{} queues".format)
def test_a_key_has_a_queue_while_their_number_changes(then):
    looked = iter([range(3), range(then), range(then)])

    class Changing(Target):
        @property
        def queues(self):
            return tuple(Queue("a", number) for number in next(looked))

        @queues.setter
        def queues(self, _):
            """It changes by itself."""

    assert Changing("t", (), traced=True).queue_for("key") == Queue("a", queue_of_key("key", 3))


def test_the_pump_is_woken_once_until_it_looks(outbox, target, pump):
    for _ in range(40):
        add(outbox, target, b"x" * 100)
    assert pump.woken == 1
    assert len(outbox.take_arrivals()) > 1
    add(outbox, target, b"x" * 990)
    assert pump.woken == 2


def test_a_pump_that_was_not_woken_for_a_ctrl_c_is_woken_again(target):
    woken = []

    def wake():
        woken.append(True)
        if len(woken) == 1:
            raise KeyboardInterrupt

    outbox = Outbox(limit_bytes=10_000, frame_bytes=1_000, wake_pump=wake)
    with pytest.raises(KeyboardInterrupt):
        add(outbox, target)
    assert len(woken) == 2
    later, _ = add(outbox, target)
    assert len(woken) == 3
    assert outbox.take_arrivals()[-1] is later


@pytest.mark.parametrize("alone", [True, False], ids=["a message", "a list"])
@pytest.mark.parametrize("signals", [1, 2])
def test_what_others_added_meanwhile_waits_for_nobody(target, monkeypatch, alone, signals):
    taken = []
    left = [KeyboardInterrupt, SystemExit][:signals]

    def wake():
        if len(left) == signals:  # others' threads run before this one does
            add(outbox, target, b"other")
            raise left.pop()
        taken.extend(outbox.take_arrivals())

    def interrupted(*given):
        if left:  # both signals came at once
            raise left.pop()
        after(*given)

    outbox = Outbox(limit_bytes=10_000, frame_bytes=1_000, wake_pump=wake)
    after = outbox._interrupted
    monkeypatch.setattr(outbox, "_interrupted", interrupted)
    given = (b"x", None, None, 0) if alone else ([b"x"], None, None, 0)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        (outbox.add if alone else outbox.add_list)(target, None, *given)
    assert b"other" in [body for each in taken for body in each.bodies]


def test_of_an_interrupted_list_is_sent_what_is_counted(outbox, target, monkeypatch):
    def filled(batch, *given):
        fill(batch, *given)
        raise KeyboardInterrupt

    fill = Batch.fill
    monkeypatch.setattr(Batch, "fill", filled)
    with pytest.raises(KeyboardInterrupt):
        outbox.add_list(target, None, [b"x"], None, None, now_ms=0)
    assert outbox.used_bytes == sum(each.size for each in outbox.take_arrivals())


def test_who_may_not_add_wakes_no_pump(target, pump):
    def check():
        raise Closed("the producer belongs to another event loop")

    outbox = Outbox(10_000, 1_000, pump, check)
    with pytest.raises(Closed):
        add(outbox, target)
    with pytest.raises(Closed):
        outbox.add_list(target, None, [b"x"], None, None, now_ms=0)
    assert not pump.woken


def test_a_batch_ends_at_the_frame_size(outbox, target):
    batches = [add(outbox, target, bytes(300))[0] for _ in range(4)]
    assert batches[0] is batches[1] is not batches[2] is batches[3]


def test_a_message_larger_than_the_frame_travels_alone(outbox, target):
    small, _ = add(outbox, target)
    large, index = add(outbox, target, bytes(5_000))
    assert large is not small
    assert index == 0
    assert add(outbox, target)[0] is not large


def test_a_batch_ends_with_its_message_ids(pump, target):
    outbox = Outbox(limit_bytes=1 << 30, frame_bytes=1 << 30, wake_pump=pump)
    last = [add(outbox, target, b"")[0] for _ in range(BLOCK_MESSAGES + 1)]
    assert last[0] is last[-2] is not last[-1]
    ids = {batch.message_id(i) for batch in (last[0], last[-1]) for i in range(batch.count)}
    assert len(ids) == BLOCK_MESSAGES + 1
    assert {len(each) for each in ids} == {ID_CHARS}


def test_an_old_batch_takes_no_more(outbox, target):
    old, _ = add(outbox, target, now_ms=0)
    assert add(outbox, target, now_ms=BATCH_AGE_MS_MAX)[0] is old
    assert add(outbox, target, now_ms=BATCH_AGE_MS_MAX + 1)[0] is not old


def test_a_batch_takes_no_more_once_the_clock_was_set_back(outbox, target):
    old, _ = add(outbox, target, now_ms=3_600_000)
    assert add(outbox, target, now_ms=3_599_990)[0] is old
    new, _ = add(outbox, target, now_ms=5)
    assert new is not old
    assert add(outbox, target, now_ms=6)[0] is new


def test_a_sealed_batch_takes_no_more(outbox, target):
    batch, _ = add(outbox, target)
    outbox.seal(batch)
    outbox.seal(batch)
    assert add(outbox, target)[0] is not batch


def test_a_list_is_a_batch_of_its_own_and_is_not_overtaken(outbox, target):
    before, _ = add(outbox, target, queue=QUEUE)
    listed = outbox.add_list(target, QUEUE, [b"a", b"b"], None, None, 0)
    after, _ = add(outbox, target, queue=QUEUE)
    assert outbox.take_arrivals() == [before, listed, after]
    assert listed.count == 2


def test_room(outbox, target):
    woken = []
    wake = lambda: woken.append(1)  # noqa: E731
    assert not outbox.on_room(wake)
    batch, _ = add(outbox, target, bytes(9_999))
    assert outbox.full
    assert outbox.used_bytes == batch.size == 9_999 + RECORD_BYTES
    assert outbox.on_room(wake)
    outbox.release(50)
    assert not woken
    outbox.release(batch.size - 50)
    assert woken == [1]
    assert outbox.used_bytes == 0


def test_closed(outbox, target):
    woken = []
    grown, _ = add(outbox, target, bytes(20_000))
    assert outbox.on_room(lambda: woken.append(1))
    outbox.close()
    assert woken == [1]
    assert not outbox.on_room(lambda: None)
    with pytest.raises(Closed):
        add(outbox, target)
    with pytest.raises(Closed):
        outbox.add_list(target, None, [b"a"], None, None, 0)
    assert outbox.take_arrivals() == [grown]


def test_bodies():
    assert body_of(bytearray(b"ab")) == body_of(memoryview(b"ab")) == b"ab"
    with pytest.raises(InvalidArgument, match="encode it first"):
        body_of("text")
    with pytest.raises(TooLarge) as raised:
        body_of(bytes(BODY_BYTES_MAX + 1))
    assert (raised.value.field, raised.value.limit) == ("body", str(BODY_BYTES_MAX))


def test_chunks():
    bodies = [bytes(10)] * 7 + [bytes(500)] + [b""] * (BLOCK_MESSAGES + 1)
    chunks = chunks_of(bodies, message_bytes=0, frame_bytes=30)
    assert [body for chunk in chunks for body in chunk] == bodies
    assert [len(chunk) for chunk in chunks] == [3, 3, 1, 1, BLOCK_MESSAGES, 1]
