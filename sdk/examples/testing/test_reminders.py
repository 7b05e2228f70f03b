import pytest

from duemq.testing import MemoryCluster


class Reminders:
    """What is tested: who has not paid after a day is reminded."""

    def __init__(self, producer, mail):
        self.producer = producer
        self.mail = mail

    def ordered(self, order):
        return self.producer.send("reminders", order.encode(), key=order, delay="1d").handle

    def paid(self, handle):
        self.producer.cancel(handle)

    def remind(self, message):
        self.mail(f"please pay {message.key}")


@pytest.fixture
def cluster():
    return MemoryCluster()


@pytest.fixture
def mails():
    return []


@pytest.fixture
def reminders(cluster, mails):
    reminders = Reminders(cluster.producer(), mails.append)
    with cluster.push_consumer("mailer", "reminders", reminders.remind):
        yield reminders


def test_a_reminder_comes_after_a_day(cluster, reminders, mails):
    reminders.ordered("a-1")
    cluster.advance("23h")
    assert mails == []
    cluster.advance("1h")
    assert mails == ["please pay a-1"]


def test_who_pays_is_not_reminded(cluster, reminders, mails):
    reminders.paid(reminders.ordered("a-1"))
    cluster.advance("2d")
    assert mails == []
    assert cluster.pending() == []


def test_without_a_mail_server_reminders_become_dead_letters(cluster, reminders):
    def away(text):
        raise ConnectionError("no mail server")

    reminders.mail = away
    reminders.ordered("a-1")
    cluster.advance("1d")
    [retry] = cluster.pending()
    assert retry.due_ms == cluster.now_ms + 10_000
    cluster.advance("5h")
    [dead] = cluster.dead_letters("mailer")
    assert (dead.key, dead.deliveries) == ("a-1", 17)
    assert dead.retry.error == "ConnectionError: no mail server"
