import re

import pytest

from duemq.protocol.message_ids import ID_CHARS, MessageIds, begun_ms

NOW_MS = 1_795_000_000_123


def test_an_id_tells_when_its_batch_was_begun() -> None:
    message_id = MessageIds().head(NOW_MS).decode() + "fff"
    assert re.fullmatch("[0-9a-f]{28}", message_id)
    assert len(message_id) == ID_CHARS
    assert begun_ms(message_id) == NOW_MS


@pytest.mark.parametrize("text", ["", "order-17", "0" * 27, "0" * 29, "F" * 28, "g" * 28])
def test_ids_of_others_tell_nothing(text: str) -> None:
    assert begun_ms(text) is None


def test_batches_of_one_millisecond_and_of_two_producers_differ() -> None:
    ids = [MessageIds(), MessageIds()]
    heads = [each.head(NOW_MS) for each in ids for _ in range(1_000)]
    assert len(set(heads)) == 2_000


def test_a_later_id_is_a_greater_one() -> None:
    ids = MessageIds()
    assert ids.head(NOW_MS) < ids.head(NOW_MS + 1)
