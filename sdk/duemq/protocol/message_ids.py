"""Message ids of the SDK: unique, and roughly in the order of time.  Pure.

    time(11)  producer(9)  batch(5)  index(3)      28 lower-case hex digits

time      when the message's batch was begun, ms since the epoch by the producer's clock
producer  random
batch     counts the producer's batches, modulo 16^5
index     of the message in its batch

Ids of other clients may be any text.
"""

import os
import re

ID_CHARS = 28
_TIME_CHARS, _PRODUCER_CHARS, _BATCH_CHARS, _INDEX_CHARS = 11, 9, 5, 3
_BATCHES = 16**_BATCH_CHARS
_TIME_END = 16**_TIME_CHARS
INDEXES = tuple(b"%0*x" % (_INDEX_CHARS, index) for index in range(16**_INDEX_CHARS))
"""How the ids of a batch's messages end."""

_ID = re.compile(f"[0-9a-f]{{{ID_CHARS}}}")


class MessageIds:
    """One producer's."""

    def __init__(self) -> None:
        self._producer = os.urandom(_PRODUCER_CHARS).hex()[:_PRODUCER_CHARS]
        self._batch = 0

    def head(self, now_ms: int) -> bytes:
        """The ids of the next batch's messages, but for their index."""
        self._batch = (self._batch + 1) % _BATCHES
        return b"%0*x%s%0*x" % (
            _TIME_CHARS,
            now_ms % _TIME_END,
            self._producer.encode(),
            _BATCH_CHARS,
            self._batch,
        )


def begun_ms(message_id: str) -> int | None:
    """When the message's batch was begun, by its producer's clock; None: not an id of ours."""
    return int(message_id[:_TIME_CHARS], 16) if _ID.fullmatch(message_id) else None
