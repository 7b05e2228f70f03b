"""Broadcast consumers against brokers in this process: everything for everyone, files, failures."""

import asyncio
import json
import sys
import threading
import time
from asyncio.subprocess import PIPE
from collections import Counter

import pytest

import duemq
from duemq.aio import Producer, PushConsumer
from duemq.consumer.broadcast import broadcast_share
from duemq.consumer.settings import ConsumerSettings
from duemq.errors import Corrupt, InvalidArgument
from duemq.protocol.balance import MessageQueue
from duemq_server.broker.reading import time_search
from duemq_server.storage.errors import CorruptFile
from tests.service.running_broker import topic_name
from tests.service.running_cluster import Cluster, running_cluster, until

GROUP = "news"


@pytest.fixture
async def cluster(tmp_path):
    async with running_cluster(tmp_path, "b0", "b1") as cluster:
        yield cluster


@pytest.fixture
async def topic(cluster: Cluster) -> str:
    name = topic_name()
    await cluster.create_topic(name, queues=2)
    return name


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "offsets"


class Members:
    """Broadcast consumers of one group; closes those that a test leaves open."""

    def __init__(self, cluster: Cluster, topic: str, directory) -> None:
        self.cluster = cluster
        self.topic = topic
        self.directory = directory
        self.received: dict[str, list[bytes]] = {}
        self._open: list[PushConsumer] = []

    async def start(self, name: str = "one", callback=None, **options) -> PushConsumer:
        received = self.received.setdefault(name, [])
        settings = {"start_from": "earliest", "suspend_s": 0.001, "commit_interval_s": 3_600}
        settings |= {"offsets_dir": str(self.directory), **options.pop("settings", {})}
        consumer = PushConsumer(
            GROUP,
            options.pop("topics", self.topic),
            callback or (lambda message: received.append(message.body)),
            broadcast=True,
            member_name=name,
            nameserver=self.cluster.nameserver,
            settings=ConsumerSettings(**settings),
            **options,
        )
        self._open.append(consumer)
        await consumer.start()
        return consumer

    async def close(self) -> None:
        for consumer in self._open:
            await consumer.close()

    def file(self, name: str = "one"):
        return self.directory / GROUP / f"{name}.json"

    def kept(self, name: str = "one") -> dict[str, int]:
        queues = json.loads(self.file(name).read_text())["queues"]
        return {f"{topic}/{broker}/{queue}": offset for topic, broker, queue, offset in queues}

    def all_at(self, offset: int) -> dict[str, int]:
        return {f"{self.topic}/{b}/{n}": offset for b in ("b0", "b1") for n in range(2)}


@pytest.fixture
async def members(cluster: Cluster, topic: str, directory):
    made = Members(cluster, topic, directory)
    yield made
    await made.close()


async def fill(cluster: Cluster, topic: str, each: int, mark: str = "") -> list[bytes]:
    """`each` messages to every queue."""
    sent = []
    for broker in sorted(cluster.clients):
        for queue_id in range(2):
            bodies = [f"{mark}{broker}/{queue_id}/{n}".encode() for n in range(each)]
            await cluster.send(topic, bodies, broker=broker, queue_id=queue_id)
            sent += bodies
    return sent


CLOSED_AT_EXIT = """
import atexit, sys, threading
import duemq

nameserver, topic, directory = sys.argv[1:]
settings = duemq.ConsumerSettings(
    start_from="earliest", offsets_dir=directory, commit_interval_s=3_600
)
for broadcast in (False, True):
    came = threading.Semaphore(0)
    consumer = duemq.PushConsumer(
        "news",
        topic,
        lambda message, came=came: came.release(),
        broadcast=broadcast,
        member_name="one",
        nameserver=nameserver,
        settings=settings,
    )
    atexit.register(consumer.close)
    consumer.start()
    for _ in range(4):
        came.acquire()
"""


async def test_a_close_at_exit_saves(cluster, topic, members, directory) -> None:
    """Where the interpreter begins no threads any more."""
    await fill(cluster, topic, 1)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-W", "error", "-c", CLOSED_AT_EXIT),
        *(cluster.nameserver, topic, str(directory)),
        stderr=PIPE,
    )
    _, said = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, said.decode()) == (0, "")
    assert members.kept() == members.all_at(1)


async def test_every_member_gets_everything_once(cluster, topic, members) -> None:
    sent = await fill(cluster, topic, 10)
    await members.start("one")
    await members.start("two")
    sent += await fill(cluster, topic, 10, "more ")
    await until(lambda: all(len(each) >= len(sent) for each in members.received.values()))
    assert Counter(members.received["one"]) == Counter(members.received["two"]) == Counter(sent)


async def test_a_member_goes_on_where_it_closed(cluster, topic, members) -> None:
    await fill(cluster, topic, 5)
    first = await members.start()
    await until(lambda: len(members.received["one"]) == 20)
    await first.close()
    assert members.kept() == members.all_at(5)
    missed = await fill(cluster, topic, 3, "missed ")
    members.received["one"].clear()
    await members.start(settings={"start_from": "latest"})
    await until(lambda: len(members.received["one"]) >= len(missed))
    assert Counter(members.received["one"]) == Counter(missed)


async def test_a_member_that_died_goes_on_where_it_saved_last(cluster, topic, members) -> None:
    await fill(cluster, topic, 5)
    await members.start(settings={"commit_interval_s": 0.02})
    await until(lambda: members.kept() == members.all_at(5))
    copy = members.file().read_bytes()  # as a crash after this would leave it
    more = await fill(cluster, topic, 2, "more ")
    await until(lambda: members.kept() == members.all_at(7))
    members.file("two").write_bytes(copy.replace(b'"one"', b'"two"'))
    await members.start("two")
    await until(lambda: len(members.received["two"]) >= len(more))
    assert Counter(members.received["two"]) == Counter(more)


async def test_a_first_start_at_the_end_is_kept_before_anything_comes(
    cluster, topic, members
) -> None:
    await fill(cluster, topic, 5)
    await members.start(settings={"start_from": "latest"})
    assert members.kept() == members.all_at(5)
    more = await fill(cluster, topic, 5, "more ")
    await until(lambda: len(members.received["one"]) >= len(more))
    assert Counter(members.received["one"]) == Counter(more)


async def test_a_first_start_at_a_time(cluster, topic, members) -> None:
    await fill(cluster, topic, 5)
    await asyncio.sleep(0.002)
    moment = time.time_ns() // 1_000_000
    more = await fill(cluster, topic, 5, "more ")
    await members.start(settings={"start_from": moment})
    await until(lambda: len(members.received["one"]) >= len(more))
    assert Counter(members.received["one"]) == Counter(more)


async def test_a_queue_that_cannot_be_searched_holds_up_no_other_and_begins_there_later(
    cluster, topic, members, monkeypatch
) -> None:
    await fill(cluster, topic, 5)
    await asyncio.sleep(0.002)
    moment = time.time_ns() // 1_000_000
    more = await fill(cluster, topic, 5, "more ")
    find, damaged = time_search.first_stored_since, [0]

    def found(queue, at_ms):
        if queue.key[0] == topic and queue.queue_id in damaged:
            raise CorruptFile("0", 0, "entries are missing", "")
        return find(queue, at_ms)

    monkeypatch.setattr(time_search, "first_stored_since", found)
    monkeypatch.setattr(broadcast_share, "RECHECK_S", 0.05)
    reader = await members.start(settings={"start_from": moment})
    assert {queue.queue_id for queue in reader.queues} == {1}
    damaged.clear()
    await until(lambda: len(members.received["one"]) >= len(more))
    assert Counter(members.received["one"]) == Counter(more)


async def test_what_comes_later_is_read_from_its_beginning(tmp_path, directory) -> None:
    async with running_cluster(tmp_path, "b0") as cluster:
        topic, late = topic_name(), topic_name()
        await cluster.create_topic(topic, queues=2)
        members = Members(cluster, topic, directory)
        await members.start(topics=[topic, late], settings={"start_from": "latest"})
        await cluster.create_topic(late, queues=2)
        sent = await fill(cluster, late, 2, "late ")
        await cluster.start_broker("b1")
        await cluster.create_topic(topic, queues=2)
        sent += await fill(cluster, topic, 2)
        await until(lambda: len(members.received["one"]) >= len(sent))
        assert Counter(members.received["one"]) == Counter(sent)
        await members.close()


async def test_what_came_while_the_member_was_away_is_read_from_its_beginning(
    tmp_path, directory
) -> None:
    async with running_cluster(tmp_path, "b0") as cluster:
        topic, fresh = topic_name(), topic_name()
        await cluster.create_topic(topic, queues=2)
        members = Members(cluster, topic, directory)
        latest = {"start_from": "latest"}
        await (await members.start(settings=latest)).close()
        await cluster.start_broker("b1")
        await cluster.create_topic(topic, queues=2)
        await cluster.create_topic(fresh, queues=2)
        await fill(cluster, fresh, 2, "before its first subscription ")
        missed = await fill(cluster, topic, 2)
        await members.start(topics=[topic, fresh], settings=latest)
        missed += await fill(cluster, fresh, 1, "after ")
        await until(lambda: len(members.received["one"]) >= len(missed))
        assert Counter(members.received["one"]) == Counter(missed)
        await members.close()


async def test_a_broker_that_is_away_loses_nothing(cluster, topic, members) -> None:
    sent = await fill(cluster, topic, 2)
    consumer = await members.start()
    await until(lambda: len(members.received["one"]) >= len(sent))
    await cluster.stop_broker("b1")
    sent += await fill(cluster, topic, 2, "alone ")
    await until(lambda: len(members.received["one"]) >= len(sent))
    await cluster.start_broker("b1")
    sent += await fill(cluster, topic, 2, "again ")
    await until(lambda: len(members.received["one"]) >= len(sent))
    assert Counter(members.received["one"]) == Counter(sent)
    await consumer.close()
    assert set(members.kept().values()) == {4, 6}


async def test_an_offset_that_is_gone_goes_on_at_the_earliest_message(
    cluster, topic, members, caplog
) -> None:
    sent = await fill(cluster, topic, 2)
    await (await members.start()).close()
    content = json.loads(members.file().read_text())
    content["queues"] = [[*queue, 1_000] for *queue, _ in content["queues"]]
    members.file().write_text(json.dumps(content))
    members.received["one"].clear()
    await members.start()
    await until(lambda: len(members.received["one"]) >= len(sent))
    assert Counter(members.received["one"]) == Counter(sent)
    assert "goes on at its earliest message" in caplog.text


async def test_a_topic_that_was_made_anew_is_read_from_its_beginning(
    cluster, topic, members
) -> None:
    await fill(cluster, topic, 2)
    consumer = await members.start()
    await until(lambda: len(members.received["one"]) == 8)
    async with duemq.aio.Admin(cluster.nameserver) as admin:
        await admin.delete_topic(topic)
    await until(lambda: not consumer.queues)
    await cluster.create_topic(topic, queues=2)
    sent = await fill(cluster, topic, 3, "anew ")
    await until(lambda: len(members.received["one"]) >= 8 + len(sent))
    assert Counter(members.received["one"][8:]) == Counter(sent)


async def test_what_fails_is_tried_again_and_skipped_in_the_end(
    cluster, topic, members, caplog
) -> None:
    sent = await fill(cluster, topic, 5)
    calls: Counter[bytes] = Counter()
    done: list[bytes] = []

    def receive(message) -> None:
        calls[message.body] += 1
        if message.body == b"b0/0/1":
            raise ValueError("never")
        if message.body == b"b0/0/2" and calls[message.body] < 3:
            raise duemq.RetryLater("1ms")
        if message.body == b"b0/0/3":
            raise duemq.DeadLetter("useless")
        done.append(message.body)

    consumer = await members.start(callback=receive, settings={"retries_in_order_max": 4})
    await until(lambda: len(done) == len(sent) - 2)
    await until(lambda: caplog.text.count("is skipped after") == 2)
    assert (calls[b"b0/0/1"], calls[b"b0/0/2"], calls[b"b0/0/3"]) == (5, 3, 1)
    await consumer.close()
    assert members.kept() == members.all_at(5)
    skipped = [r for r in caplog.records if "is skipped after" in r.getMessage()]
    assert {record.levelname for record in skipped} == {"ERROR"}


async def test_of_a_list_only_what_is_named_is_tried_again_and_skipped(
    cluster, topic, members, caplog
) -> None:
    sent = await fill(cluster, topic, 4)
    calls: Counter[bytes] = Counter()

    def receive(messages) -> None:
        calls.update(message.body for message in messages)
        raise duemq.BatchFailed(
            {m: ValueError("never") for m in messages if m.body in (b"b0/0/1", b"b1/1/3")}
        )

    consumer = await members.start(
        callback=receive, batch=True, settings={"retries_in_order_max": 2}
    )
    await until(lambda: caplog.text.count("is skipped after 3 attempts") == 2)
    await consumer.close()
    assert calls == Counter(sent) + Counter({b"b0/0/1": 2, b"b1/1/3": 2})
    assert members.kept() == members.all_at(4)


@pytest.mark.parametrize("order", ["queue", "key"])
async def test_broadcast_in_order(cluster, topic, members, order) -> None:
    keys = [f"k{number}" for number in range(6)]
    async with Producer(cluster.nameserver) as producer:
        for number in range(50):
            for key in keys:
                producer.submit(topic, b"%d" % number, ordering_key=key)
        await producer.flush()
    processed: dict[str, list[int]] = {key: [] for key in keys}
    failed: Counter[str] = Counter()

    def receive(message) -> None:
        key = message.ordering_key
        if message.body == b"9" and failed[key] < 2:
            failed[key] += 1
            raise ValueError("not yet")
        processed[key].append(int(message.body))

    await members.start(callback=receive, order=order)
    await until(lambda: sum(map(len, processed.values())) >= 50 * len(keys))
    assert processed == {key: list(range(50)) for key in keys}


async def test_filters_and_lists(cluster, topic, members) -> None:
    bodies = [b"a", b"b", b"c", b"none"]
    await cluster.send(topic, bodies, tags=["a", "b", "c", ""], queue_id=0)
    lists: list[list[bytes]] = []

    async def receive(messages) -> None:
        lists.append([message.body for message in messages])

    await members.start(callback=receive, topics={topic: "a || c"}, batch=True)
    await until(lambda: sum(map(len, lists)) == 2)
    assert [body for each in lists for body in each] == [b"a", b"c"]


async def test_one_process_a_member(cluster, topic, members) -> None:
    first = await members.start()
    with pytest.raises(InvalidArgument) as raised:
        await members.start()
    assert raised.value.field == "member_name"
    await first.close()
    await members.start()


async def test_who_has_left_does_not_write_over_what_the_next_one_keeps(
    cluster, topic, members
) -> None:
    """When a callback ends that its close had not waited for."""
    entered, leave = threading.Event(), threading.Event()
    await cluster.send(topic, [b"slow"], queue_id=0)

    def receive(message) -> None:
        entered.set()
        leave.wait(60)

    first = await members.start("one", receive, settings={"close_timeout_s": 0.01})
    await until(entered.is_set)
    share = first._share
    await share.close()
    await share.leave()
    await cluster.send(topic, [b"more"], queue_id=1)
    next_one = await members.start("one")
    await until(lambda: set(members.received["one"]) == {b"slow", b"more"})
    await next_one.close()
    kept = members.kept()
    leave.set()
    slow = share._sources[MessageQueue(topic, "b0", 0)]
    await until(lambda: slow.pending.commit_point == 1)
    await share._save()  # as it does every `commit_interval_s`
    assert members.kept() == kept


@pytest.mark.parametrize("content", [b"{", b"[1, 2]"])
async def test_a_damaged_file_stops_the_start_and_stays(cluster, members, content) -> None:
    members.file().parent.mkdir(parents=True)
    members.file().write_bytes(content)
    with pytest.raises(Corrupt) as raised:
        await members.start()
    assert str(members.file()) in raised.value.message
    assert members.file().read_bytes() == content


async def test_close_waits_for_running_callbacks_and_keeps_what_they_did(
    cluster, topic, members
) -> None:
    await cluster.send(topic, [b"slow"], queue_id=0)
    entered, leave = threading.Event(), threading.Event()

    def receive(message) -> None:
        entered.set()
        leave.wait(60)

    consumer = await members.start(callback=receive)
    await until(entered.is_set)
    closing = asyncio.create_task(consumer.close())
    await asyncio.sleep(0)
    assert not closing.done()
    leave.set()
    await closing
    assert members.kept()[f"{topic}/b0/0"] == 1


async def test_a_file_that_cannot_be_written_stops_nothing(cluster, topic, members, caplog) -> None:
    await members.start(settings={"commit_interval_s": 0.02})
    members.file().with_suffix(".tmp").mkdir()
    sent = await fill(cluster, topic, 1)
    await until(lambda: len(members.received["one"]) >= len(sent))
    await until(lambda: "offsets not saved" in caplog.text)
    members.file().with_suffix(".tmp").rmdir()
    await until(lambda: members.kept() == members.all_at(1))


async def test_queues_names_what_is_read(cluster, topic, members) -> None:
    consumer = await members.start()
    expected = {MessageQueue(topic, b, n) for b in ("b0", "b1") for n in range(2)}
    await until(lambda: consumer.queues == expected)


async def test_the_blocking_consumer(cluster, topic, directory) -> None:
    received: list[bytes] = []
    sent = await fill(cluster, topic, 2)
    consumer = duemq.PushConsumer(
        GROUP,
        topic,
        lambda message: received.append(message.body),
        broadcast=True,
        member_name="one",
        nameserver=cluster.nameserver,
        settings=ConsumerSettings(start_from="earliest", offsets_dir=str(directory)),
    )
    await asyncio.to_thread(consumer.start)
    await until(lambda: len(received) >= len(sent))
    await asyncio.to_thread(consumer.close)
    assert Counter(received) == Counter(sent)
    assert (directory / GROUP / "one.json").exists()


async def test_a_group_that_cannot_be_a_folder_is_refused(cluster, topic, directory) -> None:
    consumer = PushConsumer(
        "..",
        topic,
        print,
        broadcast=True,
        nameserver=cluster.nameserver,
        settings=ConsumerSettings(offsets_dir=str(directory)),
    )
    with pytest.raises(InvalidArgument) as raised:
        await consumer.start()
    assert raised.value.field == "group"
    assert not directory.exists()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"group": "bad name"}, "group"),
        ({"topics": duemq.Sql("price >")}, "filter"),
        ({"topics": duemq.Sql("price >"), "order": "key"}, "filter"),
    ],
)
async def test_what_no_broker_would_read_is_refused_at_start(
    cluster: Cluster, topic: str, directory, options: dict[str, object], field: str, caplog
) -> None:
    chosen = {"group": GROUP, **options}
    consumer = PushConsumer(
        chosen.pop("group"),
        {topic: chosen.pop("topics", None)},
        print,
        broadcast=True,
        nameserver=cluster.nameserver,
        settings=ConsumerSettings(offsets_dir=str(directory)),
        **chosen,
    )
    with pytest.raises(InvalidArgument) as refused:
        await consumer.start()
    assert refused.value.field == field
    assert not caplog.records


async def test_a_damaged_file_is_raised_and_not_logged_beside(members, caplog) -> None:
    await members.start()
    await members.close()
    members.file().write_text("{}")
    with pytest.raises(Corrupt):
        await members.start()
    assert not [record for record in caplog.records if record.exc_info]
