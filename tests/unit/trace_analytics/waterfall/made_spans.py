"""Batches of spans as they lie in the trace topic."""

from duemq.v1.trace_pb2 import SpanBatch

TRACE = "0a" * 16
TEXTS = ("kind", "status", "operation", "message_id", "consumer_group", "instance", "broker")
TEXTS += ("error_type", "topic", "attributes")
NUMBERS = ("start_ns", "duration_ns", "attempt", "batch_count", "sampled_count", "queue_offset")


def body(*spans):
    """Of spans as dicts by column; ids in hexadecimal, `links` pairs of them."""
    batch = SpanBatch(schema_version=2, rows=len(spans))
    batch.trace_ids = b"".join(bytes.fromhex(span.get("trace_id", TRACE)) for span in spans)
    batch.span_ids = b"".join(bytes.fromhex(span["span_id"]) for span in spans)
    parents = [span.get("parent_span_id", "00" * 8) for span in spans]
    batch.parent_span_ids = b"".join(map(bytes.fromhex, parents))
    for name in TEXTS:
        column = getattr(batch, name)
        column.values.extend(span.get(name, "") for span in spans)
        column.rows.extend(range(len(spans)))
    for name in NUMBERS:
        getattr(batch, name).extend(span.get(name, 0) for span in spans)
    batch.queue_id.extend(span.get("queue", -1) for span in spans)
    for span in spans:
        links = span.get("links", ())
        batch.link_counts.append(len(links))
        batch.link_trace_ids += b"".join(bytes.fromhex(trace) for trace, _ in links)
        batch.link_span_ids += b"".join(bytes.fromhex(span) for _, span in links)
    return batch.SerializeToString()


def span(number, operation, **columns):
    """A span whose id is its number."""
    return {"span_id": f"{number:016x}", "operation": operation, "start_ns": number} | columns
