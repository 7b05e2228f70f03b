"""Who is told in the twin of what was not stored, and what may be called there."""

import threading

import pytest

from duemq.errors import InvalidArgument, NotAllSent
from duemq.testing import MemoryCluster
from duemq.testing import aio as testing_aio

LEVEL = 19
"""There is none."""


@pytest.fixture
def cluster():
    return MemoryCluster()


@pytest.fixture
def told():
    return []


@pytest.fixture
def producer(cluster, told):
    cluster.create_topic("t")
    with cluster.producer(on_error=lambda _, error: told.append(error)) as producer:
        yield producer


def test_who_asks_for_the_outcome_is_told_and_nobody_else(producer, told):
    for call in (
        lambda: producer.send("t", b"", delay_level=LEVEL),
        lambda: producer.submit("t", b"", delay_level=LEVEL).result(),
    ):
        with pytest.raises(InvalidArgument):
            call()
    with pytest.raises(NotAllSent):
        producer.send_many("t", [b"1", b"2"], delay_level=LEVEL)
    called = []
    producer.submit("t", b"", delay_level=LEVEL).add_done_callback(called.append)
    producer.flush()
    assert (len(called), told) == (1, [])


@pytest.mark.parametrize("then", ["flush", "close", "deliver", "advance"])
def test_of_what_nobody_asks_for_on_error_is_told(cluster, producer, told, then):
    producer.submit("t", b"", delay_level=LEVEL)
    {
        "flush": producer.flush,
        "close": producer.close,
        "deliver": cluster.deliver,
        "advance": lambda: cluster.advance("1s"),
    }[then]()
    assert [error.field for error in told] == ["delay_levels"]


@pytest.fixture
def refused(cluster):
    """What becomes of calls where a producer tells."""
    found = []

    def tell(*_):
        for call in (
            lambda: producer.send("t", b"instead"),
            lambda: producer.send_many("t", [b"instead"]),
            lambda: producer.cancel("dmq1"),
            producer.flush,
            producer.close,
        ):
            with pytest.raises(RuntimeError) as raised:
                call()
            found.append(str(raised.value))
        producer.submit("t", b"goes")
        found.append(threading.current_thread().name)

    producer = cluster.producer(on_error=tell)
    producer.send("t", b"makes the topic")
    yield producer, tell, found
    producer.close()
    assert "duemq-io" not in {thread.name for thread in threading.enumerate()}


def test_where_on_error_is_told_blocking_calls_are_refused(cluster, refused):
    producer, _, found = refused
    producer.submit("t", b"", delay_level=LEVEL)
    producer.flush()
    assert ["blocking call inside" in text for text in found] == [True] * 5 + [False]
    assert found[-1] == "duemq-io"
    assert [each.body for each in cluster.messages("t")] == [b"makes the topic", b"goes"]
    producer.send("t", b"still open")


def test_where_a_receipt_calls_back_they_are_too(refused):
    producer, tell, found = refused
    producer.submit("t", b"").add_done_callback(tell)
    assert ["blocking call inside" in text for text in found] == [True] * 5 + [False]
    with pytest.raises(InvalidArgument):
        producer.submit("t", b"").add_done_callback("no function")


async def test_in_an_asyncio_program_too():
    told, cluster = [], testing_aio.MemoryCluster()
    cluster.create_topic("t")
    async with cluster.producer(on_error=lambda _, error: told.append(error)) as producer:
        with pytest.raises(InvalidArgument):
            await producer.send("t", b"", delay_level=LEVEL)
        with pytest.raises(InvalidArgument):
            await producer.submit("t", b"", delay_level=LEVEL)
        with pytest.raises(NotAllSent):
            await producer.send_many("t", [b""], delay_level=LEVEL)
        await producer.flush()
        assert told == []
        producer.submit("t", b"", delay_level=LEVEL)
        await producer.flush()
        assert [error.field for error in told] == ["delay_levels"]
