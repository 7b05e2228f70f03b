"""Nothing that was handed over is lost in silence: not at close, not at exit, not in between."""

import asyncio
import logging
import sys
from functools import partial

import pytest

import duemq
from duemq import aio
from duemq.errors import (
    Closed,
    DuemqError,
    InvalidArgument,
    NotAllSent,
    Timeout,
    TooLarge,
    TopicNotFound,
)
from duemq.producing.intake import FIRST_CHUNK_MESSAGES
from duemq.protocol.limits import MESSAGE_BYTES_DEFAULT
from duemq.settings import ProducerSettings
from duemq.testing import MemoryCluster
from duemq.testing.aio import MemoryCluster as AioMemoryCluster
from duemq.v1 import error_pb2
from tests.service.fake_cluster import FakeCluster, refusal
from tests.service.running_cluster import until
from tests.service.test_producer import overdue, taken_in

SOON = ProducerSettings(close_timeout_s=0.2)


@pytest.fixture
async def cluster():
    cluster = FakeCluster()
    await cluster.start("a")
    cluster.topic("t")
    yield cluster
    await cluster.stop()


async def go_away(cluster):
    for broker in cluster.brokers.values():
        await broker.stop()


def errors_in(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "duemq.producer" and record.levelno == logging.ERROR
    ]


async def test_closing_with_unsent_messages_raises_and_says_which(cluster, caplog):
    producer = aio.Producer(cluster.nameserver, settings=SOON)
    await producer.start()
    await producer.send("t", b"x")
    await go_away(cluster)
    pending = [producer.submit("t", b"%d" % number) for number in range(10)]
    with pytest.raises(NotAllSent, match=r"10 messages not acknowledged \(10 to 't'\)") as raised:
        await producer.close()
    unsent = raised.value.unsent
    assert [each.message_id for each in unsent] == [each.message_id for each in pending]
    assert {each.topic for each in unsent} == {"t"}
    assert sorted(raised.value.failures) == list(range(10))
    with pytest.raises(Closed):
        await unsent[0]
    assert any(
        line.startswith("10 messages to topic t not acknowledged") for line in errors_in(caplog)
    )
    await producer.close()


async def test_a_blocking_producer_raises_too(cluster):
    loop = asyncio.get_running_loop()

    def program():
        try:
            with duemq.Producer(cluster.nameserver, settings=SOON) as producer:
                producer.send("t", b"x")
                asyncio.run_coroutine_threadsafe(go_away(cluster), loop).result()
                for number in range(10):
                    producer.submit("t", b"%d" % number)
        except NotAllSent as error:
            producer.close()
            return error

    error = await asyncio.to_thread(program)
    assert len(error.unsent) == 10
    assert isinstance(error.unsent[0], duemq.PendingReceipt)


async def test_the_error_of_the_body_is_not_masked(cluster, caplog):
    async def program():
        async with aio.Producer(cluster.nameserver, settings=SOON) as producer:
            await producer.send("t", b"x")
            await go_away(cluster)
            producer.submit("t", b"y")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await program()
    assert any("1 message to topic t" in line for line in errors_in(caplog))


async def test_what_failed_before_is_told_at_the_end(cluster, caplog):
    cluster.brokers["a"].refuse = lambda _: refusal(error_pb2.TOO_LARGE)
    producer = aio.Producer(cluster.nameserver)
    await producer.start()
    pending = producer.submit("t", b"x")
    await until(pending.done)
    assert len(errors_in(caplog)) == 1  # while it runs
    with pytest.raises(NotAllSent, match="TOO_LARGE"):
        await producer.close()


@pytest.mark.parametrize("how", ["awaited", "looked at", "called back", "sent", "sent many"])
async def test_who_was_told_is_not_told_again(cluster, how):
    cluster.brokers["a"].refuse = lambda _: refusal(error_pb2.TOO_LARGE)
    async with aio.Producer(cluster.nameserver) as producer:
        if how == "sent":
            with pytest.raises(TooLarge):
                await producer.send("t", b"x")
            return
        if how == "sent many":
            for messages in ([b"x", b"y"], [duemq.Outgoing(b"x"), b"y"]):
                with pytest.raises(NotAllSent):
                    await producer.send_many("t", messages)
            return
        pending = producer.submit("t", b"x")
        if how == "called back":
            told = asyncio.get_running_loop().create_future()
            pending.add_done_callback(told.set_result)
            assert await told is pending
            return
        if how == "looked at":
            await until(pending.done)
        with pytest.raises(TooLarge):
            await pending


def half_way(count):
    for number in range(count):
        yield b"%d" % number
    raise ValueError("half-way")


async def test_what_a_send_many_handed_over_before_it_failed_is_told_of_at_the_end(cluster):
    """Its caller hears of something else."""
    producer = aio.Producer(cluster.nameserver, settings=SOON)
    await producer.start()
    await producer.send("t", b"x")
    await go_away(cluster)
    with pytest.raises(ValueError, match="half-way"):
        await producer.send_many("t", half_way(FIRST_CHUNK_MESSAGES + 1))
    wrong = [b"%d" % number for number in range(FIRST_CHUNK_MESSAGES)] + ["text"]
    with pytest.raises(InvalidArgument, match="those in front of it are sent"):
        await producer.send_many("t", iter(wrong))
    with pytest.raises(NotAllSent) as raised:
        await producer.close()
    assert len(raised.value.unsent) == 2 * FIRST_CHUNK_MESSAGES


async def test_so_it_is_of_a_blocking_one(cluster):
    def send():
        producer = duemq.Producer(cluster.nameserver, settings=SOON)
        producer.send("t", b"x")
        asyncio.run_coroutine_threadsafe(go_away(cluster), loop).result()
        with pytest.raises(ValueError, match="half-way"):
            producer.send_many("t", half_way(FIRST_CHUNK_MESSAGES + 1))
        with pytest.raises(NotAllSent) as raised:
            producer.close()
        return len(raised.value.unsent)

    loop = asyncio.get_running_loop()
    assert await asyncio.to_thread(send) == FIRST_CHUNK_MESSAGES


def test_what_had_failed_by_then_its_error_tells():
    def mixed():
        yield b"x" * (MESSAGE_BYTES_DEFAULT + 1)
        yield from half_way(FIRST_CHUNK_MESSAGES)

    cluster, heard = MemoryCluster(), []
    with cluster.producer(on_error=lambda *told: heard.append(told)) as producer:
        with pytest.raises(ValueError, match="half-way") as raised:
            producer.send_many("t", mixed())
        [note] = raised.value.__notes__
        assert f"at most {MESSAGE_BYTES_DEFAULT}" in note
    assert not heard
    assert cluster.messages("t")


async def test_messages_of_one_batch_are_told_of_one_by_one(cluster):
    cluster.brokers["a"].gate.clear()
    producer = aio.Producer(cluster.nameserver, settings=SOON)
    await producer.start()
    first = producer.submit("t", b"in front")
    pending = [producer.submit("t", b"%d" % number) for number in range(4)]
    waiting = asyncio.create_task(_outcome(pending[1]))
    await asyncio.sleep(0)
    with pytest.raises(NotAllSent) as raised:
        await producer.close()
    assert isinstance(await waiting, Closed)
    unsent = {each.message_id for each in raised.value.unsent}
    expected = [first, pending[0], pending[2], pending[3]]
    assert unsent == {each.message_id for each in expected}


async def _outcome(pending):
    try:
        return await pending
    except DuemqError as error:
        return error


async def test_on_error_is_told_of_each_and_close_does_not_raise(cluster):
    told = []

    def on_error(pending, error):
        told.append((pending.message_id, type(error)))
        raise ZeroDivisionError  # is logged and stops nothing

    async with aio.Producer(cluster.nameserver, on_error=on_error, settings=SOON) as producer:
        await producer.send("t", b"x")
        await go_away(cluster)
        pending = [producer.submit("t", b"%d" % number) for number in range(3)]
    assert told == [(each.message_id, Closed) for each in pending]


async def test_on_error_cannot_close_a_blocking_producer_which_goes_on(cluster, caplog):
    loop, brokers = asyncio.get_running_loop(), cluster.brokers

    def program():
        told = []

        def give_up(receipt, error):
            told.append(error)
            producer.close()

        settings = ProducerSettings(send_timeout_s=0.2, close_timeout_s=0.2)
        producer = duemq.Producer(cluster.nameserver, on_error=give_up, settings=settings)

        def sent(body):
            while True:  # a slow machine may not get so far in time
                try:
                    return producer.send("t", body)
                except Timeout:
                    continue

        sent(b"x")
        asyncio.run_coroutine_threadsafe(go_away(cluster), loop).result(30)
        told.clear()
        with pytest.raises(Timeout):
            # Later than the first one's, so that this thread goes on when that is told.
            [producer.submit("t", b"lost"), producer.submit("t", b"y")][1].result(30)
        for broker in brokers.values():
            asyncio.run_coroutine_threadsafe(broker.start(), loop).result(30)
        return told, sent(b"z"), producer.close()

    told, receipt, _ = await asyncio.to_thread(program)
    assert isinstance(told[0], Timeout)
    assert receipt.broker == "a"
    assert any("on_error failed" in line for line in errors_in(caplog))


async def test_a_deadline_that_passes_is_told(cluster):
    told = asyncio.get_running_loop().create_future()
    settings = ProducerSettings(close_timeout_s=0.1)
    async with aio.Producer(
        cluster.nameserver, on_error=lambda _, error: told.set_result(error), settings=settings
    ) as producer:
        await producer.send("t", b"x")
        await go_away(cluster)
        producer.submit("t", b"y")
        await taken_in(producer)
        overdue(producer)
        assert isinstance(await told, Timeout)


def test_another_event_loop_is_refused_at_once():
    """Nothing would ever wake who waits there."""

    async def started():
        cluster = FakeCluster()
        await cluster.start("a")
        producer = aio.Producer(cluster.nameserver)
        await producer.start()
        await producer.send("t", b"x")
        return cluster, producer

    async def submitted(**options):
        await producer.submit("t", b"y", **options)

    with asyncio.Runner() as own:
        cluster, producer = own.run(started())
        for use in (
            lambda: producer.send("t", b"y"),
            lambda: producer.ready("t"),
            producer.flush,
            producer.close,
            submitted,
            lambda: submitted(ordering_key="k"),
        ):
            with asyncio.Runner() as other, pytest.raises(Closed, match="another event loop"):
                other.run(asyncio.wait_for(use(), 30))
        with pytest.raises(Closed, match="another event loop"):
            producer.submit("t", b"y")  # where none runs
        own.run(producer.send("t", b"z"))
        own.run(producer.close())
        own.run(cluster.stop())


async def test_done_callbacks(cluster):
    async with aio.Producer(cluster.nameserver) as producer:
        told = []
        pending = producer.submit("t", b"x")
        pending.add_done_callback(told.append)
        pending.add_done_callback(lambda _: 1 / 0)  # is logged and stops nothing
        receipt = await pending
        assert told == [pending]
        pending.add_done_callback(lambda each: told.append(each.message_id))
        assert told == [pending, receipt.message_id]


class Awaited:
    async def __call__(self, pending):
        """Nobody awaits what it returns."""


async def awaited(pending):
    """Likewise."""


def generating(pending):
    yield pending


@pytest.mark.parametrize("callback", [None, 5, awaited, Awaited(), partial(awaited), generating])
async def test_a_done_callback_that_would_not_run_is_refused_at_once(cluster, callback):
    async with aio.Producer(cluster.nameserver) as producer:
        pending = producer.submit("t", b"x")
        with pytest.raises(InvalidArgument) as raised:
            pending.add_done_callback(callback)
        assert raised.value.field == "callback"
        await pending


async def test_done_callbacks_of_a_blocking_producer(cluster):
    def program():
        told = []
        with duemq.Producer(cluster.nameserver) as producer:
            for number in range(100):
                producer.submit("t", b"%d" % number).add_done_callback(told.append)
        return told

    told = await asyncio.to_thread(program)
    assert len({each.result().message_id for each in told}) == len(told) == 100


LEFT = """
import sys
from functools import partial
import duemq

def hand_over():
    settings = duemq.ProducerSettings(close_timeout_s=0.2)
    producer = duemq.Producer(sys.argv[1], settings=settings)
    producer.send("t", b"x")
    print("go away", flush=True)
    sys.stdin.readline()
    for number in range(10):
        producer.submit("t", b"y")

hand_over()
"""

LEFT_IN_ASYNCIO = """
import asyncio, sys
from duemq import aio

async def hand_over():
    producer = aio.Producer(sys.argv[1])
    await producer.start()
    await producer.send("t", b"x")
    print("go away", flush=True)
    sys.stdin.readline()
    for number in range(10):
        producer.submit("t", b"y")
    producer.submit("new", b"z")

asyncio.run(hand_over())
"""


LOST = b"10 messages to topic t not"
EARLY = b"1 message to topic new not"


@pytest.mark.parametrize(
    ("program", "lost"),
    [(LEFT, [LOST]), (LEFT_IN_ASYNCIO, [LOST, EARLY])],
    ids=["blocking", "asyncio"],
)
async def test_a_program_that_ends_without_closing_says_what_it_lost(cluster, program, lost):
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cluster.nameserver, stdin=pipe, stdout=pipe, stderr=pipe
    )
    await process.stdout.readline()
    await go_away(cluster)
    _, said = await asyncio.wait_for(process.communicate(b"\n"), 60)
    assert process.returncode == 0
    assert all(each in said for each in lost), said
    assert b"Traceback" not in said


def test_the_twin_raises_alike():
    producer = MemoryCluster().producer()
    producer.submit("t", bytes(5 << 20))  # more than the broker takes
    with pytest.raises(NotAllSent, match="1 message not acknowledged"):
        producer.close()
    producer.close()


async def test_the_twins_tell_on_error_alike():
    told = []
    options = {"on_error": lambda receipt, error: told.append((receipt.topic, type(error)))}
    async with AioMemoryCluster().producer(**options) as producer:
        producer.submit("t", bytes(5 << 20))
    with MemoryCluster().producer(**options) as blocking:
        blocking.submit("t", bytes(5 << 20))
    assert told == [("t", TooLarge)] * 2


async def test_the_asyncio_twin_raises_alike():
    async with AioMemoryCluster().producer() as producer:
        pending = producer.submit("t", bytes(5 << 20))
        with pytest.raises(TooLarge):
            await pending
    with pytest.raises(NotAllSent):
        async with AioMemoryCluster().producer() as producer:
            producer.submit("t", bytes(5 << 20))


async def test_the_asyncio_twin_finds_no_topic_alike():
    settings = ProducerSettings(create_topics=False)
    producer = AioMemoryCluster().producer(settings=settings)
    with pytest.raises(Closed, match="not started"):
        producer.submit("t", b"x")
    async with producer:
        for key in (None, "k"):
            pending = producer.submit("t", b"x", ordering_key=key)
            with pytest.raises(TopicNotFound):
                await pending
        with pytest.raises(TopicNotFound):
            await producer.ready("t")
