"""What replicas say to each other comes back as it was."""

from __future__ import annotations

import pytest

from duemq_server.replication.protocol.messages import Answer, Chunk
from duemq_server.replication.protocol.record import ReplicaId
from duemq_server.replication.running import wire
from duemq_server.replication.running.v1 import replication_pb2 as pb

A = ReplicaId("a", "0" * 32)


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(3, A, 5, b"data" * 100, 4, 1, 8, take_over=True),
        Chunk(3, A, 5, b"", 4, 1, 8),
        Chunk(0, A, 0, b"", 0, 0, 0),
    ],
    ids=["data", "heartbeat", "nothing but a name"],
)
def test_a_chunk_survives_the_wire(chunk: Chunk) -> None:
    sent = wire.to_chunk(chunk).SerializeToString()
    assert wire.chunk(pb.FromLeader.FromString(sent)) == chunk


@pytest.mark.parametrize("short_of_space", [True, False])
def test_an_answer_survives_the_wire(short_of_space: bool) -> None:
    answer = Answer(3, A, 5, 8, short_of_space)
    sent = wire.to_answer(answer).SerializeToString()
    assert wire.answer(pb.FromFollower.FromString(sent)) == answer


def test_a_chunk_may_be_a_view() -> None:
    data = memoryview(bytearray(b"xdatax"))[1:-1]
    sent = wire.to_chunk(Chunk(3, A, 5, data, 4, 1, 8)).SerializeToString()
    assert wire.chunk(pb.FromLeader.FromString(sent)).data == b"data"
