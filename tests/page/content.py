"""A page that has everything, of rows made up: two hours of two topics."""

import random
from datetime import timedelta

from duemq_analytics.page.document import Content, document
from tests.unit.trace_analytics.page.made_rows import (
    MINUTE,
    delivery,
    end_to_end,
    example,
    lateness,
    operation,
)
from tests.unit.trace_analytics.waterfall.test_drawing import span

MINUTES = 120
GROUPS = [
    f"billing-{number:02}" if number % 3 else f"a-group-with-a-much-longer-name-of-team-{number:02}"
    for number in range(16)
]
FEW = ["mail", "push", "a_group_of_another_team_whose_name_has_no_end"]
LENGTHS = (None, *range(MINUTES))


def page():
    """The HTML."""
    rng = random.Random(7)
    first, last = MINUTE, MINUTE + timedelta(minutes=MINUTES)
    facts = {"spans": 1_234_567, "undecodable": 2, "topics": ["orders", "reminders"]}
    content = Content(
        facts | {"first": first, "last": last, "charted": (first, last), "outside": 1},
        {
            "operations": _operations(rng),
            "end_to_end": [
                end_to_end(at, group, p99=rng.expovariate(1 / 400) + 1)
                for group in GROUPS
                for at in LENGTHS
            ],
            "lateness": [
                lateness(at, stage, group, topic="reminders", p99=rng.expovariate(1 / 9))
                for stage, group in (("fire", None), *(("process", group) for group in FEW))
                for at in LENGTHS
            ],
            "delivery": [delivery(unreceived=1_234, twice=77), delivery("reminders")],
        },
        60,
        _examples(rng),
        {f"{kind}-{n:028x}": _journey(rng) for kind in ("slowest", "latest") for n in range(20)},
        _errors(rng),
    )
    return document(content, last)


def _operations(rng):
    rows = []
    for topic, groups in (("orders", GROUPS), ("reminders", FEW)):
        for name, group in (("send", None), ("store", None), *(("process", g) for g in groups)):
            rows += [
                operation(
                    name,
                    at,
                    group,
                    topic=topic,
                    messages=rng.randrange(1, 90_000),
                    errors=rng.choice([0, 0, 1, 40]),
                    p99=rng.expovariate(1 / 50),
                    retries=12 if group else 0,
                    dead_letters=3 if group else 0,
                )
                for at in LENGTHS
            ]
    return rows


def _errors(rng):
    kinds = ["requests.exceptions.ConnectTimeout", "UNAVAILABLE", None, "(others)"]
    row = {"topic": "orders", "operation": "process", "last_ts": MINUTE, "message_id": "m" * 32}
    return [
        row | {"consumer_group": group, "error_type": kind, "errors": rng.randrange(1, 10**6)}
        for group in GROUPS
        for kind in kinds
    ]


def _examples(rng):
    return [
        example(
            kind,
            f"{kind}-{number:028x}",
            None if kind == "suspect" else rng.choice(GROUPS),
            None if kind == "suspect" else rng.randrange(10**7),
            2,
        )
        for kind in ("slowest", "latest", "suspect", "twice")
        for number in range(20)
    ]


def _journey(rng):
    """Sent, stored, then received and called by each group, once in vain."""
    at = 5
    found = [
        span(0, 12, operation="send", service="checkout", instance="checkout-7f9c6d5b4-x2x9z"),
        span(
            1, 9, operation="store", instance="broker-0", broker="broker-0", queue=3, queue_offset=7
        )
        | {"batch_count": 900},
    ]
    for group in GROUPS:
        at += rng.randrange(300)
        who = {"consumer_group": group, "service": "worker", "instance": "worker-0.workers.svc"}
        found.append(span(at, 1, operation="receive", **who))
        found.append(
            span(at + 2, rng.randrange(60), operation="process", attempt=1, **who)
            | {"status": "ERROR", "error_type": "requests.exceptions.ConnectTimeout"}
        )
    return found
