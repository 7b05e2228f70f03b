"""Messages that repeat: a report on weekdays, and a beat every second."""

import sys
from contextlib import suppress

from duemq import Admin, PullConsumer
from duemq.errors import TopicExists

NAMESERVER = sys.argv[1] if len(sys.argv) > 1 else None  # None: as DUEMQ_NAMESERVER says

with Admin(NAMESERVER) as admin:
    with suppress(TopicExists):
        admin.create_topic("beats")
    # Weekdays at nine in Berlin, also on the days when clocks are changed there.
    outcome, schedule = admin.put_schedule(
        "report", topic="beats", body=b"never seen", cron="0 9 * * MON-FRI", zone="Europe/Berlin"
    )
    print(outcome, [each.at_ms for each in admin.next_occurrences("report", 3)])
    admin.pause_schedule("report")  # what waits of it is taken away
    print("deleted", admin.delete_schedule("report"))

    # Three times, a second apart.
    admin.put_schedule("beat", topic="beats", body=b"beat", every="1s", count=3)
    # The same name: it is changed.
    outcome, schedule = admin.put_schedule(
        "beat", topic="beats", body=b"changed beat", every="1s", count=3
    )
    print(outcome)

    with PullConsumer(nameserver=NAMESERVER) as consumer:
        consumer.assign("beats", start_from="earliest")
        beats = 0
        while beats < 3:
            for message in consumer.poll(30.0):
                beats += message.body == b"changed beat"
        print(beats, message.body.decode(), "of", message.properties["duemq.schedule"])
    print("ended", admin.schedule("beat").ended)
    admin.delete_schedule("beat")
