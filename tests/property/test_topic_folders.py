"""Names of topics as names of folders: each topic has one of its own, and it tells the name."""

import os
import re

from hypothesis import given
from hypothesis import strategies as st

from duemq.protocol import names
from duemq_server.broker.store.queues import QueueTable
from duemq_server.broker.store.topics import Topic
from duemq_server.storage.disk import RealDisk
from duemq_server.storage.open_files import OpenFiles

NAMES = st.from_regex(re.compile(r"[A-Za-z0-9_.|-]{1,12}"), fullmatch=True).filter(
    lambda name: name not in (".", "..")
)
TOPICS = st.builds(
    lambda name, number: Topic(name=name, id=number, queues=1, message_bytes_max=0),
    NAMES,
    st.integers(1, 30),
)


def folder(topic: Topic) -> str:
    table = QueueTable("/data", RealDisk(), OpenFiles(RealDisk()))
    return table._folder(topic)


@given(TOPICS, TOPICS)
def test_two_topics_share_no_folder(one: Topic, other: Topic) -> None:
    names.check_topic(one.name)
    assert (folder(one) == folder(other)) == ((one.name, one.id) == (other.name, other.id))


@given(TOPICS)
def test_a_folder_tells_its_topic_and_is_no_other_place(topic: Topic) -> None:
    root, name = os.path.split(folder(topic))
    assert root == "/data/consumequeue"
    assert os.path.normpath(folder(topic)) == folder(topic)
    assert name.rpartition(".")[0] == topic.name  # storage check reads it so
