from __future__ import annotations

import struct

import pytest

from duemq_server.storage import frame


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def i64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def plain(**changes: object) -> bytes:
    fields: dict[str, object] = {
        "topic": "orders",
        "queue_id": 3,
        "base_offset": 1000,
        "store_ms": 1_700_000_000_000,
        "sizes": u32(2, 3, 1),
        "tag_hashes": u32(10, 0, 12),
        "key_hashes": u32(20, 21, 0),
        "payload": b"aabbbc",
        "producer_id": 2**63 + 5,
        "producer_epoch": 4,
        "sequence": 9,
    }
    fields.update(changes)
    return b"".join(frame.encode_parts(**fields))  # type: ignore[arg-type]


def test_a_frame_gives_back_what_was_put_in() -> None:
    got = frame.decode(plain())
    assert (got.topic, got.queue_id, got.base_offset, got.end_offset) == ("orders", 3, 1000, 1003)
    assert (got.producer_id, got.producer_epoch, got.sequence) == (2**63 + 5, 4, 9)
    assert got.store_ms == 1_700_000_000_000
    assert got.sizes.tolist() == [2, 3, 1]
    assert got.tag_hashes.tolist() == [10, 0, 12]
    assert got.key_hashes.tolist() == [20, 21, 0]
    assert got.payload == b"aabbbc"
    assert not got.timed
    assert got.due_ms.tolist() == []
    assert (got.target_topic, got.target_queue_id) == ("", -1)


def test_a_timed_frame_keeps_its_target_and_due_times() -> None:
    data = plain(topic="%TIMER%", target_topic="ünï", target_queue_id=-1, due_ms=i64(5, -1, 2**62))
    got = frame.decode(data)
    assert got.timed
    assert got.due_ms.tolist() == [5, -1, 2**62]
    assert (got.topic, got.target_topic, got.target_queue_id) == ("%TIMER%", "ünï", -1)
    assert got.payload == b"aabbbc"


@pytest.mark.parametrize("timed", [False, True])
def test_a_send_back_frame_says_so(timed: bool) -> None:
    due = {"due_ms": i64(1, 2, 3)} if timed else {}
    got = frame.decode(plain(send_back=True, **due))
    assert (got.send_back, got.timed) == (True, timed)
    assert not frame.decode(plain(**due)).send_back


@pytest.mark.parametrize("send_back", [False, True])
def test_a_frame_without_traces_says_so(send_back: bool) -> None:
    got = frame.decode(plain(untraced=True, send_back=send_back))
    assert (got.untraced, got.send_back, got.timed) == (True, send_back, False)
    assert not frame.decode(plain(send_back=send_back)).untraced


def test_arrays_are_views_of_the_frame() -> None:
    body = memoryview(plain())
    got = frame.decode(body)
    assert got.sizes.base is not None
    assert got.payload.obj is body.obj


def test_due_times_are_aligned() -> None:
    got = frame.decode(plain(due_ms=i64(1, 2, 3)))
    assert (got.payload_at - 3 * 8) % 8 == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": u32(2, 3)}, "have 8, 12 and 12 bytes"),
        ({"key_hashes": b""}, "have 12, 12 and 0 bytes"),
        ({"sizes": b"abc", "tag_hashes": b"abc", "key_hashes": b"abc"}, "four a record"),
        ({"due_ms": i64(1)}, "due_ms has 8 bytes for 3 records"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plain(**changes)


def test_a_frame_whose_lengths_do_not_add_up_is_refused() -> None:
    data = plain()
    for wrong in (data[:-1], data + b"x", data[:10]):
        with pytest.raises(ValueError, match="a frame of"):
            frame.decode(wrong)
