"""The hand-written codec against protobuf's."""

import random

import numpy as np
import pytest

from duemq.errors import Corrupt
from duemq.v1 import message_pb2
from duemq_server.broker.records import retry_record
from duemq_server.broker.records.retry_record import MessagePlace, Story

ORIGIN = MessagePlace("größe", "b1", 3, 41)
SOURCE = MessagePlace("%RETRY%billing", "b2", 0, 1 << 40)
STORY = Story("billing", ORIGIN, 1_700_000_000_000, 1_700_000_010_000, "boom ✗", SOURCE)


def record(**fields: object) -> message_pb2.Record:
    return message_pb2.Record(
        body=b"body",
        message_id="id",
        key="k",
        tag="t",
        ordering_key="o",
        properties={"p": "1", "q": "2"},
        born_ms=5,
        **fields,
    )


def proto(story: Story) -> message_pb2.Retry:
    def ref(place: MessagePlace) -> message_pb2.QueueRef:
        return message_pb2.QueueRef(topic=place.topic, broker=place.broker, queue_id=place.queue_id)

    return message_pb2.Retry(
        group=story.group,
        origin=ref(story.origin),
        origin_offset=story.origin.offset,
        first_failed_ms=story.first_failed_ms,
        last_failed_ms=story.last_failed_ms,
        error=story.error,
        source=ref(story.source),
        source_offset=story.source.offset,
    )


def decoded(entry: bytes) -> message_pb2.Record:
    [found] = message_pb2.RecordBatch.FromString(entry).records
    return found


def entry_of(message: message_pb2.Record) -> bytes:
    return message_pb2.RecordBatch(records=[message]).SerializeToString()


@pytest.mark.parametrize("story", [STORY, Story("", ORIGIN, 0, 0, "", ORIGIN)])
@pytest.mark.parametrize("body_bytes", [0, 1, 127, 128, 20_000])
def test_it_is_what_protobuf_writes(story: Story, body_bytes: int) -> None:
    before = record(due_ms=77, attempt=1)
    before.retry.group = "another"
    before.retry.error = "older"
    before.body = bytes(body_bytes)
    after = record(attempt=2, retry=proto(story))
    after.body = bytes(body_bytes)
    entry = retry_record.rewritten(before.SerializeToString(), 2, story)
    assert decoded(entry) == after
    assert retry_record.read(retry_record.content(entry)) == (2, story)


def test_what_this_release_does_not_know_is_kept() -> None:
    unknown = b"\xfa\x06\x03new" + b"\xf8\x06\x05" + b"\xfd\x06abcd" + b"\xf9\x06abcdefgh"
    stored = record().SerializeToString() + unknown
    entry = retry_record.rewritten(stored, 1, STORY)
    assert unknown in entry
    assert decoded(entry).body == b"body"


def test_a_field_that_occurs_twice_is_cut_out_twice() -> None:
    # As the timer service appends due times, and as a hostile producer writes.
    twice = (
        record(attempt=9).SerializeToString() + b"\x40\x05" + record(due_ms=8).SerializeToString()
    )
    entry = retry_record.rewritten(twice, 1, STORY)
    assert (decoded(entry).attempt, decoded(entry).due_ms) == (1, 0)


def test_a_record_without_a_story() -> None:
    assert retry_record.read(record().SerializeToString()) == (0, None)
    assert retry_record.read(b"") == (0, None)


def test_a_story_of_the_wrong_shape_is_read_as_far_as_it_goes() -> None:
    number_as_text = b"\x52\x04" + b"\x1a\x02xx"
    text_as_number = b"\x52\x04" + b"\x08\x07" + b"\x10\x05"
    fixed = b"\x52\x05" + b"\x1d1234"
    for stored in (number_as_text, text_as_number, fixed):
        _, story = retry_record.read(stored)
        assert story is not None
        assert (story.group, story.origin) == ("", MessagePlace("", "", 0, 0))
    assert retry_record.read(b"\x50\x07" + b"\x4a\x01x") == (0, None)


def test_numbers_are_those_of_an_int64() -> None:
    negative = message_pb2.Record(attempt=-1, retry=message_pb2.Retry(origin_offset=-5))
    attempt, story = retry_record.read(negative.SerializeToString())
    assert attempt == 0
    assert story is not None
    assert story.origin.offset == -5


@pytest.mark.parametrize(
    "stored",
    [
        b"\x0a",
        b"\x0a\x05abc",
        b"\x00\x01",
        b"\x0b\x01",
        b"\x40\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x0d\x01",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x52\x02\x0a\x05",
    ],
)
def test_what_is_no_record_is_said_to_be_corrupt(stored: bytes) -> None:
    with pytest.raises(Corrupt):
        retry_record.read(stored)


@pytest.mark.parametrize("entry", [b"", b"\x0a", b"\x12\x00", b"\x0a\x05abc", b"\x0a\x01abc"])
def test_what_is_no_entry_is_said_to_be_corrupt(entry: bytes) -> None:
    with pytest.raises(Corrupt):
        retry_record.content(entry)


def test_random_bytes_are_read_or_refused() -> None:
    randomness = random.Random(7)
    whole = record(attempt=3, retry=proto(STORY)).SerializeToString()
    for _ in range(3_000):
        stored = bytearray(whole[: randomness.randrange(len(whole) + 1)])
        for _ in range(randomness.randrange(4)):
            if stored:
                stored[randomness.randrange(len(stored))] = randomness.randrange(256)
        try:
            retry_record.read(bytes(stored))
            retry_record.rewritten(bytes(stored), 1, STORY)
        except Corrupt:
            pass


def test_the_sources_of_a_frame() -> None:
    entries = [
        retry_record.rewritten(record().SerializeToString(), 1, STORY._replace(source=source))
        for source in (SOURCE, ORIGIN)
    ]
    sizes = np.array([len(entry) for entry in entries], dtype=np.uint32)
    assert list(retry_record.sources(memoryview(b"".join(entries)), sizes)) == [
        ("%RETRY%billing", 0, 1 << 40),
        ("größe", 3, 41),
    ]
    plain = entry_of(record())
    with pytest.raises(Corrupt):
        list(retry_record.sources(memoryview(plain), np.array([len(plain)], dtype=np.uint32)))
