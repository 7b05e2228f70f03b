import asyncio
import pickle
import selectors
import struct
import threading
from unittest.mock import ANY

import pytest

from duemq.errors import InvariantError, NotAllSent, ReadOnly, Timeout
from duemq.producing import handle
from duemq.producing.batch import Batch
from duemq.producing.losses import Losses
from duemq.producing.receipt import AwaitableReceipt, PendingReceipt, Receipts, receipt, wait
from duemq.protocol.due import DELAYS_MS


def batch(number, bodies=(b"a", b"b"), due_field=0):
    made = Batch("t", (None, due_field), {}, number, b"%023x" % number, 0)
    made.bodies = list(bodies)
    return made


def stored(made, offset=10):
    due_ms = struct.pack("<qq", 1_000, 2_000) if made.timed else b""
    made.stored("broker", 99, 3, offset, 5, due_ms)
    made.wake()
    return made


def test_a_plain_receipt():
    first = receipt(stored(batch(1)), 1)
    assert (first.topic, first.broker, first.queue, first.offset) == ("t", "broker", 3, 11)
    assert (first.store_ms, first.handle, first.due_ms) == (5, None, None)
    assert first.message_id == "00000000000000000000001001"
    assert "broker/3@11" in repr(first)


def test_a_receipt_is_pickled_without_what_travels_meanwhile():
    made = batch(1)
    other = made.growing[made.way] = batch(2)
    other.on_done(threading.Lock().release)
    again = pickle.loads(pickle.dumps(receipt(stored(made), 1)))
    assert (again.offset, again.message_id) == (11, made.message_id(1))
    assert again == receipt(made, 1) != receipt(made, 0)
    receipts = Receipts([(made, 0, 2)])
    assert (receipts.index(again), {again: 1}[receipts[1]]) == (1, 1)
    assert again == ANY


def test_a_delayed_receipt():
    second = receipt(stored(batch(1, due_field=DELAYS_MS)), 1)
    assert (second.queue, second.offset, second.due_ms) == (None, None, 2_000)
    decoded = handle.decode(second.handle)
    assert (decoded.store_id, decoded.queue_id, decoded.offset, decoded.due_ms) == (
        99,
        3,
        11,
        2_000,
    )


@pytest.mark.parametrize("raised", [KeyError, SystemExit, asyncio.CancelledError])
def test_what_callbacks_raise_is_logged_and_stops_nobody(raised, caplog):
    def fail(*_):
        raise raised

    made, told = batch(1), []
    PendingReceipt(made, 0).add_done_callback(fail)
    PendingReceipt(made, 1).add_done_callback(told.append)
    stored(made)
    PendingReceipt(made, 1).add_done_callback(fail)
    assert len(told) == 1
    lost = batch(2)
    lost.failed(ReadOnly("full"))
    Losses(PendingReceipt, fail).add(lost, lost.error)
    lines = [record.getMessage().partition(" failed")[0] for record in caplog.records]
    assert lines == ["the callback of a receipt"] * 2 + ["on_error"] * 2


def test_ctrl_c_goes_on_but_in_no_other_thread_it_is_none(caplog):
    def fail(*_):
        raise KeyboardInterrupt

    def both():
        made, lost = batch(1), batch(2)
        lost.failed(ReadOnly("full"))
        PendingReceipt(made, 0).add_done_callback(fail)
        stored(made)
        Losses(PendingReceipt, fail).add(lost, lost.error)
        done.append(True)

    done = []
    with pytest.raises(KeyboardInterrupt):
        both()
    assert not caplog.records
    thread = threading.Thread(target=both)
    thread.start()
    thread.join()
    assert done
    assert len(caplog.records) == 3


def test_a_loop_of_another_thread_wakes_when_the_message_is_stored():
    """It has nothing else that would wake it."""
    made, offsets, asleep = batch(1), [], threading.Event()

    class Telling(selectors.DefaultSelector):
        def select(self, timeout=None):
            if timeout is None:
                asleep.set()
            return super().select(timeout)

    async def wait_for_it():
        offsets.append((await AwaitableReceipt(made, 1)).offset)

    def run():
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(Telling())) as runner:
            runner.run(wait_for_it())

    waiting = threading.Thread(target=run, daemon=True)
    waiting.start()
    assert asleep.wait(60)
    stored(made)
    waiting.join(60)
    assert offsets == [11]


def test_a_wait_that_is_over_first_has_told_nobody():
    made = batch(1)
    pending = PendingReceipt(made, 1)
    with pytest.raises(Timeout):
        pending.result(timeout=0)
    made.failed(ReadOnly("full"))
    assert made.untold() == [0, 1]
    with pytest.raises(ReadOnly):
        pending.result()
    assert made.untold() == [0]


async def begun(receipt):
    """A task that waits for it by now."""
    waiting, turn = asyncio.ensure_future(receipt), asyncio.Event()
    asyncio.get_running_loop().call_soon(turn.set)
    await turn.wait()
    return waiting


async def test_nor_has_one_that_is_cancelled():
    made = batch(1)
    for cancelled in (True, False):
        waiting = await begun(AwaitableReceipt(made, 1))
        assert made.untold() == [0]
        if cancelled:
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert made.untold() == [0, 1]
    made.failed(ReadOnly("full"))
    made.wake()
    with pytest.raises(ReadOnly):
        await waiting
    assert made.untold() == [0]


@pytest.mark.parametrize("error", [ReadOnly("full"), None])
async def test_what_is_known_as_the_wait_is_cancelled_is_told_if_it_is_a_failure(error):
    """Who was to hear of it has just been told that somebody waits."""
    made = batch(1)
    waiting = await begun(AwaitableReceipt(made, 1))
    if error is None:
        stored(made)
    else:
        made.failed(error)
    made.wake()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError if error is None else ReadOnly):
        await waiting


def test_what_is_known_as_the_wait_is_over_is_told(monkeypatch):
    """Else nobody would be: who was to hear of it has just been told that somebody waits."""
    made = batch(1)

    def late(waited, timeout_s):
        waited.failed(ReadOnly("full"))
        raise Timeout("no answer yet")

    monkeypatch.setattr("duemq.producing.receipt.wait", late)
    with pytest.raises(ReadOnly):
        PendingReceipt(made, 1).result(timeout=1)


def test_waiting():
    made = batch(1)
    pending = PendingReceipt(made, 0)
    assert not pending.done()
    with pytest.raises(Timeout):
        pending.result(timeout=0)
    with pytest.raises(InvariantError):
        receipt(made, 0)
    woken = []
    assert made.on_done(lambda: woken.append(1))
    stored(made)
    assert woken == [1]
    assert not made.on_done(lambda: woken.append(2))
    wait(made, None)
    assert pending.result().offset == 10


def test_an_error_is_raised_for_each_message_anew():
    made = batch(1)
    made.failed(ReadOnly("disk full", field="f"))
    raised = []
    for index in range(2):
        with pytest.raises(ReadOnly, match="disk full") as error:
            receipt(made, index)
        assert error.value.field == "f"
        raised.append(error.value)
    assert raised[0] is not raised[1]


def test_receipts_are_a_sequence():
    one, two = stored(batch(1)), stored(batch(2), 20)
    receipts = Receipts([(one, 0, 2), (two, 1, 1)])
    assert [each.offset for each in receipts] == [10, 11, 21]
    assert [receipts[index].offset for index in range(3)] == [10, 11, 21]
    assert receipts[-1].offset == 21
    assert [each.offset for each in receipts[1:]] == [11, 21]
    assert len(receipts) == 3
    assert receipts.checked() is receipts
    assert len(Receipts([])) == 0
    with pytest.raises(IndexError):
        receipts[3]


def test_receipts_say_which_failed():
    one, two = stored(batch(1)), batch(2)
    two.failed(ReadOnly("disk full"))
    receipts = Receipts([(one, 0, 2), (two, 0, 2)])
    with pytest.raises(NotAllSent, match="2 of 4 messages not stored") as raised:
        receipts.checked()
    assert set(raised.value.failures) == {2, 3}
    assert raised.value.receipts[0].offset == 10
    with pytest.raises(ReadOnly):
        raised.value.receipts[2]


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(NotAllSent("some", failures={1: ReadOnly("x")})))
    assert isinstance(error.failures[1], ReadOnly)
