"""Topics, groups and the cluster."""

import sys

from duemq import Admin, Producer
from duemq.errors import TopicExists

NAMESERVER = sys.argv[1] if len(sys.argv) > 1 else None  # None: as DUEMQ_NAMESERVER says

with Admin(NAMESERVER) as admin, Producer(NAMESERVER) as producer:
    try:
        admin.create_topic("invoices", queues=8)
    except TopicExists as error:
        print(error)
    producer.send("invoices", b"invoice")
    print(admin.describe_topic("invoices").messages, "message")
    for broker in admin.cluster().brokers:
        print(broker.name, broker.error or "up")
    admin.delete_topic("invoices")
    print([topic.name for topic in admin.topics() if topic.name == "invoices"])
