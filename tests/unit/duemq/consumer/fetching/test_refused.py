"""Who hears that a broker refuses a whole pull."""

import asyncio
from types import SimpleNamespace

import pytest

from duemq.consumer.fetching.fetcher import Fetcher, Source
from duemq.consumer.fetching.subscription import ALL
from duemq.consumer.settings import ConsumerSettings
from duemq.errors import PermissionDenied
from duemq.protocol.balance import MessageQueue

ATTEMPTS = 3


@pytest.mark.parametrize("member", ["m", ""])
async def test_a_reader_hears_it_of_each_queue_and_a_member_s_log_has_one_line(
    member, monkeypatch, caplog
):
    async def refused(*_):
        raise PermissionDenied("me may not consume in group g")

    async def pause(broker, backoff):
        backoff.next_s()
        if backoff.attempts == ATTEMPTS:
            raise asyncio.CancelledError

    told = []
    client = SimpleNamespace(pause=pause)
    sink = SimpleNamespace(refused=lambda source, error: told.append(source))
    fetcher = Fetcher(client, "b", sink, ConsumerSettings(), group="g", member_id=member)
    sources = [Source(MessageQueue("t", "b", number), ALL, 0, 0) for number in range(4)]
    for source in sources:
        fetcher.add(source)
    monkeypatch.setattr(fetcher, "_connected", refused)
    with pytest.raises(asyncio.CancelledError):
        await fetcher.run()
    assert set(told) == (set() if member else set(sources))
    assert [each.levelname for each in caplog.records if each.levelno > 10] == ["WARNING"]
