"""Dead letters of real brokers, listed and sent again by the admin clients."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from duemq import Admin, Message, aio
from duemq.administering import finding
from duemq.administering.letters.resending import DEAD_LETTER_ID, Resent
from duemq.errors import (
    DuemqError,
    GroupNotFound,
    InvalidArgument,
    TopicNotFound,
    Unavailable,
)
from duemq.producing.producer import Producer
from duemq.sent import Receipt
from duemq.v1 import broker_pb2, message_pb2
from tests.service.running_broker import topic_name
from tests.service.running_cluster import Cluster, running_cluster, until

GROUP = "billing"


@pytest.fixture
async def cluster(tmp_path):
    async with running_cluster(tmp_path, "b0", "b1") as cluster:
        yield cluster


@pytest.fixture
async def topic(cluster: Cluster) -> str:
    name = topic_name()
    await cluster.create_topic(name)
    return name


@pytest.fixture
async def admin(cluster: Cluster):
    async with aio.Admin(cluster.nameserver) as admin:
        yield admin


async def die(cluster: Cluster, topic: str, broker: str, names: list[str]) -> None:
    """Stores messages of these names at a broker and has the group give them up, in this order."""
    records = [
        message_pb2.Record(
            body=name.encode(),
            message_id=f"id-{name}",
            key=f"key-{name[0]}",
            tag="t",
            ordering_key="o",
            properties={"p": name},
        )
        for name in names
    ]
    made = broker_pb2.Batch(topic=topic, records=message_pb2.RecordBatch(records=records))
    client = cluster.clients[broker]
    [stored] = await client.send(made)
    for number, name in enumerate(names):
        failed = broker_pb2.FailedMessage(
            topic=topic, offset=stored.base_offset + number, dead_letter=True, error=f"no {name}"
        )
        answer = await client.broker.SendBack(
            broker_pb2.SendBackRequest(group=GROUP, messages=[failed])
        )
        assert answer.results[0].dead_letter
        # Another millisecond: letters of two brokers are merged by the time they died.
        await asyncio.sleep(0.002)


async def listed(admin: aio.Admin, **selection: object) -> list[str]:
    return [letter.body.decode() async for letter in admin.dead_letters(GROUP, **selection)]


async def test_letters_of_all_brokers_come_by_the_time_they_died(
    cluster: Cluster, topic: str, admin: aio.Admin
) -> None:
    await die(cluster, topic, "b0", ["a1", "a2"])
    await die(cluster, topic, "b1", ["b1"])
    await die(cluster, topic, "b0", ["a3"])
    assert await listed(admin) == ["a1", "a2", "b1", "a3"]
    assert await listed(admin, limit=3) == ["a1", "a2", "b1"]
    assert await listed(admin, key="key-b") == ["b1"]
    assert await listed(admin, message_id="id-a3") == ["a3"]
    letters = [letter async for letter in admin.dead_letters(GROUP)]
    between = await listed(admin, since=letters[1].store_ms, until=letters[3].store_ms)
    assert between == ["a2", "b1"]
    first = letters[0]
    assert (first.topic, first.stored_topic, first.message_id) == (topic, "%DLQ%billing", "id-a1")
    assert first.retry is not None
    assert (first.retry.origin_topic, first.retry.error) == (topic, "no a1")


async def test_more_letters_than_a_page_come_all(
    cluster: Cluster, topic: str, admin: aio.Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duemq.administering.letters.dead_letters.PAGE_MESSAGES_MAX", 3)
    await die(cluster, topic, "b0", [f"a{n}" for n in range(8)])
    await die(cluster, topic, "b1", [f"b{n}" for n in range(5)])
    assert len(await listed(admin)) == 13
    assert len(await listed(admin, limit=7)) == 7
    async with aclosing(admin.dead_letters(GROUP)) as letters:
        assert (await anext(letters)).body == b"a0"  # and no more of it


async def test_letters_are_sent_again_to_where_they_came_from(
    cluster: Cluster, topic: str, admin: aio.Admin
) -> None:
    await die(cluster, topic, "b0", ["a1", "a2"])
    await die(cluster, topic, "b1", ["b1"])
    told: list[tuple[str, Receipt | DuemqError]] = []
    done = await admin.resend_dead_letters(
        GROUP,
        key="key-a",
        on_sent=lambda letter, outcome: told.append((letter.message_id, outcome)),
    )
    assert done == Resent(sent=2, failed=0)
    assert [message_id for message_id, _ in told] == ["id-a1", "id-a2"]
    for message_id, receipt in told:
        assert isinstance(receipt, Receipt)
        assert receipt.topic == topic
        client = cluster.clients[receipt.broker]
        [records] = (await client.pull(topic, receipt.queue, receipt.offset)).queues
        copy = records.records.records[0]
        assert copy.message_id == receipt.message_id != message_id
        assert copy.properties[DEAD_LETTER_ID] == message_id
        assert (copy.key, copy.tag, copy.ordering_key) == ("key-a", "t", "o")
        assert copy.properties["p"].encode() == copy.body
        assert not copy.HasField("retry")
    assert await listed(admin) == ["a1", "a2", "b1"]  # they stay


async def test_letters_are_sent_elsewhere(cluster: Cluster, topic: str, admin: aio.Admin) -> None:
    await die(cluster, topic, "b0", ["a1"])
    other = topic_name()
    await cluster.create_topic(other)
    receipts: list[object] = []
    await admin.resend_dead_letters(
        GROUP, to_topic=other, on_sent=lambda letter, outcome: receipts.append(outcome)
    )
    assert [receipt.topic for receipt in receipts] == [other]


async def test_what_cannot_be_sent_is_told_and_counted(
    cluster: Cluster, topic: str, admin: aio.Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duemq.administering.letters.dead_letters.ROUTE_TIMEOUT_S", 0.2)
    await die(cluster, topic, "b0", ["a1", "a2"])
    outcomes: list[object] = []
    done = await admin.resend_dead_letters(
        GROUP, to_topic="nowhere", on_sent=lambda letter, outcome: outcomes.append(outcome)
    )
    assert done == Resent(sent=0, failed=2)
    assert all(isinstance(outcome, TopicNotFound) for outcome in outcomes)


async def test_what_dies_meanwhile_is_left_for_the_next_time(
    cluster: Cluster, topic: str, admin: aio.Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duemq.administering.letters.dead_letters.PAGE_MESSAGES_MAX", 1)
    await die(cluster, topic, "b0", ["a1", "a2"])
    seen = []
    async for letter in admin.dead_letters(GROUP):
        seen.append(letter.body)
        await die(cluster, topic, "b0", ["a9"])
        await die(cluster, topic, "b1", ["b9"])
    assert seen == [b"a1", b"a2"]


async def test_a_group_without_letters_has_none_and_one_that_is_none_is_refused(
    cluster: Cluster, topic: str, admin: aio.Admin
) -> None:
    commit = broker_pb2.OffsetCommit(topic=topic, offset=0)
    await cluster.clients["b0"].broker.CommitOffsets(
        broker_pb2.CommitOffsetsRequest(group=GROUP, commits=[commit])
    )
    assert await listed(admin) == []
    with pytest.raises(GroupNotFound):
        await anext(admin.dead_letters("nobody"))
    for wrong in ({"limit": 0}, {"since": "yesterday"}, {"message_id": "a", "key": "b"}):
        with pytest.raises(InvalidArgument):
            await listed(admin, **wrong)
    with pytest.raises(InvalidArgument):
        await anext(admin.dead_letters(""))


async def test_a_broker_that_is_away_is_named_after_the_letters_of_the_others(
    cluster: Cluster, topic: str
) -> None:
    await die(cluster, topic, "b0", ["a1"])
    await die(cluster, topic, "b1", ["b1"])
    async with aio.Admin(cluster.nameserver) as admin:
        assert await listed(admin) == ["a1", "b1"]
        await cluster.stop_broker("b1")
        await until(lambda: [b.name for b in admin._client.routes.brokers] == ["b0"])
        letters = admin.dead_letters(GROUP)
        assert (await anext(letters)).body == b"a1"
        with pytest.raises(Unavailable) as caught:
            await anext(letters)
        assert "b1" in caught.value.message


async def test_the_blocking_client_does_the_same(cluster: Cluster, topic: str) -> None:
    await die(cluster, topic, "b0", ["a1", "a2"])

    def blocking() -> None:
        with Admin(cluster.nameserver) as admin:
            assert [letter.body for letter in admin.dead_letters(GROUP)] == [b"a1", b"a2"]
            letters = iter(admin.dead_letters(GROUP))
            assert next(letters).body == b"a1"
            letters.close()
            told: list[object] = []
            done = admin.resend_dead_letters(
                GROUP, message_id="id-a2", on_sent=lambda letter, outcome: told.append(outcome)
            )
            assert done == Resent(1, 0)
            assert [type(each) for each in told] == [Receipt]
            with pytest.raises(GroupNotFound):
                admin.resend_dead_letters("nobody")

    await asyncio.to_thread(blocking)


@pytest.mark.parametrize(
    ("field", "selection"),
    [
        ("key", {"key": ""}),
        ("message_id", {"message_id": ""}),
        ("key", {"key": "k", "message_id": "m"}),
        ("until", {"until": 0}),
        ("until", {"since": "now", "until": "-1h"}),
    ],
)
async def test_a_choice_of_nothing_is_refused_and_never_all(
    cluster: Cluster, topic: str, admin: aio.Admin, field: str, selection: dict[str, str | int]
) -> None:
    await die(cluster, topic, "b0", ["a1"])
    with pytest.raises(InvalidArgument) as refused:
        await admin.resend_dead_letters(GROUP, **selection)
    assert refused.value.field == field
    with pytest.raises(InvalidArgument):
        await listed(admin, **selection)
    with pytest.raises(InvalidArgument):
        await admin.find_messages(topic, **selection)


async def test_what_was_sent_when_a_resend_is_cancelled_is_marked(
    cluster: Cluster, topic: str, admin: aio.Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a1", "a2", "a3"]
    await die(cluster, topic, "b0", names)
    submit = Producer.submit

    def submit_and_cancel(self: Producer, *args: Any, **options: Any) -> Any:
        if not resending.cancelling():
            resending.cancel()
        return submit(self, *args, **options)

    monkeypatch.setattr(Producer, "submit", submit_and_cancel)
    resending = asyncio.create_task(admin.resend_dead_letters(GROUP))
    with pytest.raises(asyncio.CancelledError):
        await resending
    monkeypatch.undo()
    await admin.resend_dead_letters(GROUP, resent=False)
    found = (await admin.find_messages(topic)).messages
    again = [each.body.decode() for each in found if DEAD_LETTER_ID in each.properties]
    assert sorted(again) == names


async def test_what_a_broker_refuses_is_raised_as_it_is_while_others_are_asked(
    cluster: Cluster, topic: str, admin: aio.Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    await die(cluster, topic, "b0", ["a1"])
    await die(cluster, topic, "b1", ["b1"])
    refused = asyncio.Event()

    async def messages_at(_: object, broker: str, *_rest: object) -> AsyncGenerator[Message, None]:
        if broker == "b0":
            refused.set()
            raise InvalidArgument("no", field="key")
        await refused.wait()
        for _ in range(10):
            await asyncio.sleep(0)  # still under way as the refusal is heard
        return
        yield

    monkeypatch.setattr(finding, "messages_at", messages_at)
    with pytest.raises(InvalidArgument):
        await listed(admin)
