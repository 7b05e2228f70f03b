"""The three ways to say when, and cancelling."""

import sys
from datetime import UTC, datetime, timedelta

from duemq import CancelOutcome, Producer

NAMESERVER = sys.argv[1] if len(sys.argv) > 1 else None  # None: as DUEMQ_NAMESERVER says

with Producer(NAMESERVER) as producer:
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    receipts = [
        producer.send("reminders", b"in a day and a half", delay="1d12h"),
        producer.send("reminders", b"tomorrow", deliver_at=tomorrow),
        producer.send("reminders", b"level 18: two hours", delay_level=18),
    ]
    for receipt in receipts:
        print(datetime.fromtimestamp(receipt.due_ms / 1000, UTC).isoformat(), receipt.handle)
    outcomes = producer.cancel([receipt.handle for receipt in receipts])
    print(all(outcome is CancelOutcome.CANCELLED for outcome in outcomes))
