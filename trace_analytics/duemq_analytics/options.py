"""Options of the data sources, checked.  Pure; names as Spark's Kafka source has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from duemq.errors import InvalidArgument
from duemq.settings import Tls, default_tls

EARLIEST = "earliest"
LATEST = "latest"

# As Kafka's source: a number below 0 stands for a word.
_WORDS = {-1: LATEST, -2: EARLIEST}

DEFAULT_NAMESERVER = "127.0.0.1:9876"
SKIP = "skip"
ROWS = "rows"

RECORDS_PER_PARTITION = 100_000
TRACE_RECORDS_PER_PARTITION = 1_000
"""Of the trace topic; each holds up to 512 spans."""
RECORDS_PER_PARTITION_LIMIT = 10_000_000
OFFSETS_PER_TRIGGER_LIMIT = 1_000_000_000
TIMEOUT_S = 60
TIMEOUT_S_LIMIT = 3_600

# Spark's own, set on tables and views.
IGNORED = frozenset({"serialization.format"})

# broker → queue → offset, or one of the words for all.
Positions = str | Mapping[str, Mapping[int, int | str]]


@dataclass(frozen=True)
class Options:
    """What `option(…)` said."""

    topic: str
    nameservers: tuple[str, ...] = (DEFAULT_NAMESERVER,)
    """host:port; all are asked, those that answer count."""
    tls: Tls | None = None
    """Paths where Spark's tasks run; None: without TLS."""
    starting: Positions = EARLIEST
    ending: Positions = LATEST
    records_per_partition: int = RECORDS_PER_PARTITION
    """A queue's range is cut so that no partition has more records of the topic."""
    fail_on_data_loss: bool = True
    """Whether an offset that is no longer (or not yet) there, or a lost broker, fails the read."""
    timeout_s: int = TIMEOUT_S
    """How long an unreachable server is asked again before the read fails."""
    offsets_per_trigger: int | None = None
    """Of a stream: messages of the topic that one micro-batch takes at most, over all queues."""
    undecodable: str = SKIP
    """Of spans: what becomes of messages that are no spans, `skip` or `rows`."""


TLS_NAMES = ("tlsCa", "tlsCert", "tlsKey")

NAMES = (
    "topic",
    "nameserver",
    *TLS_NAMES,
    "startingOffsets",
    "endingOffsets",
    "maxRecordsPerPartition",
    "maxOffsetsPerTrigger",
    "failOnDataLoss",
    "timeoutSeconds",
)

SPAN_NAMES = (*NAMES, "undecodable")
"""Of `duemq-spans`."""


def parse(
    given: Mapping[str, str],
    *,
    topic: str = "",
    records_per_partition: int = RECORDS_PER_PARTITION,
    names: Sequence[str] = NAMES,
) -> Options:
    """The options; raises InvalidArgument naming option, value and what is allowed.

    `topic`, `records_per_partition` and `names` are the source's own.
    """
    options = {name.lower(): value for name, value in given.items()}
    known = {name.lower() for name in names}
    for name in options:
        if name not in known and name not in IGNORED:
            raise invalid(name, options[name], f"a known option: {', '.join(names)}")
    topic = options.get("topic", topic)
    if not topic:
        raise invalid("topic", "", "the topic to read")
    return Options(
        topic=topic,
        nameservers=addresses(options.get("nameserver", DEFAULT_NAMESERVER)),
        tls=tls_of(options),
        starting=_positions("startingOffsets", options.get("startingoffsets", EARLIEST)),
        ending=_positions("endingOffsets", options.get("endingoffsets", LATEST)),
        records_per_partition=integer(
            "maxRecordsPerPartition",
            options.get("maxrecordsperpartition", str(records_per_partition)),
            RECORDS_PER_PARTITION_LIMIT,
        ),
        offsets_per_trigger=integer(
            "maxOffsetsPerTrigger", options["maxoffsetspertrigger"], OFFSETS_PER_TRIGGER_LIMIT
        )
        if "maxoffsetspertrigger" in options
        else None,
        fail_on_data_loss=_boolean("failOnDataLoss", options.get("failondataloss", "true")),
        timeout_s=integer(
            "timeoutSeconds", options.get("timeoutseconds", str(TIMEOUT_S)), TIMEOUT_S_LIMIT
        ),
        undecodable=_word("undecodable", options.get("undecodable", SKIP), (SKIP, ROWS)),
    )


def tls_of(options: Mapping[str, str]) -> Tls | None:
    """What the options in lower case say; none: what DUEMQ_TLS_… say where this runs."""
    given = [options.get(name.lower(), "") for name in TLS_NAMES]
    if not any(given):
        return default_tls()
    ca, cert, key = given
    return Tls(ca=ca, cert=cert, key=key)


def addresses(text: str) -> tuple[str, ...]:
    """Of nameservers: `host:port`, separated by commas."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    for address in found:
        host, colon, port = address.rpartition(":")
        if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
            raise invalid("nameserver", address, "host:port[,host:port…]")
    if not found:
        raise invalid("nameserver", text, "host:port[,host:port…]")
    return found


def _positions(name: str, text: str) -> Positions:
    word = text.strip().lower()
    if word in (EARLIEST, LATEST):
        return word
    limit = f'{EARLIEST}, {LATEST} or JSON like {{"broker-0":{{"0":120,"1":-2}}}}'
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError:
        raise invalid(name, text, limit) from None
    if not isinstance(parsed, dict):
        raise invalid(name, text, limit)
    return {broker: _queues(name, broker, queues, limit) for broker, queues in parsed.items()}


def _queues(name: str, broker: str, queues: object, limit: str) -> dict[int, int | str]:
    if not isinstance(queues, dict):
        raise invalid(name, f"{broker}: {queues!r}", limit)
    positions: dict[int, int | str] = {}
    for queue, offset in queues.items():
        if not (queue.isascii() and queue.isdigit()) or type(offset) is not int or offset < -2:
            raise invalid(name, f"{broker}: {{{queue!r}: {offset!r}}}", limit)
        positions[int(queue)] = _WORDS.get(offset, offset)
    return positions


def integer(name: str, text: str, limit: int) -> int:
    """A whole number from 1 to `limit`."""
    if text.isascii() and text.isdigit() and 1 <= int(text) <= limit:
        return int(text)
    raise invalid(name, text, f"a whole number from 1 to {limit:,}")


def _word(name: str, text: str, words: Sequence[str]) -> str:
    if text.lower() in words:
        return text.lower()
    raise invalid(name, text, " or ".join(words))


def _boolean(name: str, text: str) -> bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    raise invalid(name, text, "true or false")


def invalid(name: str, value: str, limit: str) -> InvalidArgument:
    """The error of an option; `limit` says what it may be."""
    return InvalidArgument(
        f"option {name}: {value!r} is not {limit}", field=name, value=value, limit=limit
    )
