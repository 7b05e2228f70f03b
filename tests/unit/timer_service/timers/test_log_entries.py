import numpy as np

from duemq_server.timer_service.timers import log_entries
from duemq_server.timer_service.timers.log_entries import (
    Dispatched,
    LaneId,
    Restarted,
    SourceId,
)

SOURCE = SourceId(0xFFFF_0000_1234_5678, 3)
LANE = LaneId("broker-ä", "topic", 7)


def view(*parts: bytes | memoryview) -> memoryview:
    return memoryview(b"".join(parts))


def test_add_keeps_the_frames_and_says_where_they_begin() -> None:
    body = view(*log_entries.encode_add(SOURCE, "broker-1", b"frames"))

    added = log_entries.decode_add(body)

    assert (added.source, added.broker, bytes(added.frames)) == (SOURCE, "broker-1", b"frames")
    assert bytes(body[added.frames_at :]) == b"frames"
    assert added.frames_at % 8 == 0


def test_cancel() -> None:
    table = log_entries.cancelled_table(
        [SOURCE, SourceId(1, 0)],
        np.array([0, 1], dtype=np.uint32),
        np.array([5, 0]),
        np.array([1_000, 2**62]),
        np.array([7, 8], dtype=np.uint32),
    )
    found = log_entries.decode_cancelled(view(table.tobytes()))
    assert found[["store_id", "queue_id", "offset", "due_ms"]].tolist() == [
        (SOURCE.store_id, SOURCE.queue_id, 5, 1_000),
        (1, 0, 0, 2**62),
    ]
    assert log_entries.decode_cancel_topics(view(table.tobytes())) == [7, 8]


def test_dispatch() -> None:
    batch = Dispatched(
        LANE,
        2,
        9,
        [SOURCE, SourceId(1, 0)],
        np.array([5, 6, 1 << 40], dtype=np.int64),
        np.array([0, 1, 0], dtype=np.uint16),
    )

    body = log_entries.encode_dispatch(batch)
    found = log_entries.decode_dispatch(view(body))

    assert len(body) % 8 == 0
    assert found[:4] == batch[:4]
    assert found.offsets.tolist() == batch.offsets.tolist()
    assert found.source_index.tolist() == batch.source_index.tolist()


def test_ack_and_epoch() -> None:
    assert log_entries.decode_ack(view(log_entries.encode_ack([1, 1 << 60]))) == [1, 1 << 60]
    restarted = Restarted(LANE, 4)
    assert log_entries.decode_epoch(view(log_entries.encode_epoch(restarted))) == restarted
