"""Limits that both ends keep: what a server refuses, no client sends.  Pure."""

from duemq.protocol.due import DUE_MS_MAX

KIB = 1 << 10
MIB = 1 << 20

# Of messages, as brokers are set by default.
MESSAGE_BYTES_DEFAULT = 4 * MIB
"""Of a body."""
BATCH_BYTES_DEFAULT = 8 * MIB
PROPERTIES_BYTES_DEFAULT = 32 * KIB
"""Key, tag, ordering key and properties of a message, encoded."""

# Of one request.
BATCHES_MAX = 1_024
BATCH_RECORDS_MAX = 65_536
HANDLES_MAX = 10_000
"""Of messages to cancel."""
TIMERS_MAX = 1_000
"""Of delayed messages to look at, and on a page of them."""
OFFSET_QUEUES_MAX = 4_096
"""Queues to acquire, release, commit or ask about."""
FOUND_MAX = 1_000
"""Messages in one step of a look-up."""
PULL_WAIT_MS_MAX = 30_000
PULL_RECORDS_MAX = 65_536
PULL_BYTES_MAX = 8 * MIB

# Of what a cluster has.
QUEUES_MAX = 1_024
"""Of a topic, on one broker."""
TOPICS_MAX = 10_000
"""Of one broker."""
SHARDS_MAX = 1_024
"""Of the timer service."""

# Of a consumer group.
SUBSCRIPTIONS_MAX = 1_000
"""Topics of a member, its group's retry topic among them."""
FILTER_CHARACTERS_MAX = 4_096
ERROR_CHARACTERS_MAX = 1_024
"""Of the reason that travels along with a message; brokers cut off the rest."""
SESSION_TIMEOUT_MS_MIN = 1_000
SESSION_TIMEOUT_MS_MAX = 300_000

# Of numbers on the wire.
OFFSET_MAX = (1 << 63) - 1
TOPIC_ID_MAX = (1 << 64) - 1
QUEUE_ID_MAX = (1 << 31) - 1
ATTEMPT_MAX = (1 << 31) - 1
SEQUENCE_MAX = (1 << 64) - 2
"""Of a batch: the one after it must fit into 64 bits, too."""
SERVICE_IDS_FROM = 1 << 63
"""Producer ids from here on are those of timer services; brokers never forget them."""
FIRE_AHEAD_MS_MAX = 5
"""Brokers store what is due no sooner than so long before its time."""
WINDOW_BATCHES = 64
"""Of a producer's last batches to one queue, that a broker knows again."""

# Of a span.
SPAN_NUMBERS = {
    "batch_count": range(2**31),
    "sampled_count": range(2**31),
    "due_ms": range(DUE_MS_MAX + 1),
    "lateness_ms": range(-DUE_MS_MAX, DUE_MS_MAX + 1),
}
"""By column (protos/duemq/v1/trace.proto).  Beyond is damage: Spark ends a job whose sums overflow,
and times end with the year 9999."""
