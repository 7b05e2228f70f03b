"""Options of `df.write` and `df.writeStream`, checked.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from duemq.protocol.names import check_topic
from duemq.settings import Tls
from duemq_analytics.options import (
    DEFAULT_NAMESERVER,
    IGNORED,
    TIMEOUT_S,
    TIMEOUT_S_LIMIT,
    TLS_NAMES,
    addresses,
    integer,
    invalid,
    tls_of,
)

ROW_ID_PROPERTY = "spark-row-id"
PROPERTY_CHARACTERS_MAX = 255
WRITE_ID_CHARACTERS_MAX = 128

NAMES = ("topic", "nameserver", *TLS_NAMES, "writeId", "rowIdProperty", "timeoutSeconds")

# Spark's own, handed to the sink of a stream with the others.
_OF_STREAMS = frozenset({"checkpointlocation", "queryname", "path"})


@dataclass(frozen=True)
class WriteOptions:
    """What `option(…)` said."""

    topic: str | None
    """Of all rows; None: the column `topic` says it."""
    nameservers: tuple[str, ...] = (DEFAULT_NAMESERVER,)
    """host:port; those that answer count."""
    write_id: str | None = None
    """Begins the rows' ids; None: the stream's query and micro-batch, or one made up."""
    row_id_property: str = ROW_ID_PROPERTY
    """The property with a row's id; empty: rows have none."""
    timeout_s: int = TIMEOUT_S
    """How long a message that cannot be stored is tried before the task fails."""
    tls: Tls | None = None
    """Paths where Spark's tasks run; None: without TLS."""


def parse(given: Mapping[str, str]) -> WriteOptions:
    """The options; raises InvalidArgument naming option, value and what is allowed."""
    options = {name.lower(): value for name, value in given.items()}
    known = {name.lower() for name in NAMES}
    for name in options:
        if name not in known and name not in IGNORED and name not in _OF_STREAMS:
            raise invalid(name, options[name], f"a known option: {', '.join(NAMES)}")
    topic = options.get("topic")
    if topic is not None:
        check_topic(topic)
    return WriteOptions(
        topic=topic,
        nameservers=addresses(options.get("nameserver", DEFAULT_NAMESERVER)),
        tls=tls_of(options),
        write_id=_text("writeId", options.get("writeid"), WRITE_ID_CHARACTERS_MAX),
        row_id_property=_text(
            "rowIdProperty",
            options.get("rowidproperty", ROW_ID_PROPERTY),
            PROPERTY_CHARACTERS_MAX,
        )
        or "",
        timeout_s=integer(
            "timeoutSeconds", options.get("timeoutseconds", str(TIMEOUT_S)), TIMEOUT_S_LIMIT
        ),
    )


def _text(name: str, text: str | None, limit: int) -> str | None:
    if text is not None and len(text) > limit:
        raise invalid(name, text, f"at most {limit} characters")
    return text
