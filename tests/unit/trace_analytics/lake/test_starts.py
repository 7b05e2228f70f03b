"""Where a landing job begins whose checkpoint is lost."""

import logging
from dataclasses import replace

import pytest

from duemq.errors import TopicReplaced
from duemq_analytics.lake.commits import Commits
from duemq_analytics.lake.landing import starts_of
from duemq_analytics.lake.parquet_spans import ParquetSpans
from duemq_analytics.lake.span_table import Batch, merged_topic_ends
from duemq_analytics.options import Options
from duemq_analytics.source.plan import QueueBounds

STRICT = Options("t")
LENIENT = replace(STRICT, fail_on_data_loss=False)
QUEUES = [QueueBounds("b0", "h:1", queue, 0, 50, topic_id=7) for queue in (0, 1)]
ANEW = [replace(queue, topic_id=9) for queue in QUEUES]


def batch(key="q-1", topic_ids=None, **ends):
    return Batch(key, (), (), ends, 0, topic_ids=topic_ids or {})


def ends(*batches):
    return merged_topic_ends(each.topic_ends for each in batches)


def test_where_the_topic_was_landed_to():
    told = ends(batch(b0={"0": 3}, topic_ids={"b0": 7}), batch(b0={"0": 5}, topic_ids={"b0": 7}))
    assert starts_of(told, QUEUES, STRICT) == {"b0": {"0": 5}}


@pytest.mark.parametrize("queues", [QUEUES, [replace(queue, topic_id=0) for queue in QUEUES]])
def test_where_nobody_tells_which_topic_it_is_it_is_the_same(queues):
    told = ends(batch(b0={"0": 3}), batch(b0={"1": 5}, topic_ids={"b0": 7}))
    assert starts_of(told, queues, STRICT) == {"b0": {"0": 3, "1": 5}}


def test_what_older_commits_tell_of_an_earlier_topic_is_not_taken_for_one_made_anew():
    """Their offsets may be beyond what the new one had when it was landed last."""
    earlier = [batch(b0={"0": 30, "1": 40}), batch(b0={"0": 31}, topic_ids={"b0": 7})]
    assert starts_of(ends(*earlier), ANEW, LENIENT) == {"b0": {}}
    again = batch(b0={"0": 4}, topic_ids={"b0": 9})
    assert starts_of(ends(*earlier, again), ANEW, STRICT) == {"b0": {"0": 4}}
    assert starts_of(ends(batch(b0={"0": 30}), again), ANEW, STRICT) == {"b0": {"0": 4}}


def test_of_a_topic_made_anew_nothing_is_passed_over(caplog):
    told = ends(batch(b0={"0": 30, "1": 40}, b1={"0": 8}, topic_ids={"b0": 7, "b1": 2}))
    with pytest.raises(TopicReplaced, match="made anew since offset 30"):
        starts_of(told, ANEW, STRICT)
    with caplog.at_level(logging.WARNING):
        assert starts_of(told, ANEW, LENIENT) == {"b0": {}, "b1": {"0": 8}}
    assert "made anew since offset 40" in caplog.text


def test_the_new_one_goes_on_where_it_was_landed_to_whatever_the_old_one_had():
    told = ends(
        batch(b0={"0": 30, "1": 40}, topic_ids={"b0": 7}), batch(b0={"0": 4}, topic_ids={"b0": 9})
    )
    assert starts_of(told, ANEW, STRICT) == {"b0": {"0": 4}}


def test_compactions_keep_topics_apart_and_read_those_of_before(tmp_path):
    table = ParquetSpans(tmp_path)
    table.compact(None, (), None)
    commits = Commits(tmp_path / "_batches")
    base = commits.get("base")
    del base["topic_ends"]
    commits.put("base", base | {"ends": {"b0": {"0": 2}}})
    batches = [
        batch("q-0", b0={"0": 30}, topic_ids={"b0": 7}),
        batch("r-0", b0={"0": 4}, topic_ids={"b0": 9}),
        batch("r-1", b0={"0": 5}, topic_ids={"b0": 9}),
    ]
    for each in batches:
        commits.put(each.key, each.as_json())
    told = {key: {"b0": {"0": at}} for key, at in (("0", 2), ("7", 30), ("9", 5))}
    assert table.topic_ends() == told
    (tmp_path / "_checkpoint").mkdir()
    (tmp_path / "_checkpoint/metadata").write_text('{"id": "r"}')
    table.compact(None, {each.key for each in batches}, None)
    assert [each.key for each in table.batches()] == ["r-1"]
    assert table.topic_ends() == told
