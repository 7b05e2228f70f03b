"""What became of dead letters that were on their way when a resend ends."""

import asyncio
from collections import deque
from types import SimpleNamespace

import pytest

from duemq.administering.letters import dead_letters
from duemq.administering.letters.dead_letters import DeadLetters, Selection
from duemq.administering.letters.resending import Letter
from duemq.message import Origin
from duemq.sent import Receipt
from duemq.settings import ClientSettings
from duemq.v1.message_pb2 import Record

GROUP = "billing"


class Producer:
    """Hands `answers` out, an awaitable a message."""

    def __init__(self, answers):
        self.settings = None
        self.targets = {"orders"}
        self._answers = deque(answers)
        self.all_sent = asyncio.Event()

    def __call__(self, nameservers, settings):
        self.settings = settings
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def ready(self, topic):
        pass

    def submit(self, topic, body, **_):
        answer = self._answers.popleft()
        if not self._answers:
            self.all_sent.set()
        return answer


class Admin(DeadLetters):
    """Has some letters, and remembers which are marked."""

    def __init__(self, letters):
        client = SimpleNamespace(nameservers=(), settings=ClientSettings())
        self._asker = SimpleNamespace(client=client)
        self._letters_of_group = letters
        self.marked = []

    async def _letter_pages(self, selection):
        yield self._letters_of_group

    async def _mark(self, group, outcomes):
        self.marked += [letter.offset for letter, it in outcomes if isinstance(it, Receipt)]


def letter(offset, broker="b0"):
    return Letter(Record(body=b"x"), Origin("%DLQ%billing", broker, 0), offset, 1, resent=False)


async def test_what_was_answered_is_marked_though_another_broker_never_answers(monkeypatch):
    never, receipt = asyncio.Future(), asyncio.Future()
    receipt.set_result(Receipt(None, 0))
    producer = Producer([receipt, never, receipt])
    monkeypatch.setattr(dead_letters, "Producer", producer)
    monkeypatch.setattr(dead_letters, "CALLED_OFF_S", 0.01)
    admin = Admin([letter(0), letter(1), letter(2)])
    pages = admin._resent_pages(Selection(GROUP), "orders")
    resending = asyncio.create_task(anext(pages))
    await producer.all_sent.wait()
    resending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resending
    assert admin.marked == [0, 2]
    assert producer.settings.close_timeout_s < 1  # it was waited for


async def test_what_is_cancelled_is_marked_though_a_broker_of_letters_does_not_answer(monkeypatch):
    marked, asked = [], asyncio.Event()

    async def at(broker, method):
        asked.set()
        if broker == "b0":
            await asyncio.Future()
        marked.append(broker)

    monkeypatch.setattr(dead_letters, "CALLED_OFF_S", 0.01)
    admin = DeadLetters(SimpleNamespace(settings=ClientSettings()))
    admin._asker.at = at
    receipt = asyncio.Future()
    receipt.set_result(Receipt(None, 0))
    page = [letter(0), letter(0, "b1")]
    resending = asyncio.create_task(
        admin._resend(Producer([receipt] * 2), page, GROUP, "orders", {})
    )
    await asked.wait()
    resending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resending
    assert "b1" in marked
