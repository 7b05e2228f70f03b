"""A callback that gets lists says which messages failed; the others are done."""

import sys
import threading

from duemq import Admin, BatchFailed, DeadLetter, Message, Producer, PushConsumer, RetryLater

NAMESERVER = sys.argv[1] if len(sys.argv) > 1 else None  # None: as DUEMQ_NAMESERVER says

billed: list[Message] = []
all_billed = threading.Event()


def charge(message: Message) -> None:
    if message.body == b"order 3" and message.attempt == 1:
        raise ConnectionError("the bank does not answer")
    if message.body == b"order 7":
        raise LookupError("no such customer")


def bill(messages: list[Message]) -> None:
    failed: dict[Message, Exception] = {}
    for message in messages:
        try:
            charge(message)
        except ConnectionError as error:
            failed[message] = RetryLater("200ms", str(error))
        except LookupError as error:
            failed[message] = DeadLetter(str(error))
        else:
            billed.append(message)
    if len(billed) == 9:
        all_billed.set()
    if failed:
        raise BatchFailed(failed)


with Producer(NAMESERVER) as producer:
    producer.send_many("bills", [b"order %d" % number for number in range(10)])
with PushConsumer(
    "billing", "bills", bill, batch=True, start_from="earliest", nameserver=NAMESERVER
):
    all_billed.wait(30)

print(len(billed), "billed")
for message in billed:
    if message.retry:
        print(message.body.decode(), "at the second time, for", message.retry.error)
with Admin(NAMESERVER) as admin:
    for letter in admin.dead_letters("billing"):
        print(letter.body.decode(), "is a dead letter:", letter.retry and letter.retry.error)
