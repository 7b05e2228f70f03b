"""What replicas say to each other, as messages of protos/replication and back."""

from __future__ import annotations

from typing import TypeAlias

from duemq.errors import InvalidArgument
from duemq_server.replication.protocol.messages import (
    Answer,
    Chunk,
    Hello,
    LogPart,
    NeedsSnapshot,
    Reason,
    Refusal,
    Welcome,
)
from duemq_server.replication.protocol.record import MemberChange, ReplicaId
from duemq_server.replication.running.v1 import replication_pb2 as pb
from duemq_server.replication.settings import check_name

Greeting: TypeAlias = Welcome | NeedsSnapshot | Refusal

_REASONS = {
    Reason.NOT_LEADING: pb.Refusal.NOT_LEADING,
    Reason.STALE: pb.Refusal.STALE,
    Reason.FOREIGN: pb.Refusal.FOREIGN,
    Reason.STRANGER: pb.Refusal.STRANGER,
    Reason.LOST: pb.Refusal.LOST,
}
_BY_NUMBER = {number: reason for reason, number in _REASONS.items()}


def replica_id(message: pb.ReplicaId) -> ReplicaId:
    """Decoded."""
    return ReplicaId(message.name, message.disk)


def to_replica_id(replica: ReplicaId) -> pb.ReplicaId:
    """Encoded."""
    return pb.ReplicaId(name=replica.name, disk=replica.disk)


def to_hello(hello: Hello, address: str) -> pb.FromFollower:
    """A follower's first message; `address`: where it is reached."""
    return pb.FromFollower(
        hello=pb.Hello(
            group=hello.group,
            store_id=hello.store_id,
            replica=to_replica_id(hello.replica),
            epoch=hello.epoch,
            epochs=[pb.EpochBegin(epoch=epoch, start=start) for epoch, start in hello.epochs],
            start=hello.start,
            end=hello.end,
            log_version=hello.log_version,
            address=address,
        )
    )


def hello(message: pb.FromFollower) -> Hello:
    """Raises InvalidArgument for anything else."""
    if message.WhichOneof("message") != "hello":
        raise InvalidArgument("message: the first one must be a hello", field="message")
    found = message.hello
    return Hello(
        found.group,
        found.store_id,
        replica_id(found.replica),
        found.epoch,
        tuple((begin.epoch, begin.start) for begin in found.epochs),
        found.start,
        found.end,
        found.log_version,
        found.address,
    )


def to_answer(answer: Answer) -> pb.FromFollower:
    """A follower's later messages."""
    return pb.FromFollower(
        answer=pb.Answer(
            epoch=answer.epoch,
            replica=to_replica_id(answer.replica),
            durable=answer.durable,
            heard_ms=answer.heard_ms,
            short_of_space=answer.short_of_space,
        )
    )


def answer(message: pb.FromFollower) -> Answer:
    """Raises InvalidArgument for anything else."""
    if message.WhichOneof("message") != "answer":
        raise InvalidArgument("message: an answer must follow the hello", field="message")
    found = message.answer
    return Answer(
        found.epoch,
        replica_id(found.replica),
        found.durable,
        found.heard_ms,
        found.short_of_space,
    )


def to_greeting(greeting: Greeting) -> pb.FromLeader:
    """A leader's first message."""
    leader = to_replica_id(greeting.leader)
    if isinstance(greeting, Welcome):
        welcome = pb.Welcome(epoch=greeting.epoch, leader=leader, truncate_to=greeting.truncate_to)
        if (part := greeting.common) is not None:
            welcome.common.start, welcome.common.end = part.start, part.end
            welcome.common.crc32c = part.crc32c
        return pb.FromLeader(welcome=welcome)
    if isinstance(greeting, NeedsSnapshot):
        return pb.FromLeader(
            needs_snapshot=pb.NeedsSnapshot(
                epoch=greeting.epoch, leader=leader, log_start=greeting.log_start
            )
        )
    return pb.FromLeader(
        refusal=pb.Refusal(
            epoch=greeting.epoch,
            leader=leader,
            reason=_REASONS[greeting.reason],
            text=greeting.text,
        )
    )


def not_leading(text: str) -> pb.FromLeader:
    """Who is asked leads nothing."""
    return pb.FromLeader(refusal=pb.Refusal(reason=pb.Refusal.NOT_LEADING, text=text))


def greeting(message: pb.FromLeader) -> Greeting:
    """Raises InvalidArgument for anything else."""
    match message.WhichOneof("message"):
        case "welcome":
            found = message.welcome
            part = found.common
            common = LogPart(part.start, part.end, part.crc32c) if part.end else None
            return Welcome(found.epoch, replica_id(found.leader), found.truncate_to, common)
        case "needs_snapshot":
            needs = message.needs_snapshot
            return NeedsSnapshot(needs.epoch, replica_id(needs.leader), needs.log_start)
        case "refusal":
            refusal = message.refusal
            reason = _BY_NUMBER.get(refusal.reason, Reason.NOT_LEADING)
            return Refusal(refusal.epoch, replica_id(refusal.leader), reason, refusal.text)
    raise InvalidArgument("message: a leader greets first", field="message")


def to_chunk(chunk: Chunk) -> pb.FromLeader:
    """A leader's later messages."""
    message = pb.FromLeader()
    to = message.chunk  # filled in its place: a message that is put into another one is copied
    to.epoch = chunk.epoch
    to.leader.name, to.leader.disk = chunk.leader
    to.position = chunk.position
    to.data = bytes(chunk.data)
    to.committed = chunk.committed
    to.log_start = chunk.log_start
    to.sent_ms = chunk.sent_ms
    to.take_over = chunk.take_over
    return message


def chunk(message: pb.FromLeader) -> Chunk:
    """Raises InvalidArgument for anything else."""
    if message.WhichOneof("message") != "chunk":
        raise InvalidArgument("message: a chunk must follow the welcome", field="message")
    found = message.chunk
    return Chunk(
        found.epoch,
        replica_id(found.leader),
        found.position,
        found.data,
        found.committed,
        found.log_start,
        found.sent_ms,
        found.take_over,
    )


def member_change(request: pb.ChangeMembersRequest) -> MemberChange:
    """What an operator asks for.  Raises InvalidArgument."""
    joins = request.WhichOneof("change") == "add"
    name = request.add if joins else request.remove
    if joins or not name:
        check_name("replica", name)
    return MemberChange(name, joins, request.accepted)
