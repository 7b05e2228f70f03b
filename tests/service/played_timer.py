"""The timer service as a test plays it: it fetches frames of %TIMER% and sends them on."""

from duemq.protocol.limits import SERVICE_IDS_FROM
from duemq.transport import status
from duemq.v1 import broker_pb2, message_pb2
from duemq_server.storage import frame, record
from tests.service.running_broker import Client


async def claim_queues(client: Client, queues: int = 4) -> None:
    """Makes the played one their owner, with the id SERVICE_IDS_FROM."""
    service = broker_pb2.TimerService(id=SERVICE_IDS_FROM, name="played", shard=0, shards=1)
    claim = broker_pb2.ClaimTimerQueuesRequest(service=service, queue_ids=range(queues))
    await status.answer(client.broker.ClaimTimerQueues(claim))


async def timed_frames(client: Client) -> list[frame.Frame]:
    """All that lies in %TIMER%."""
    await claim_queues(client)
    found: list[frame.Frame] = []
    for queue_id in range(4):
        offset = 0
        while True:
            request = broker_pb2.FetchFramesRequest(
                topic="%TIMER%",
                queue_id=queue_id,
                offset=offset,
                timer_id=SERVICE_IDS_FROM,
            )
            answer = await status.answer(client.broker.FetchFrames(request))
            at = 0
            while at < len(answer.frames):
                entry = record.decode(memoryview(answer.frames), at)
                found.append(frame.decode(bytes(entry.body)))
                at += entry.end - entry.position
            if answer.next_offset == offset:
                break
            offset = answer.next_offset
    return found


def records_in(each: frame.Frame) -> list[message_pb2.Record]:
    return list(message_pb2.RecordBatch.FromString(bytes(each.payload)).records)


async def fire(client: Client, timed: frame.Frame, number: int) -> None:
    """Sends a frame to its target.  `number`: of this frame, so that repeating does nothing."""
    made = broker_pb2.Batch(
        topic=timed.target_topic,
        producer_id=SERVICE_IDS_FROM,
        sequence=number,
        records=message_pb2.RecordBatch.FromString(bytes(timed.payload)),
    )
    [result] = await client.send(made)
    assert not result.HasField("error"), result.error
