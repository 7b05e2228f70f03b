"""How much of the log may go.  Pure.

Whole segments go, oldest first, when they are older than the time kept or when the log, and what
lies beside it for its messages, is larger than the size kept; never the last segment, and never
what is still needed (`needed_from`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from duemq.protocol.names import TIMER_TOPIC
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.tables import begins_at
from duemq_server.storage.indexes import consume_queue, key_run

BESIDE_BYTES = consume_queue.ENTRY_BYTES + key_run.ENTRY_BYTES
"""What lies beside the log for a message at most: its places in the consume queue and a key run."""


class SegmentAge(NamedTuple):
    """A segment that is not the last.

    `followed_ms`: when the first record behind it was stored, as the clock said then; None: it is
    not known.
    """

    start: int
    end: int
    followed_ms: int | None


def needed_from(store: Store) -> int:
    """The oldest byte that a new start replays, or that a timer shard has not taken over yet."""
    needed = store.next_start
    for queue in store.queues_of(TIMER_TOPIC):
        offset = max(store.tables.timers_taken_over(queue.queue_id), queue.min_offset)
        entry = queue.entry_from(offset)
        if entry is not None:
            position, _, frame_back, *_ = entry
            needed = min(needed, position - frame_back)
    return needed


def begins_beside(
    queues: Sequence[Queue], position: int, known: Mapping[Queue, int]
) -> dict[Queue, int]:
    """Where queues begin for what the log has from a position on; of those that can be read.

    `known`: what was found before.  Any thread: it reads what was not read for long.
    """
    found = {each: known[each] for each in queues if each in known}
    found.update(begins_at((each for each in queues if each not in known), position)[0])
    return found


def bytes_beside(begins: Mapping[Queue, int]) -> int:
    """Bytes beside the log for what lies in queues from these offsets on."""
    return BESIDE_BYTES * sum(queue.records_from(offset) for queue, offset in begins.items())


def cut_position(
    segments: Sequence[SegmentAge],
    end_position: int,
    now_ms: int,
    keep_ms: int,
    keep_bytes: int,
    hold: int,
    beside: Callable[[int], int],
) -> int:
    """The segments that end at or before the answer may go.  A limit of 0 does not apply.

    `hold`: what is needed from there on, however old it is (`needed_from`).  `beside`: bytes that
    lie beside the log for what it has from a position on.
    """
    position = segments[0].start if segments else 0
    for segment, newest_ms in zip(segments, newest_times(segments, now_ms), strict=True):
        log_bytes = end_position - segment.end
        too_old = keep_ms > 0 and newest_ms < now_ms - keep_ms
        too_much = keep_bytes > 0 and (
            log_bytes >= keep_bytes or log_bytes + beside(segment.end) >= keep_bytes
        )
        if segment.end > hold or not (too_old or too_much):
            break
        position = segment.end
    return position


def newest_times(segments: Sequence[SegmentAge], now_ms: int) -> list[int]:
    """When the newest record of each segment was stored at the latest.

    A time that lies in the future, or before that of an earlier segment, is a clock's mistake: then
    the next one that may be true counts.
    """
    credible: list[int | None] = []
    last_ms = 0
    for _, _, followed_ms in segments:
        if followed_ms is None or not last_ms <= followed_ms <= now_ms:
            credible.append(None)
        else:
            credible.append(followed_ms)
            last_ms = followed_ms
    newest_ms = now_ms
    newest = []
    for at_ms in reversed(credible):
        newest_ms = newest_ms if at_ms is None else at_ms
        newest.append(newest_ms)
    return newest[::-1]
