"""The synchronous faces: threads on one side, the thread "duemq-io" on the other."""

import asyncio
import os
import sys
import threading
from asyncio.subprocess import PIPE
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import duemq
from duemq.errors import Closed, InvalidArgument, Timeout, Unavailable
from duemq.producing import blocking
from duemq.settings import ClientSettings, ProducerSettings
from duemq.transport import loop_thread
from duemq.transport.loop_thread import LoopThread
from tests.service.fake_cluster import FakeCluster


@pytest.fixture
async def cluster():
    cluster = FakeCluster()
    await cluster.start("a", "b", timers=1)
    cluster.topic("t")
    yield cluster
    await cluster.stop()


async def test_a_first_program(cluster):
    def program():
        with duemq.Producer(cluster.nameserver) as producer:
            return producer.send("t", b"hello", delay="5s"), producer.send("t", b"hello")

    delayed, plain = await asyncio.to_thread(program)
    assert delayed.handle
    assert plain.offset == 0


async def test_submit_from_many_threads(cluster):
    def program():
        with duemq.Producer(cluster.nameserver) as producer, ThreadPoolExecutor(8) as threads:

            def work(number):
                pending = [producer.submit("t", b"%d/%d" % (number, i)) for i in range(500)]
                return [each.result() for each in pending]

            return [receipt for part in threads.map(work, range(8)) for receipt in part]

    receipts = await asyncio.to_thread(program)
    places = {(receipt.broker, receipt.queue, receipt.offset) for receipt in receipts}
    stored = [body for broker in cluster.brokers.values() for body in broker.bodies("t")]
    assert len(places) == len(set(stored)) == len(stored) == 4_000
    assert len({receipt.message_id for receipt in receipts}) == 4_000


async def test_submit_keeps_a_threads_order_for_a_key(cluster):
    def program():
        with duemq.Producer(cluster.nameserver) as producer:
            pending = [producer.submit("t", b"%d" % i, ordering_key="k") for i in range(2_000)]
            return [each.result() for each in pending]

    receipts = await asyncio.to_thread(program)
    assert [receipt.offset for receipt in receipts] == list(range(2_000))


async def test_send_many_and_flush(cluster):
    def program():
        with duemq.Producer(cluster.nameserver) as producer:
            receipts = producer.send_many("t", (b"%d" % i for i in range(3_000)))
            pending = producer.submit("t", b"x")
            producer.flush()
            return len(receipts), pending.done()

    assert await asyncio.to_thread(program) == (3_000, True)


async def test_a_full_buffer_blocks_the_caller(cluster):
    cluster.topic("t", queues=1)
    settings = ProducerSettings(buffer_bytes=2_000)
    broker_gates = [broker.gate for broker in cluster.brokers.values()]
    closed, entered = asyncio.Event(), threading.Event()

    def close():
        for gate in broker_gates:
            gate.clear()
        closed.set()

    def program():
        with duemq.Producer(cluster.nameserver, settings=settings) as producer:
            producer.send("t", b"x")
            loop.call_soon_threadsafe(close)
            for _ in range(8):
                producer.submit("t", bytes(500))
            entered.set()

    loop = asyncio.get_running_loop()
    running = asyncio.create_task(asyncio.to_thread(program))
    await closed.wait()
    await asyncio.wait([running], timeout=0.2)
    blocked = not entered.is_set()
    for gate in broker_gates:
        gate.set()
    await running
    assert blocked


async def test_cancel(cluster):
    cluster.timers[0].pending = {0}

    def program():
        with duemq.Producer(cluster.nameserver) as producer:
            handle = producer.send("t", b"x", delay=60).handle
            return producer.cancel(handle), producer.cancel([handle, handle])

    assert await asyncio.to_thread(program) == ("cancelled", ["cancelled", "cancelled"])


async def test_errors_name_field_value_and_limit(cluster):
    def program():
        with duemq.Producer(cluster.nameserver) as producer:
            for arguments, field in [
                (("t", "text"), "body"),
                (("t", None), "body"),
            ]:
                with pytest.raises(InvalidArgument) as raised:
                    producer.submit(*arguments)
                assert raised.value.field == field
            with pytest.raises(InvalidArgument) as raised:
                producer.send("t", b"x", delay=-1)
            assert (raised.value.field, raised.value.value) == ("delay", "-1")

    await asyncio.to_thread(program)


async def test_a_closed_producer(cluster):
    def program():
        producer = duemq.Producer(cluster.nameserver)
        producer.send("t", b"x")
        producer.close()
        producer.close()
        for call in (
            lambda: producer.send("t", b"x"),
            lambda: producer.send("another", b"x"),
            producer.flush,
            lambda: producer.cancel("dmq1"),
        ):
            with pytest.raises(Closed):
                call()

    await asyncio.to_thread(program)


async def test_the_loop_thread_lives_as_long_as_its_clients(cluster):
    def alive():
        return [thread for thread in threading.enumerate() if thread.name == loop_thread.NAME]

    def program():
        with duemq.Producer(cluster.nameserver), duemq.Admin(cluster.nameserver):
            assert len(alive()) == 1
        assert not alive()

    await asyncio.to_thread(program)


async def test_no_nameserver():
    settings = ProducerSettings(client=ClientSettings(connect_timeout_s=0.2))
    with pytest.raises(Unavailable, match="no nameserver answered"):
        await asyncio.to_thread(lambda: duemq.Producer("127.0.0.1:1", settings=settings))
    assert not [thread for thread in threading.enumerate() if thread.name == loop_thread.NAME]


async def test_a_wait_that_is_over_first(cluster):
    for broker in cluster.brokers.values():
        broker.gate.clear()

    def program():
        with duemq.Producer(cluster.nameserver) as producer:
            pending = producer.submit("t", b"x")
            with pytest.raises(Timeout, match=r"no answer within 0\.01 s yet"):
                pending.result(timeout=0.01)
            loop.call_soon_threadsafe(release)
            return pending.result()

    def release():
        for broker in cluster.brokers.values():
            broker.gate.set()

    loop = asyncio.get_running_loop()
    assert (await asyncio.to_thread(program)).offset == 0


async def test_if_absent_is_true_or_false(cluster):
    def program():
        with duemq.Producer(cluster.nameserver) as producer:
            producer.send("t", b"x", delay="1h", timer_key="k", if_absent="no")

    with pytest.raises(InvalidArgument, match="if_absent: 'no' is not allowed: True or False"):
        await asyncio.to_thread(program)


async def test_a_closed_admin(cluster):
    def program():
        with duemq.Admin(cluster.nameserver) as admin:
            assert admin.cancel([]) == []
        with pytest.raises(Closed):
            admin.topics()

    await asyncio.to_thread(program)


FORKING = """
import os, sys
import duemq

producer = duemq.Producer(sys.argv[1])
producer.send("t", b"parent")
if os.fork() == 0:
    try:
        producer.send("t", b"child")
    except duemq.errors.Closed as error:
        assert "fork before the first client" in str(error), error
        producer.close()
        try:
            duemq.Producer(sys.argv[1])
        except duemq.errors.Closed:
            os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
producer.send("t", b"parent again")
"""

FORKED_AFTER_THE_LAST = """
import asyncio, os, sys
import duemq, duemq.aio

async def start_and_close():
    async with duemq.aio.Producer(sys.argv[1]) as producer:
        await producer.send("t", b"parent")

with duemq.Producer(sys.argv[1]) as producer:
    producer.send("t", b"parent")
if os.fork() == 0:
    for connect in (lambda: duemq.Producer(sys.argv[1]), lambda: asyncio.run(start_and_close())):
        try:
            connect()
        except duemq.errors.Closed as error:
            assert "fork before the first client" in str(error), error
        else:
            os._exit(1)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
asyncio.run(start_and_close())
"""

FORKED_WHILE_FULL = """
import os, signal, sys
import duemq

producer = duemq.Producer(sys.argv[1])
producer.send("t", b"parent")
outbox = producer._outbox
outbox.used_bytes += outbox.limit_bytes
if os.fork() == 0:
    signal.alarm(50)
    try:
        producer.submit("t", b"child")
    except duemq.errors.Closed:
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
outbox.used_bytes -= outbox.limit_bytes
producer.send("t", b"parent again")
"""

FORKED_WHILE_SENT = """
import os, signal, sys
import duemq

producer = duemq.Producer(sys.argv[1])
producer.send("t", b"parent")
pending = producer.submit("t", b"parent again")
pending.result()
pending._batch.done = False
if os.fork() == 0:
    signal.alarm(50)
    try:
        pending.result()
    except duemq.errors.Closed:
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
pending._batch.done = True
"""

INTERRUPTED = """
import signal, sys
import duemq
from duemq.producing.batch import Batch

signal.alarm(50)
producer = duemq.Producer(sys.argv[1])
producer.send("t", b"first")
add_extras = Batch.add_extras

def interrupted(batch, extras):  # as by a signal
    for call in (lambda: producer.send("t", b"no"), producer.flush, producer.close):
        try:
            call()
        except RuntimeError as error:
            assert "raise in its handler" in str(error)
        else:
            sys.exit("it was not refused")
    add_extras(batch, extras)

Batch.add_extras = interrupted
producer.submit("t", b"second", key="k")
producer.submit("t", b"third", key="k", timer_key="x", delay="1h")
"""

# Else a nameserver that is slow is said to be none.
PATIENT = """
from duemq.transport.routing import diagnosis
diagnosis.QUESTION_TIMEOUT_S = 60.0
"""

LEFT_OPEN = """
import sys
import duemq

producer = duemq.Producer(sys.argv[1])
for number in range(1000):
    producer.submit("t", b"%d" % number)
"""


@pytest.mark.parametrize(
    ("program", "stored"),
    [
        (FORKING, 2),
        (FORKED_AFTER_THE_LAST, 2),
        (FORKED_WHILE_FULL, 2),
        (FORKED_WHILE_SENT, 2),
        (INTERRUPTED, 2),
        (LEFT_OPEN, 1_000),
    ],
)
async def test_a_program(cluster, program, stored):
    """A child process may not use its parent's producer; one left open is closed at exit."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", PATIENT + program, cluster.nameserver, stderr=PIPE
    )
    _, said = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, said.decode()) == (0, "")
    assert sum(len(broker.bodies("t")) for broker in cluster.brokers.values()) == stored


def test_blocking_calls_inside_the_loop_thread_are_refused():
    thread = LoopThread.acquire()

    async def inside():
        async def nothing():
            return None

        with pytest.raises(RuntimeError, match=r"use duemq\.aio there"):
            thread.run(nothing())

    try:
        thread.run(inside())
    finally:
        thread.release()


async def test_what_would_wait_for_the_loop_thread_is_refused_inside(cluster):
    """As in a receipt's callback."""

    def program():
        with duemq.Producer(cluster.nameserver) as producer:
            producer.send("t", b"1")
            outbox = producer._outbox

            def full():
                outbox.used_bytes += outbox.limit_bytes
                try:
                    producer.submit("t", b"no")
                finally:
                    outbox.used_bytes -= outbox.limit_bytes

            async def inside():
                for call in (
                    lambda: producer.send("t", b"no"),
                    lambda: producer.send_many("t", [b"no"]),
                    lambda: producer.submit("t", b"2").result(timeout=1),
                    full,
                ):
                    with pytest.raises(RuntimeError, match=r"use duemq\.aio there"):
                        call()

            producer._hosted.run(inside())

    await asyncio.to_thread(program)
    stored = [body for broker in cluster.brokers.values() for body in broker.bodies("t")]
    assert sorted(stored) == [b"1", b"2"]


def test_who_looks_for_an_interrupted_send_takes_no_lock_and_waits_for_nobody_else_s():
    """A signal handler may raise wherever a call has ended, and nobody would let go of it."""
    locks = threading.Lock(), threading.Lock()
    holders = (SimpleNamespace(lock=lock) for lock in locks)
    core = SimpleNamespace(outbox=next(holders), _timer_calls=next(holders))
    held, before = [], sys.getprofile()
    sys.setprofile(lambda *_: held.append(any(lock.locked() for lock in locks)))
    try:
        blocking.check_locks(core)
    finally:
        sys.setprofile(before)
    assert held
    assert not any(held)
    for lock in locks:
        with lock:
            blocking.check_locks(core)


def test_a_thread_of_the_parent_process_is_not_used():
    thread = LoopThread.acquire()
    try:
        thread._pid = os.getpid() + 1

        async def nothing():
            return None

        with pytest.raises(Closed, match="fork before the first client"):
            thread.run(nothing())
        consumer = duemq.PushConsumer("g", "t", print)
        consumer._thread = thread
        consumer.close()  # the parent's business
    finally:
        thread._pid = os.getpid()
        thread.release()
