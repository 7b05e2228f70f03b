"""Records to Arrow batches, as a task of Spark gives them."""

from duemq.v1.message_pb2 import Record
from duemq_analytics import options
from duemq_analytics.source import duemq_source, schema
from duemq_analytics.source.client import RecordRun
from duemq_analytics.source.duemq_source import MessageReader
from duemq_analytics.source.plan import QueueRange

PIECE = QueueRange("broker-0", "h:1", 0, 0, 100)


def batches(*sizes):
    """Rows of each batch, of records with such bodies."""
    return batches_of([Record(body=bytes(size)) for size in sizes])


def batches_of(records):
    """Rows of each batch; the records come two a run."""
    reader = MessageReader(
        options.parse({"topic": "orders"}), schema.select(schema.MESSAGES, ["body"])
    )
    found = (RecordRun(at, 0, records[at : at + 2]) for at in range(0, len(records), 2))
    return [batch.num_rows for batch in reader.batches(PIECE, found)]


def test_batches_are_bounded_in_rows_and_in_bytes(monkeypatch):
    monkeypatch.setattr(duemq_source, "BATCH_ROWS", 4)
    monkeypatch.setattr(duemq_source, "BATCH_BYTES", 1_000)
    assert batches(*[1] * 10) == [4, 4, 2]
    assert batches(1, 1, 999, 1, 600, 400, 1, 1) == [4, 2, 2]


def test_properties_count_among_the_bytes_of_a_batch(monkeypatch):
    monkeypatch.setattr(duemq_source, "BATCH_BYTES", 1_000)
    assert batches_of([Record(properties={"p": "x" * 600}) for _ in range(6)]) == [2, 2, 2]
