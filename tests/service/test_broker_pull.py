import asyncio
import threading
from collections.abc import AsyncIterator
from itertools import chain
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from duemq.errors import InvalidArgument, OffsetOutOfRange, TopicNotFound, Unavailable
from duemq.protocol.limits import SERVICE_IDS_FROM
from duemq.transport import status
from duemq.v1 import admin_pb2, broker_pb2, error_pb2, group_admin_pb2
from duemq_server.broker.edge.pull_stream import ParkedPull
from duemq_server.broker.edge.pulls.fetching import LINGER_MS_MAX
from duemq_server.broker.process import Broker
from duemq_server.broker.reading import reader
from duemq_server.broker.reading.pull import parse
from duemq_server.storage import frame, record
from duemq_server.storage.disk import RealDisk
from duemq_server.storage.tools.cut import cut
from tests.service.played_timer import claim_queues
from tests.service.running_broker import Client, batch, running_broker, topic_name
from tests.service.running_cluster import until

WAIT_MS = 20_000


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[tuple[Broker, Client]]:
    async with running_broker(tmp_path) as made:
        yield made


@pytest.fixture
def client(both: tuple[Broker, Client]) -> Client:
    return both[1]


async def parked(broker: Broker, count: int) -> None:
    """Returns when so many pulls are parked."""
    async with asyncio.timeout(60):
        while len(broker._pulls) != count:  # noqa: ASYNC110
            await asyncio.sleep(0)


def request(topic: str, request_id: int = 1, **fields: object) -> broker_pb2.PullRequest:
    queue = broker_pb2.QueuePull(topic=topic)
    return broker_pb2.PullRequest(request_id=request_id, queues=[queue], **fields)  # type: ignore[arg-type]


async def test_limits_of_a_pull_cut_and_go_on(client: Client) -> None:
    topic = topic_name()
    await client.send(batch(topic, [b"%d" % n for n in range(100)]))
    found, offset = [], 0
    while offset < 100:
        [records] = (await client.pull(topic, offset=offset, max_records=7)).queues
        bodies = [each.body for each in records.records.records]
        assert 0 < len(bodies) <= 7
        found += bodies
        offset = records.next_offset
    assert found == [b"%d" % n for n in range(100)]


async def test_a_pull_ends_between_two_frames_if_it_can(client: Client) -> None:
    topic = topic_name()
    for _ in range(3):
        await client.send(batch(topic, [b"x"] * 10))
    [records] = (await client.pull(topic, max_records=25)).queues
    assert records.next_offset == 20
    assert list(records.run_offsets) == [0, 10]


async def test_records_are_untraced_if_all_their_batches_said_so(client: Client) -> None:
    topic = topic_name()
    for untraced in (True, True, False, True):
        await client.send(batch(topic, [b"x"] * 2, untraced=untraced))
    for offset, count, untraced in ((0, 4, True), (1, 2, True), (2, 4, False), (6, 2, True)):
        [records] = (await client.pull(topic, offset=offset, max_records=count)).queues
        assert len(records.records.records) <= count
        assert (records.untraced, offset) == (untraced, offset)


async def test_many_small_frames_and_interleaved_queues(client: Client) -> None:
    topic = topic_name()
    await asyncio.gather(
        *(client.send(batch(topic, [b"%d" % n], queue_id=n % 4)) for n in range(400))
    )
    found = [await client.bodies(topic, queue_id) for queue_id in range(4)]
    assert sorted(chain(*found)) == sorted(b"%d" % n for n in range(400))
    assert all(int(body) % 4 == queue_id for queue_id in range(4) for body in found[queue_id])


async def test_a_filter_gives_what_matches_and_goes_past_the_rest(client: Client) -> None:
    topic = topic_name()
    tags = ["a", "b", "c", "a", ""] * 40
    await client.send(batch(topic, [b"%d" % n for n in range(200)], tags=tags))
    [records] = (await client.pull(topic, filter="a || c")).queues
    expected = [n for n in range(200) if tags[n] in ("a", "c")]
    assert [int(each.body) for each in records.records.records] == expected
    runs = zip(records.run_offsets, records.run_counts, strict=True)
    assert [first + n for first, count in runs for n in range(count)] == expected
    assert records.next_offset == 200
    [nothing] = (await client.pull(topic, filter="zzz")).queues
    assert (list(nothing.records.records), nothing.next_offset) == ([], 200)


async def test_several_queues_in_one_pull(client: Client) -> None:
    topic = topic_name()
    await client.send(batch(topic, [b"a"]), batch(topic, [b"b"], queue_id=2))
    queues = [broker_pb2.QueuePull(topic=topic, queue_id=n) for n in range(4)]
    response = await client.broker.Pull(broker_pb2.PullRequest(queues=queues))
    assert sorted(each.queue_id for each in response.queues) == [0, 2]


async def test_an_append_wakes_a_parked_pull(both: tuple[Broker, Client]) -> None:
    broker, client = both
    topic = topic_name()
    await client.send(batch(topic, [b"a"]))
    waiting = asyncio.ensure_future(client.pull(topic, offset=1, wait_ms=WAIT_MS))
    await parked(broker, 1)
    await client.send(batch(topic, [b"other queue"], queue_id=1))
    await client.send(batch(topic, [b"b"]))
    [records] = (await waiting).queues
    assert [each.body for each in records.records.records] == [b"b"]
    assert len(broker._pulls) == 0


async def test_a_parked_pull_gives_what_any_of_its_queues_got_in_one_commit(
    both: tuple[Broker, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, client = both
    topic = topic_name()
    await client.send(*(batch(topic, [b"old"], queue_id=n) for n in range(4)))
    queues = [broker_pb2.QueuePull(topic=topic, queue_id=n, offset=1) for n in range(4)]
    pull = broker_pb2.PullRequest(queues=queues, wait_ms=WAIT_MS)
    waiting = asyncio.ensure_future(client.broker.Pull(pull))
    await parked(broker, 1)
    store, synced = broker.store, broker._log_loop._synced
    frames = store.frames_in + 2
    # The disk may have the first one before the second one has come.
    with monkeypatch.context() as patch:
        patch.setattr(broker._log_loop, "_synced", lambda position: None)
        sent = batch(topic, [b"a"], queue_id=1), batch(topic, [b"b"], queue_id=3)
        sending = asyncio.ensure_future(client.send(*sent))
        await until(lambda: store.frames_in == frames)
        await until(lambda: store.log.durable_position == store.log.end_position)
    synced(store.log.durable_position)
    answers = (await waiting).queues
    assert sorted(each.queue_id for each in answers) == [1, 3]
    await sending


async def test_a_parked_pull_with_a_filter_sleeps_on(both: tuple[Broker, Client]) -> None:
    broker, client = both
    topic = topic_name()
    await client.send(batch(topic, [b"no"], tags=["n"]))
    # What was there before is told at once, so that a group can commit it.
    [skipped] = (await client.pull(topic, filter="y", wait_ms=WAIT_MS)).queues
    assert (skipped.next_offset, len(skipped.records.records)) == (1, 0)
    waiting = asyncio.ensure_future(client.pull(topic, offset=1, filter="y", wait_ms=WAIT_MS))
    await parked(broker, 1)
    await client.send(batch(topic, [b"no"], tags=["n"]))
    await client.send(batch(topic, [b"yes"], tags=["y"]))
    [records] = (await waiting).queues
    assert [each.body for each in records.records.records] == [b"yes"]
    assert list(records.run_offsets) == [2]


async def test_a_pull_without_data_ends_at_its_deadline(client: Client) -> None:
    topic = topic_name()
    await client.send(batch(topic, [b"a"]))
    response = await client.pull(topic, offset=1, wait_ms=30)
    assert not response.queues


async def test_thousand_parked_pulls_are_all_woken(both: tuple[Broker, Client]) -> None:
    broker, client = both
    topic = topic_name()
    await client.send(batch(topic, [b"a"]))
    stream = client.broker.PullStream()
    for number in range(1_000):
        queue = broker_pb2.QueuePull(topic=topic, offset=1)
        await stream.write(
            broker_pb2.PullRequest(request_id=number + 1, queues=[queue], wait_ms=WAIT_MS)
        )
    await parked(broker, 1_000)
    await client.send(batch(topic, [b"b"]))
    answers = [await stream.read() for _ in range(1_000)]
    assert {answer.request_id for answer in answers} == set(range(1, 1_001))
    assert all(answer.queues[0].next_offset == 2 for answer in answers)
    await stream.done_writing()


async def test_a_waiting_request_holds_up_no_other(both: tuple[Broker, Client]) -> None:
    broker, client = both
    idle, busy = topic_name(), topic_name()
    await client.send(batch(idle, [b"a"]), batch(busy, [b"b"]))
    stream = client.broker.PullStream()
    queue = broker_pb2.QueuePull(topic=idle, offset=1)
    await stream.write(broker_pb2.PullRequest(request_id=1, queues=[queue], wait_ms=WAIT_MS))
    await stream.write(request(busy, 2))
    assert (await stream.read()).request_id == 2
    await parked(broker, 1)
    await stream.write(broker_pb2.PullRequest(request_id=3, cancel_request_id=1))
    cancelled = await stream.read()
    assert (cancelled.request_id, len(cancelled.queues)) == (1, 0)
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


async def test_who_cancels_nothing_does_not_cancel_a_request_numbered_0(
    both: tuple[Broker, Client],
) -> None:
    """0 is what a request says that cancels none: who numbers from 0 waited for nothing."""
    broker, client = both
    idle, busy = topic_name(), topic_name()
    await client.send(batch(idle, [b"a"]), batch(busy, [b"b"]))
    stream = client.broker.PullStream()
    queue = broker_pb2.QueuePull(topic=idle, offset=1)
    await stream.write(broker_pb2.PullRequest(queues=[queue], wait_ms=WAIT_MS))
    await parked(broker, 1)
    await stream.write(request(busy, 1))
    assert (await stream.read()).request_id == 1
    await client.send(batch(idle, [b"c"]))
    answer = await stream.read()
    assert (answer.request_id, answer.queues[0].next_offset) == (0, 2)
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


async def test_a_stream_that_ends_leaves_nobody_parked(both: tuple[Broker, Client]) -> None:
    broker, client = both
    topic = topic_name()
    await client.send(batch(topic, [b"a"]))
    stream = client.broker.PullStream()
    queue = broker_pb2.QueuePull(topic=topic, offset=1)
    await stream.write(broker_pb2.PullRequest(request_id=1, queues=[queue], wait_ms=WAIT_MS))
    await parked(broker, 1)
    stream.cancel()
    await parked(broker, 0)


async def test_a_request_id_in_use_ends_the_stream_with_an_error(
    both: tuple[Broker, Client],
) -> None:
    broker, client = both
    topic = topic_name()
    await client.send(batch(topic, [b"a"]))
    stream = client.broker.PullStream()
    queue = broker_pb2.QueuePull(topic=topic, offset=1)
    for _ in range(2):
        await stream.write(broker_pb2.PullRequest(request_id=1, queues=[queue], wait_ms=WAIT_MS))
    with pytest.raises(InvalidArgument) as caught:
        await status.answer(stream.read())
    assert caught.value.field == "request_id"
    await parked(broker, 0)


async def test_errors_of_queues_travel_beside_the_others_records(client: Client) -> None:
    topic = topic_name()
    await client.send(batch(topic, [b"a"]))
    queues = [
        broker_pb2.QueuePull(topic=topic),
        broker_pb2.QueuePull(topic=topic, queue_id=1, offset=5),
        broker_pb2.QueuePull(topic=topic, queue_id=9),
        broker_pb2.QueuePull(topic="nowhere"),
    ]
    response = await client.broker.Pull(broker_pb2.PullRequest(queues=queues))
    answers = {(each.topic, each.queue_id): each for each in response.queues}
    assert answers[topic, 0].next_offset == 1
    beyond = answers[topic, 1]
    assert beyond.error.code == error_pb2.OFFSET_OUT_OF_RANGE
    assert (beyond.min_offset, beyond.max_offset, beyond.error.limit) == (0, 0, "0 to 0")
    assert answers[topic, 9].error.code == error_pb2.QUEUE_NOT_FOUND
    assert answers["nowhere", 0].error.code == error_pb2.TOPIC_NOT_FOUND


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"wait_ms": 30_001}, "wait_ms"),
        ({"wait_ms": -1}, "wait_ms"),
        ({"max_records": -1}, "max_records"),
        ({"max_bytes": 1 << 30}, "max_bytes"),
    ],
)
async def test_limits_of_the_request_are_checked(
    client: Client, fields: dict[str, int], field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await client.pull("orders", **fields)
    assert caught.value.field == field


async def test_no_queues_are_refused(client: Client) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await status.answer(client.broker.Pull(broker_pb2.PullRequest()))
    assert caught.value.field == "queues"


async def test_deleting_a_topic_wakes_and_refuses_those_who_wait(
    both: tuple[Broker, Client],
) -> None:
    broker, client = both
    topic = topic_name()
    await client.send(batch(topic, [b"a"]))
    waiting = asyncio.ensure_future(client.pull(topic, offset=1, wait_ms=WAIT_MS))
    await parked(broker, 1)
    await client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(name=topic))
    [answer] = (await waiting).queues
    assert answer.error.code == error_pb2.TOPIC_NOT_FOUND


async def test_a_topic_made_again_begins_anew(client: Client) -> None:
    topic = topic_name()
    await client.send(batch(topic, [b"old"] * 3, producer_id=7))
    await client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(name=topic))
    [result] = await client.send(batch(topic, [b"new"], producer_id=7))
    assert (result.base_offset, result.duplicate) == (0, False)
    assert await client.bodies(topic) == [b"new"]


async def test_frames_come_whole_and_as_stored(client: Client) -> None:
    topic = topic_name()
    await client.send(batch(topic, [b"a", b"b"], producer_id=7))
    await client.send(batch(topic, [b"c"], producer_id=7, sequence=1))
    response = await client.broker.FetchFrames(broker_pb2.FetchFramesRequest(topic=topic))
    frames = [frame.decode(entry.body) for entry in record.split(response.frames)]
    assert [each.base_offset for each in frames] == [0, 2]
    assert [each.sequence for each in frames] == [0, 1]
    assert frames[0].topic == topic
    assert (response.next_offset, response.max_offset) == (3, 3)
    one = await client.broker.FetchFrames(
        broker_pb2.FetchFramesRequest(topic=topic, offset=2, max_bytes=1)
    )
    assert one.next_offset == 3


async def test_frames_of_timed_batches_name_their_target(client: Client) -> None:
    topic = topic_name()
    [result] = await client.send(batch(topic, [b"a"], delays_ms=[50], queue_id=-1))
    await claim_queues(client)
    request = broker_pb2.FetchFramesRequest(
        topic="%TIMER%", queue_id=result.queue_id, timer_id=SERVICE_IDS_FROM
    )
    response = await client.broker.FetchFrames(request)
    [entry] = record.split(response.frames)
    timed = frame.decode(entry.body)
    assert (timed.target_topic, timed.target_queue_id) == (topic, -1)
    assert timed.due_ms.tolist() == list(result.due_ms)


async def test_a_fetch_waits_for_the_next_frame(both: tuple[Broker, Client]) -> None:
    broker, client = both
    topic = topic_name()
    await client.send(batch(topic, [b"a"]))
    fetch = broker_pb2.FetchFramesRequest(topic=topic, offset=1, wait_ms=WAIT_MS)
    waiting = asyncio.ensure_future(client.broker.FetchFrames(fetch))
    await parked(broker, 1)
    await client.send(batch(topic, [b"b"]))
    assert (await waiting).next_offset == 2


HOUR_MS = 3_600_000


def stop_time(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait ends because its time is over."""
    now_ms = broker._pulls._parking._now_ms()
    monkeypatch.setattr(broker._pulls._parking, "_now_ms", lambda: now_ms)


async def lingering(client: Client, linger_ms: int) -> broker_pb2.FetchFramesRequest:
    """A fetch of a queue of %TIMER% in which a message for later lies."""
    [result] = await client.send(batch(topic_name(), [b"later"], delays_ms=[HOUR_MS], queue_id=0))
    await claim_queues(client)
    return broker_pb2.FetchFramesRequest(
        topic="%TIMER%",
        queue_id=result.queue_id,
        offset=result.base_offset,
        timer_id=SERVICE_IDS_FROM,
        linger_ms=linger_ms,
    )


@pytest.mark.parametrize("topic", ["orders", "%RETRY%g"])
async def test_who_waits_for_a_queue_hears_at_once_that_it_is_deleted(
    topic: str, both: tuple[Broker, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group's retries go with it."""
    broker, client = both
    stop_time(broker, monkeypatch)
    broker.store.create_topic(topic, 1)
    await client.group_admin.PutGroup(
        group_admin_pb2.PutGroupRequest(group=group_admin_pb2.GroupConfig(group="g"))
    )
    waiting = asyncio.ensure_future(client.pull(topic, wait_ms=WAIT_MS))
    await parked(broker, 1)
    if topic == "orders":
        await client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(name=topic))
    else:
        await client.group_admin.DeleteGroup(group_admin_pb2.DeleteGroupRequest(group="g"))
    [gone] = (await waiting).queues
    assert gone.error.code == error_pb2.TOPIC_NOT_FOUND


async def test_a_fetch_lingers_until_something_is_due_at_once(
    both: tuple[Broker, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, client = both
    stop_time(broker, monkeypatch)
    fetch = await lingering(client, LINGER_MS_MAX)
    waiting = asyncio.ensure_future(client.broker.FetchFrames(fetch))
    await parked(broker, 1)
    [later] = await client.send(batch(topic_name(), [b"a"], delays_ms=[HOUR_MS], queue_id=0))
    assert not waiting.done()
    [soon] = await client.send(batch(topic_name(), [b"b"], delays_ms=[100], queue_id=0))
    assert fetch.queue_id == later.queue_id == soon.queue_id
    assert (await waiting).next_offset == fetch.offset + 3
    assert not broker._pulls._parking._lingering


async def test_how_far_another_broker_was_taken_over_is_not_committed_here(client: Client) -> None:
    """It was at this address: what is here and was not fetched would be let go of."""
    fetch = await lingering(client, 0)
    store_id = (await client.broker.FetchFrames(fetch)).store_id
    commit = broker_pb2.OffsetCommit(topic="%TIMER%", queue_id=fetch.queue_id, offset=1)
    request = broker_pb2.CommitOffsetsRequest(
        group="%TIMER%", commits=[commit], timer_id=SERVICE_IDS_FROM, store_id=store_id + 1
    )
    with pytest.raises(Unavailable, match=rf"store_id: this broker has {store_id:016x}"):
        await status.answer(client.broker.CommitOffsets(request))
    committed = broker_pb2.GetOffsetsRequest(group="%TIMER%", topic="%TIMER%")
    assert {each.offset for each in (await client.broker.GetOffsets(committed)).queues} == {-1}
    for meant in (store_id, 0):  # 0: of an older release
        request.store_id = meant
        [result] = (await status.answer(client.broker.CommitOffsets(request))).queues
        assert (result.offset, result.HasField("error")) == (1, False)


async def test_nothing_is_committed_that_this_data_has_not_given(client: Client) -> None:
    """It may have been put back from a copy, behind the back of who commits."""
    fetch = await lingering(client, 0)
    commit = broker_pb2.OffsetCommit(topic="%TIMER%", queue_id=fetch.queue_id, offset=1)
    request = broker_pb2.CommitOffsetsRequest(
        group="%TIMER%", commits=[commit], timer_id=SERVICE_IDS_FROM
    )
    [refused] = (await client.broker.CommitOffsets(request)).queues
    assert "offset: 1 is not" in refused.error.message
    await client.broker.FetchFrames(fetch)
    [result] = (await client.broker.CommitOffsets(request)).queues
    assert (result.offset, result.HasField("error")) == (1, False)


async def test_a_fetch_does_not_linger_for_ever(client: Client) -> None:
    fetch = await lingering(client, 30)
    assert (await client.broker.FetchFrames(fetch)).next_offset == fetch.offset + 1


async def test_a_fetch_does_not_linger_over_what_is_due_at_once(
    both: tuple[Broker, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, client = both
    fetch = await lingering(client, LINGER_MS_MAX)
    await client.send(batch(topic_name(), [b"soon"], delays_ms=[100], queue_id=0))
    monkeypatch.setattr(broker._pulls._parking, "park", None)
    assert (await client.broker.FetchFrames(fetch)).next_offset == fetch.offset + 2


async def test_who_lingers_is_answered_when_the_broker_stops(
    both: tuple[Broker, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, client = both
    stop_time(broker, monkeypatch)
    fetch = await lingering(client, LINGER_MS_MAX)
    waiting = asyncio.ensure_future(client.broker.FetchFrames(fetch))
    await parked(broker, 1)
    broker._pulls.close()
    assert (await waiting).next_offset == fetch.offset + 1


async def test_a_fetch_may_not_linger_for_long(client: Client) -> None:
    topic = topic_name()
    await client.send(batch(topic, [b"a"]))
    fetch = broker_pb2.FetchFramesRequest(topic=topic, linger_ms=LINGER_MS_MAX + 1)
    with pytest.raises(InvalidArgument, match=r"linger_ms: 1001 .*1000"):
        await status.answer(client.broker.FetchFrames(fetch))


async def test_what_is_appended_while_a_fetch_reads_from_the_disk_is_not_missed(
    both: tuple[Broker, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, client = both
    topic = topic_name()
    await client.send(batch(topic, [b"a"]))
    reading, appended = threading.Event(), threading.Event()
    read_frames = reader.read_frames

    def cold(*arguments: Any, nowait: bool = False) -> reader.Frames:
        if nowait:
            raise BlockingIOError
        frames = read_frames(*arguments)
        reading.set()
        appended.wait(30)
        return frames

    monkeypatch.setattr(reader, "read_frames", cold)
    fetch = broker_pb2.FetchFramesRequest(topic=topic, offset=1, wait_ms=WAIT_MS)
    waiting = asyncio.ensure_future(client.broker.FetchFrames(fetch))
    await asyncio.to_thread(reading.wait, 30)
    await client.send(batch(topic, [b"b"]))
    appended.set()
    await until(lambda: waiting.done() or len(broker._pulls) > 0)
    assert len(broker._pulls) == 0
    assert (await waiting).next_offset == 2


async def test_a_fetch_inside_a_frame_is_refused(client: Client) -> None:
    topic = topic_name()
    await client.send(batch(topic, [b"a", b"b"]))
    fetch = broker_pb2.FetchFramesRequest(topic=topic, offset=1)
    with pytest.raises(InvalidArgument) as caught:
        await status.answer(client.broker.FetchFrames(fetch))
    assert (caught.value.field, caught.value.limit) == ("offset", "0")
    fetch.offset = 3
    with pytest.raises(OffsetOutOfRange):
        await status.answer(client.broker.FetchFrames(fetch))
    fetch.topic = "nowhere"
    with pytest.raises(TopicNotFound):
        await status.answer(client.broker.FetchFrames(fetch))


async def test_a_clean_stop_answers_those_who_wait(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await client.send(batch("orders", [b"a"]))
        waiting = asyncio.ensure_future(client.pull("orders", offset=1, wait_ms=WAIT_MS))
        await parked(broker, 1)
        broker.server.drain()
        broker._pulls.close()
        assert not (await waiting).queues


async def test_who_waits_for_the_disk_at_a_stop_is_told_of_the_stop(
    both: tuple[Broker, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, client = both
    topic = topic_name()
    await client.send(batch(topic, [b"a"]))

    def cold(*_arguments: Any, **_options: Any) -> reader.Frames:
        raise BlockingIOError

    monkeypatch.setattr(reader, "read_frames", cold)
    monkeypatch.setattr(reader, "read_records", cold)
    broker._pulls.close()
    with pytest.raises(Unavailable, match="stopping"):
        await status.answer(client.broker.FetchFrames(broker_pb2.FetchFramesRequest(topic=topic)))
    # One that came before.
    parked = ParkedPull(pull=parse(request(topic)), peer="p")
    [queue] = await broker._pulls.answer(parked)
    parked.give_place()
    error = status.from_proto(error_pb2.Error.FromString(queue.error))
    assert isinstance(error, Unavailable)


async def test_pulls_of_every_kind_step_over_what_the_log_has_lost(tmp_path: Path) -> None:
    commit_log = str(tmp_path / "commitlog")
    async with running_broker(tmp_path) as (broker, client):
        for number in range(10):
            await client.send(batch("orders", [b"old %d" % number]))
        ends = [entry.end for entry in broker.store.log.entries(0) if entry.kind == frame.KIND]
    cut(commit_log, ends[4], RealDisk())
    async with running_broker(tmp_path) as (broker, client):
        assert await client.bodies("orders") == [b"old %d" % number for number in range(5)]
        [records] = (await client.pull("orders", offset=5, wait_ms=WAIT_MS)).queues
        assert (records.next_offset, len(records.records.records)) == (10, 0)
        waiting = asyncio.create_task(client.pull("orders", offset=10, wait_ms=WAIT_MS))
        await parked(broker, 1)
        await client.send(batch("orders", [b"new"]))
        [records] = (await waiting).queues
        assert records.next_offset == 11
        sql = {"filter": "TAGS IS NULL", "filter_type": broker_pb2.FILTER_TYPE_SQL92}
        for options in ({}, {"filter": "a"}, sql):
            found, offset = [], 5
            while offset < 11:
                [records] = (await client.pull("orders", offset=offset, **options)).queues
                found += [each.body for each in records.records.records]
                offset = records.next_offset
            assert found == ([] if options == {"filter": "a"} else [b"new"])
        fetched = await status.answer(
            client.broker.FetchFrames(broker_pb2.FetchFramesRequest(topic="orders", offset=7)), "b1"
        )
        [entry] = record.split(fetched.frames)
        assert (frame.decode(entry.body).base_offset, fetched.next_offset) == (10, 11)
