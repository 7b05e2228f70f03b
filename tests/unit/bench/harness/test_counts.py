"""What a benchmark's group counts, and what it makes of it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from duemq import Message
from duemq.message import Origin
from duemq.v1.message_pb2 import Record
from duemq_server.bench.harness.arrivals import numbered
from duemq_server.bench.harness.counts import SEEN_MAX, Tally, queue_code
from duemq_server.bench.measures.rebalance import Parted, handover_ms

MS = 1_000_000


def message(number: int, queue: int = 0) -> Message:
    return Message(Record(body=numbered(number, b"x")), Origin("t", "b", queue), 0, 0)


def test_a_tally_is_seen_by_who_maps_the_same_file(tmp_path: Path) -> None:
    with Tally(tmp_path / "tally", 3) as writer, Tally(tmp_path / "tally", 3) as reader:
        writer.count(message(1))
        writer.note(message(2, queue=5), 77)
        assert reader.total == 2
        assert list(reader.seen) == [0, 1, 1]
        assert list(reader.received_ns) == [0, 0, 77]
        assert reader.queues[2] == queue_code("b", 5)


def test_a_count_stops_at_its_limit(tmp_path: Path) -> None:
    with Tally(tmp_path / "tally", 1) as tally:
        for _ in range(SEEN_MAX + 1):
            tally.count(message(0))
        assert (tally.seen[0], tally.total) == (SEEN_MAX, SEEN_MAX + 1)


def test_a_number_that_was_never_sent_is_an_error(tmp_path: Path) -> None:
    with Tally(tmp_path / "tally", 1) as tally, pytest.raises(IndexError):
        tally.count(message(1))


def member(*received: tuple[int, str]) -> SimpleNamespace:
    """By (time in ms, queue); 0 ms: it did not come here."""
    times, queues = zip(*((at * MS, ord(queue)) for at, queue in received), strict=True)
    return SimpleNamespace(tally=SimpleNamespace(received_ns=times, queues=queues))


def test_a_handover_is_measured_from_the_parting_to_each_queues_next_message() -> None:
    leaver = member((1_900, "a"), (1_950, "b"), (0, "a"), (0, "b"), (0, "a"), (0, "c"))
    heir = member((0, "a"), (0, "b"), (2_030, "a"), (0, "b"), (2_040, "a"), (2_001, "c"))
    other = member((0, "a"), (0, "b"), (0, "a"), (2_070, "b"), (0, "a"), (0, "c"))
    crew = SimpleNamespace(members=[leaver, heir, other])
    assert handover_ms(crew, Parted(leaver, 2_000 * MS)) == (30.0, 70.0)


def test_queues_that_a_member_had_long_ago_are_not_its_own() -> None:
    leaver = member((10, "a"), (1_950, "b"), (0, "a"), (0, "b"))
    heir = member((0, "a"), (0, "b"), (2_001, "a"), (2_050, "b"))
    crew = SimpleNamespace(members=[leaver, heir])
    assert handover_ms(crew, Parted(leaver, 2_000 * MS)) == (50.0, 50.0)
